"""Checkpoints of a run: last.safetensors and best.safetensors in a folder of its own.

Each holds the step's state with the optimiser's moments, as `step.save` writes them, and in the metadata where the run
stands: epochs and steps done, the sum of the losses of the epoch begun, the history, and the settings that must be the
same for the run to go on. A checkpoint takes its name when it is whole on the disk. One run at a time has the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from bnfuse.core.errors import BnfuseError
from bnfuse.core.tensor_files import read_metadata
from bnfuse.data import Dataset
from bnfuse.data.loaders import LoadedImages
from bnfuse.data.streamed import StreamedImages
from bnfuse.graph.initial_values import digest_of_values
from bnfuse.training.history import Epoch, epoch_from

if TYPE_CHECKING:
    from bnfuse.runtime import Step

KEY = "bnfuse.training"
VERSION = 1
LAST, BEST, LOCK = "last.safetensors", "best.safetensors", ".lock"
HASHED = ("model", "data")  # settings that are digests: of no use to people
UNTOLD = ("mean", "std")  # what runs of earlier versions do not tell
COUNTS = ("count", "elements", "extent", "first", "samples")  # attributes that follow from the batch
WEIGHTS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands: behind `step` steps of the epoch that follows `epoch` whole ones."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0  # over these steps; a smaller batch counts for its share of a whole one
    seconds: float = 0.0  # that they took
    waited: float = 0.0  # of these, for images
    history: tuple[Epoch, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run's batches are divided: over how many ranks, and how many images each of them takes. `network` is a
    digest of what the graphs for all of these have in common."""

    ranks: int = 1
    batch: int = 0
    network: str = ""

    def __str__(self) -> str:
        return f"{self.ranks} rank{'' if self.ranks == 1 else 's'} of {self.batch} images"


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint says of its run beside the tensors."""

    position: Position
    settings: dict[str, Any]
    machine: str
    loss_scale: float
    layout: Layout | None = None  # of files that know of none the run was of one process

    def to_json(self) -> str:
        """Write it as it stands in the checkpoint's metadata."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Saved:
        """Read what `to_json` wrote. Raises ValueError where the text is something else."""
        try:
            fields = json.loads(text)
            if fields["version"] != VERSION:
                raise ValueError("it is of another version of bnfuse")
            settings, machine = fields["settings"], fields["machine"]
            if not isinstance(settings, dict) or not isinstance(machine, str):
                raise ValueError("its settings are none")
            position, scale = position_from(fields["position"]), finite(fields["loss_scale"])
            return cls(position, settings, machine, scale, layout_from(fields.get("layout")))
        except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__} {error}") from None


def position_from(fields: Mapping[str, Any]) -> Position:
    """Read a position from JSON's types. Raises ValueError, TypeError or KeyError where they are something else."""
    history = tuple(epoch_from(epoch) for epoch in fields["history"])
    epoch, step = fields["epoch"], fields["step"]
    if type(epoch) is not int or type(step) is not int or step < 0 or len(history) != epoch:
        raise ValueError("its place in the run is none")
    seconds, waited = finite(fields["seconds"]), finite(fields.get("waited", 0.0))
    return Position(epoch, step, finite(fields["loss_sum"]), seconds, waited, history)


def layout_from(fields: Mapping[str, Any] | None) -> Layout | None:
    """Read a layout from JSON's types. Raises ValueError, TypeError or KeyError where they are something else."""
    if fields is None:
        return None
    found = Layout(fields["ranks"], fields["batch"], fields["network"])
    if type(found.ranks) is not int or type(found.batch) is not int or not isinstance(found.network, str):
        raise ValueError("its layout is none")
    return found


def finite(value: Any) -> float:
    """Give the number. Raises ValueError where it is text, nan or infinite."""
    if isinstance(value, str) or not math.isfinite(float(value)):
        raise ValueError(f"{value!r} where a number should be")
    return float(value)


class Folder:
    """The folder of one run. A context: it is locked within, and left-overs of a run that was killed are gone."""

    def __init__(self, path: Path) -> None:
        self.path, self.last, self.best = path, path / LAST, path / BEST

    def __enter__(self) -> Folder:
        make_folder(self.path)
        try:
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise BnfuseError(f"{self.path}: no folder to write to: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise BnfuseError(f"{self.path}: another run is writing there: name another folder") from None
        for name in (LAST, BEST):
            remove_leftovers(self.path, name)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def write(self, step: Step, saved: Saved, *, best: bool = False) -> None:
        """Write the last checkpoint, or the best one, whole or not at all."""
        step.save(self.best if best else self.last, {KEY: saved.to_json()})


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what writing the file `name` left when it was killed."""
    temporary = re.compile(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}")  # as io.write_atomically names them
    for path in folder.glob(".*"):
        if temporary.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a place for checkpoints means a folder: it is one, or it is not there and has no ending of a
    file."""
    path = Path(path)
    return path.is_dir() or (not path.exists() and path.suffix != ".safetensors")


def make_folder(path: Path) -> None:
    """Make the folder, unless it is there. Raises BnfuseError where it cannot be made."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        what = f"cannot be written: {error.strerror}. Make the folder that it is to lie in, or name another."
        raise BnfuseError(f"{path}: {what}") from None


def has_run(folder: Path) -> bool:
    """Tell whether the folder has a checkpoint to go on from."""
    return (folder / LAST).exists()


def read_saved(path: Path) -> Saved:
    """Read where the run of a checkpoint stands."""
    text = read_metadata(path).get(KEY)
    if text is None:
        raise BnfuseError(f"{path}: holds a state but no run: pass the file itself to --resume to start from it")
    try:
        return Saved.from_json(text)
    except ValueError as error:
        raise BnfuseError(f"{path}: its {KEY} metadata is damaged ({error}): start anew in another folder") from None


def restore(
    step: Step, path: Path, settings: dict[str, Any], machine: str, steps: int, layout: Layout | None = None
) -> tuple[Position, tuple[str, ...]]:
    """Put the step where the run of a checkpoint stands. Gives that place, and notes where bits may differ.

    `steps` are those of an epoch. A run may go on over another number of ranks, at the same batch of all of them: its
    network is told by what graphs for any number have in common.
    """
    saved = read_saved(path)
    moved = layout is not None and layout != (saved.layout or dataclasses.replace(layout, ranks=1))
    if moved and layout is not None and settings.get("batch") == saved.settings.get("batch"):
        if saved.layout is None:
            raise BnfuseError(f"{path}: is a run of an older bnfuse: continue it in one process, as it began")
        if layout.network == saved.layout.network:
            saved = dataclasses.replace(saved, settings={**saved.settings, "model": settings.get("model")})
    for name in sorted({*settings, *saved.settings}):
        now, then = settings.get(name), saved.settings.get(name)
        if now != then:
            what = f"another {name}" if name in HASHED else f"{name} {then}, not {now}"
            if name in UNTOLD and name not in saved.settings:
                what = f"images of a {name} that it does not tell, for it is of an earlier version"
            raise BnfuseError(
                f"{path}: is a run with {what}: continue it as it began, start anew in another folder, or begin "
                f"another run with its state (--resume {path})"
            )
    if saved.position.step >= steps:
        where = f"behind step {saved.position.step} of an epoch of {steps}"
        raise BnfuseError(f"{path}: its {KEY} metadata is damaged (it stands {where}): start anew in another folder")
    load_finite(step, path)
    if step.steps == step.pending == 0 and (saved.position.epoch or saved.position.step):
        raise BnfuseError(f"{path}: lacks the optimiser's state, which a run needs to go on: start anew from the file")
    if step.target.precision == "fp16":
        step.loss_scale = saved.loss_scale
    notes = []
    if saved.machine != machine:
        notes.append(f"the run began on {saved.machine} and goes on with {machine}: the last bits may differ")
    if moved and saved.layout is not None:
        notes.append(
            f"the run was of {saved.layout} and goes on with {layout}: sums are taken in another order, and BatchNorms "
            "that are not synchronised take their statistics from the images of a rank"
        )
    return saved.position, tuple(notes)


def load_finite(step: Step, path: str | os.PathLike[str]) -> None:
    """Load the state of a file. Raises BnfuseError where training cannot go on from it."""
    step.load(Path(path))
    if (name := step.not_finite()) is not None:
        raise BnfuseError(f"{path}: its '{name}' holds values that are not finite: begin with another state")


def machine_of(step: Step) -> str:
    """Tell what decides the last bits of the results."""
    return step.target.machine


def digest_of_model(step: Step) -> str:
    """Digest the model that the step was compiled from: 16 hex digits."""
    return hashlib.sha256(step.model).hexdigest()[:16]


def digest_of_network(step: Step) -> str:
    """Digest what the graphs of one network have in common at any batch, 16 hex digits: its nodes, with all attributes
    but counts, and its values but those that shapes and counts follow from."""
    model = onnx.ModelProto.FromString(step.model)
    graph, found = model.graph, hashlib.sha256(digest_of_values(model).encode())
    sizes = {tensor.name for tensor in graph.initializer if not is_weight(tensor)}  # which are named by what they hold
    for node in graph.node:
        told = (node.domain, node.op_type, [name for name in node.input if name not in sizes], list(node.output))
        kept = [a for a in node.attribute if a.name not in COUNTS and not (a.HasField("t") and not is_weight(a.t))]
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in kept)
        found.update(repr((told, attributes)).encode(errors="backslashreplace"))
    for tensor in sorted(filter(is_weight, graph.initializer), key=lambda tensor: tensor.name):
        array = onnx.numpy_helper.to_array(tensor)
        found.update(repr((tensor.name, array.shape)).encode(errors="backslashreplace") + array.tobytes())
    return found.hexdigest()[:16]


def is_weight(tensor: onnx.TensorProto) -> bool:
    """Tell whether a constant is no shape, count or share that follows from the batch."""
    return tensor.data_type in WEIGHTS and len(tensor.dims) > 0


def digest_of_data(data: Dataset) -> str:
    """Digest all images and labels; of streamed images, which they are, and how large their files."""
    found = hashlib.blake2b(digest_size=8)
    for array in (array for part in data.parts.values() for array in part):
        found.update(f"{array.dtype} {array.shape}".encode())
        if isinstance(array, LoadedImages):
            found.update(array.identity.encode(errors="surrogatepass"))
            continue
        if isinstance(array, StreamedImages):
            found.update(repr((array.share, data.mean, data.std)).encode())
            for index in range(len(array)):
                found.update(array.items.identity(index).encode(errors="surrogatepass"))
            continue
        for start in range(0, len(array), 1024):
            found.update(array[start : start + 1024].tobytes())
    return found.hexdigest()
