"""Where the numbers of a run go while it runs: a file of lines (metrics.py), and a folder that TensorBoard shows.

TensorBoard's files are written by tensorboardX, which writes and does nothing else. A run that goes on from a
checkpoint, or begins anew in the folder of another, tells TensorBoard from which step on older numbers do not count.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.training.metrics import Metrics

TAGS = {  # field of a line of metrics -> what TensorBoard calls it
    "loss": "loss/train",
    "held_out_loss": "loss/held_out",
    "accuracy": "accuracy/held_out",
    "top5": "accuracy/top5",
    "balanced_accuracy": "accuracy/balanced",
    "mean_iou": "accuracy/mean_iou",
    "waited": "waited",
    "ema_accuracy": "accuracy/average",
    "ema_loss": "loss/average",
    "lr": "lr",
    "images_per_second": "images_per_second",
}


def require_tensorboard(folder: Path) -> None:
    """Check before any work that numbers can be written there for TensorBoard; makes the folder."""
    writer_type()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BnfuseError(f"{folder}: cannot be written: {error.strerror}. Name another folder.") from None


def writer_type() -> Any:
    """Import tensorboardX's writer. Raises BnfuseError where it is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise BnfuseError("--tensorboard needs tensorboardX: pip install 'bnfuse[tensorboard]'") from None
    return SummaryWriter


class Tracker:
    """All that the numbers of a run go to; a context."""

    def __init__(self, metrics: Path | None, board: Path | None, *, keep: int) -> None:
        """`keep`: what was written of steps behind this one no longer counts."""
        self.metrics, self.folder, self.keep = Metrics(metrics, keep=keep), board, keep
        self.board: Any = None

    def __enter__(self) -> Tracker:
        self.metrics.__enter__()
        if self.folder is not None:
            suffix = f".{self.keep:010d}"  # two runs of one second would have one name
            self.board = writer_type()(str(self.folder), purge_step=self.keep + 1, filename_suffix=suffix)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.metrics.__exit__(kind, error, at)
        if self.board is not None:
            self.board.close()

    def write(self, **fields: Any) -> None:
        """Write a line of metrics: kind, epoch, step, and numbers, of which None is left out for TensorBoard."""
        self.metrics.write(**fields)
        if self.board is None:
            return
        of_step = fields["kind"] == "step"
        for name, tag in TAGS.items():
            value = fields.get(name)
            if value is not None and math.isfinite(value):
                self.board.add_scalar(f"{tag}_of_step" if of_step else tag, value, fields["step"])
        if not of_step:
            self.board.flush()
