"""What a step is fed with: data of its size, random batches, and how well it does on images held out."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, join
from bnfuse.data import Dataset, batches, load_data
from bnfuse.data.dataset import check_all_labels
from bnfuse.data.targets import Target, are_alike, checked, chosen_first, fed_labels, scored
from bnfuse.graph.labels import classes_of
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.training.history import percent
from bnfuse.training.loading import Loader, fed, prefetched
from bnfuse.training.nonfinite import error_of_evaluation

if TYPE_CHECKING:
    from bnfuse.runtime import Step


def run_steps(step: Step, data: Any, *, steps: int, seed: int = 0) -> list[float]:
    """Run `steps` steps on shuffled batches of the data, or on one random batch. Gives their losses."""
    if data is None:
        feeds = random_feeds(step, np.random.default_rng(seed))
        return [step(*(feeds[name] for name in step.inputs)) for _ in range(steps)]
    found = data_for(step, data)
    Loader(found, batch_of(step))  # complains where no batch is full
    epochs = (batches(found.train_x, found.train_y, batch_of(step), seed=seed, epoch=e) for e in itertools.count(1))
    some = itertools.islice(itertools.chain.from_iterable(epochs), steps)
    return [step(x, *fed_labels(y, label_inputs(step))) for x, y in some]


def label_inputs(step: Step) -> tuple[str, ...]:
    """List the inputs with labels that a call of the step takes behind the data."""
    return tuple(name for name in step.inputs if name in step.program.signature["labels"])


def random_feeds(step: Step, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw standard normal images, and labels over all classes."""
    tensors = step.program.inputs
    feeds: dict[str, np.ndarray] = {}
    for name in step.inputs:
        dims, dtype = tensors[name].shape, np.dtype(tensors[name].dtype)
        if dtype.kind == "f":
            feeds[name] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[name] = rng.integers(0, classes_of_step(step, name) or 2, dims).astype(dtype)
    return feeds


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a network does on images: each of them counted once, by the running statistics."""

    images: int
    right: int  # whose largest logit is their label's
    loss: float  # mean cross-entropy of the logits, in float64, whatever the loss of the training is

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / max(self.images, 1)

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {"images": self.images, "right": self.right, "accuracy": self.accuracy, "loss": self.loss}

    def sections(self) -> list[Section]:
        """Show it in a line."""
        line = f"{percent(self.accuracy)} right of {self.images:,} images, cross-entropy {self.loss:.4f}"
        return [Section.lines("Evaluation", [line])]

    def __str__(self) -> str:
        return join(self.sections())


def evaluate_step(step: Step, images: np.ndarray, labels: np.ndarray) -> Evaluation:
    """Evaluate a step on any number of images [N, C, H, W] with integer labels [N].

    Every image counts once: the last batch is filled up, and what filled it is not counted. Raises DivergedError where
    a logit is not finite.
    """
    return evaluate_batches(step.evaluate, slices(images, labels, batch_of(step)))


def evaluate_data(
    step: Step, data: Dataset, part: tuple[np.ndarray, np.ndarray] | None = None, *, normalise: bool = False
) -> Evaluation:
    """Do what `evaluate_step` does on a part of the data (by default the one held out), normalised as the training part
    is."""
    made = ((fed(data, x, normalise), y) for x, y in slices(*(part or data.held_out), batch_of(step)))
    return evaluate_batches(step.evaluate, made)


def evaluate_batches(
    logits_of: Callable[[np.ndarray], np.ndarray], parts: Iterator[tuple[np.ndarray, np.ndarray]]
) -> Evaluation:
    """Evaluate what gives logits [N, classes] of images, over batches of images and labels. Raises DivergedError where
    a logit is not finite."""
    count, right, loss = 0, 0, 0.0
    with prefetched(parts) as ready:
        for x, y in ready:
            logits = logits_of(x)
            if logits.ndim != 2 or len(logits) != len(y):
                raise BnfuseError(
                    f"the network gives {list(logits.shape)} for {len(y)} images: logits are [N, classes]"
                )
            if not np.isfinite(logits).all():
                raise error_of_evaluation(x)
            count += len(y)
            right += int((logits.argmax(1) == scored(y)).sum())
            loss += float(cross_entropies(logits, scored(y)).sum())
    return Evaluation(count, right, loss / max(count, 1))


def cross_entropies(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Compute -log p of each label [N] from logits [N, classes], in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    found: np.ndarray = np.log(np.exp(wide).sum(1)) - wide[np.arange(len(labels)), labels]
    return found


def slices(images: np.ndarray, labels: np.ndarray, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Go through images and labels in order, `batch` at a time; the last one has what is left."""
    for start in range(0, len(labels), batch):
        yield images[start : start + batch], labels[start : start + batch]


def data_for(source: Step | TrainingGraph, data: Any, **options: Any) -> Dataset:
    """Read a data set by name, folder or file, brought to the size of the graph's input and normalised."""
    found = raw_data_for(source, data, **options)
    return found if isinstance(data, Dataset) else found.normalised()


def raw_data_for(source: Step | TrainingGraph, data: Any, **options: Any) -> Dataset:
    """Read it and do not normalise it. A graph tells all that is asked of it before it is compiled. `options` are those
    of `load_data`; a Dataset is taken as it is, where it fits."""
    taken = taken_by(source)
    if isinstance(data, Dataset):
        check_given(data, taken)
        return data
    if not isinstance(data, str | os.PathLike):
        raise BnfuseError(f"data is a {type(data).__name__}: give a name, a path, or a bnfuse.data.Dataset of arrays")
    _, channels, height, width = taken.shape
    if height != width:
        raise BnfuseError(f"the graph takes images of {height}x{width}: give it a Dataset of that size in Python")
    return load_data(data, image=height, channels=channels, classes=taken.classes, targets=taken.targets, **options)


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a graph takes: images [N, C, H, W], and labels, those that are scored first."""

    shape: tuple[int, ...]
    targets: tuple[Target, ...]

    @property
    def classes(self) -> int | None:
        """How many classes the labels that are scored run over, if that is known."""
        return self.targets[0].classes


def taken_by(source: Step | TrainingGraph) -> Taken:
    """Tell what a graph takes. Raises BnfuseError where that is something else than images and labels for each."""
    if isinstance(source, TrainingGraph):
        roles = dataclasses.asdict(source.signature)
    else:
        roles = source.program.signature
    inputs = inputs_of(source, (*roles["data"], *roles["labels"]))
    data, labels = ([name for name in roles[role] if name in inputs] for role in ("data", "labels"))
    if len(data) != 1 or not labels:
        names = ", ".join((*data, *labels)) or "nothing"
        raise BnfuseError(f"the graph takes {names}: data sets are images and labels. Compile it and call the step.")
    (shape, _), name = inputs[data[0]], data[0]
    if len(shape) != 4:
        raise BnfuseError(f"the graph's input '{name}' is {list(shape)}: images need N, C, H, W")
    if shape[1] > 4 and shape[3] in (1, 3, 4) and shape[2] != shape[3]:
        raise BnfuseError(
            f"the graph's input '{name}' is {list(shape)}, with the channels last: data sets are fed as N, C, H, W. "
            "Export the network with its channels first."
        )
    for label in labels:
        label_shape, label_type = inputs[label]
        fits = label_shape[:1] == shape[:1] and (len(labels) > 1 or (len(label_shape) == 1 and label_type.kind in "iu"))
        if not fits:
            raise BnfuseError(
                f"the graph's input '{label}' is {label_type} {list(label_shape)}: data sets have an integer label for "
                f"each image, {[shape[0]]}. Compile it and call the step."
            )
    targets = [target_of(source, name, *inputs[name]) for name in labels]
    return Taken(shape, chosen_first(targets, roles["logits"], classes_of_logits(source)))


Inputs = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def inputs_of(source: Step | TrainingGraph, names: Sequence[str]) -> Inputs:
    """Give shape and type of those of the inputs that there are."""
    if isinstance(source, TrainingGraph):
        return {name: (source.shape_of(name), source.dtype_of(name)) for name in names}
    tensors = source.program.inputs
    return {name: (tensors[name].shape, np.dtype(tensors[name].dtype)) for name in names if name in tensors}


def target_of(source: Step | TrainingGraph, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Target:
    """Tell what labels an input takes."""
    if dtype.kind == "f":
        return Target(name, shape[1:], dtype)
    if isinstance(source, TrainingGraph):
        said = classes_of(source.model.graph, [name]).get(name)
        count, ignored = (said.count, said.ignored) if said else (classes_of_logits(source), None)
    else:
        given = source.program.classes.get(name, {})
        count, ignored = given.get("count", classes_of_logits(source)), given.get("ignored")
    return Target(name, shape[1:], dtype, count, ignored)


def classes_of_logits(source: Step | TrainingGraph) -> int | None:
    """Tell how many classes the logits tell apart, None where that is not known."""
    if isinstance(source, TrainingGraph):
        try:
            return source.classes()
        except BnfuseError:
            return None
    logits = source.program.outputs.get(source.program.signature["logits"] or "")
    return logits.shape[1] if logits is not None and len(logits.shape) > 1 else None


def classes_of_step(step: Step, label: str) -> int | None:
    """Tell how many classes the integer labels of an input run over, None where that is not known."""
    if label in step.program.classes:
        return int(step.program.classes[label]["count"])
    return classes_of_logits(step)


def check_given(data: Dataset, taken: Taken) -> None:
    """Raise where a Dataset made in Python does not fit to the graph."""
    for part, (x, y) in data.parts.items():
        for name, array in ((f"{part}_x", x), (f"{part}_y", y)):
            if not isinstance(array, np.ndarray):
                raise BnfuseError(f"{data.name}: {name} is a {type(array).__name__}: a Dataset holds numpy arrays")
        if x.shape[1:] != taken.shape[1:]:
            wanted = list(taken.shape[1:])
            raise BnfuseError(
                f"{data.name}: {part}_x has the shape {list(x.shape)}, the graph takes images of {wanted}"
            )
        if len(x) == len(y) == 0 and part != "train":
            continue
        check_given_labels(y, len(x), data.name, part, taken)


def check_given_labels(y: np.ndarray, count: int, name: str, part: str, taken: Taken) -> None:
    """Raise where the labels of a Dataset do not fit to the graph."""
    fields, targets = y.dtype.names, taken.targets
    if fields is None and len(targets) > 1 and not are_alike(targets):
        each = ", ".join(map(str, targets))
        raise BnfuseError(
            f"{name}: {part}_y is one label for each image, the graph takes {each}: give a field for each"
        )
    if fields is not None:
        if fields != tuple(target.name for target in targets):
            wanted = ", ".join(target.name for target in targets)
            raise BnfuseError(f"{name}: {part}_y has the fields {', '.join(fields)}, the graph takes {wanted}")
        for target in targets:
            checked(y[target.name], target, count, f"{name}: {target.name} of {part}_y")
            if y[target.name].dtype != target.dtype:
                raise BnfuseError(f"{name}: {target.name} of {part}_y is {y[target.name].dtype}, not {target.dtype}")
    scores = scored(check_all_labels(y, count, name, f"{part}_x"))
    if taken.classes is not None and int(scores.max()) >= taken.classes:
        raise BnfuseError(f"{name}: {part}_y has labels up to {scores.max()}, the graph {taken.classes} classes")


def fed_statistics(data: Dataset, normalise: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation, channel by channel, of the training images as they are fed: mu_D and sigma_D
    of virtual samples ([Chen18], section 4.2)."""
    count = data.train_x.shape[0] * data.train_x.shape[2] * data.train_x.shape[3]
    parts = [data.train_x[start : start + 4096] for start in range(0, len(data.train_x), 4096)]
    mean = sum(fed(data, part, normalise).sum((0, 2, 3), dtype=np.float64) for part in parts) / count
    if not np.isfinite(mean).all():
        raise BnfuseError(f"{data.name}: holds images that are not finite: virtual samples cannot be drawn like them")
    wide = np.reshape(mean, (1, -1, 1, 1))
    squares = (np.square(fed(data, part, normalise) - wide).sum((0, 2, 3)) for part in parts)
    std = np.sqrt(sum(squares) / count)
    return tuple(map(float, np.ravel(mean))), tuple(map(float, np.ravel(std)))


def image_shape(source: Step | TrainingGraph) -> tuple[int, ...]:
    """Give the shape of the images that the graph takes: N, C, H, W."""
    return taken_by(source).shape


def batch_of(source: Step | TrainingGraph) -> int:
    """Give the number of images in a batch of the graph."""
    return image_shape(source)[0]
