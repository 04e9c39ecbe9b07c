"""From a forward graph to a training file, through onnxruntime-training's C interface and without torch.

built = build("forward.onnx", batch=16)      # .model, .notes
model = build_training_graph("forward.onnx")  # the model alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import onnx

from .forward import read_forward
from .gradients import register_gradients
from .repair import repair
from .shapes import complete_shapes
from .training import NOTES_KEY, add_loss, finish, gradient_graph
from .traps import check_forward, choose_logits
from .variables import choose_variables

__all__ = ["NOTES_KEY", "Built", "build", "build_training_graph"]


@dataclasses.dataclass(frozen=True)
class Built:
    """A training file and what had to be repaired in its source, a line each."""

    model: onnx.ModelProto
    notes: tuple[str, ...]


def build(
    source: onnx.ModelProto | str | Path,
    *,
    loss: str = "cross-entropy",
    batch: int | None = None,
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    train_bn: bool = False,
    logits: str | None = None,
    seed: int = 0,
    file: str | None = None,
) -> Built:
    """The training file of a forward model (docs/training-file.md).

    loss      cross-entropy (int64 labels) or mse (float32 labels of the output's shape)
    batch     fixes the first dimension of every data input
    train     globs of the parameters to train; freeze takes some of them away
    train_bn  BatchNormalization exported for inference becomes training BN
    logits    which output the loss reads, where there are several
    seed      of the values that are drawn where the file holds constants in place of weights
    file      name for messages, where `source` is no path
    """
    forward = read_forward(source, file=file, batch=batch)
    chosen = choose_logits(forward, logits)
    constants, chosen = repair(forward, train_bn=train_bn, loss=loss, logits=chosen, seed=seed)
    check_forward(forward)
    variables = choose_variables(forward, constants, train, freeze)
    added = add_loss(forward, loss, chosen)
    register_gradients()
    built = gradient_graph(forward, variables, added)
    model = finish(built, forward, variables, added)
    complete_shapes(model, forward.file)
    return Built(model, tuple(forward.notes))


def build_training_graph(
    source: onnx.ModelProto | str | Path,
    *,
    loss: str = "cross-entropy",
    batch: int | None = None,
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    train_bn: bool = False,
    logits: str | None = None,
    seed: int = 0,
    file: str | None = None,
) -> onnx.ModelProto:
    """`build` without its notes, which are also in the model's metadata."""
    return build(
        source,
        loss=loss,
        batch=batch,
        train=train,
        freeze=freeze,
        train_bn=train_bn,
        logits=logits,
        seed=seed,
        file=file,
    ).model
