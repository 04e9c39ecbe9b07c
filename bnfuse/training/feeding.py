"""What a step is fed with: data of its size, random batches, and how well it does on images held out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from bnfuse.core.errors import BnfuseError
from bnfuse.data import Dataset, load_data
from bnfuse.data.augment import Augment
from bnfuse.data.dataset import check_all_labels
from bnfuse.data.loaders import LoadedImages, dataset_of, loaders_in
from bnfuse.data.pieces import in_order
from bnfuse.data.streamed import StreamedImages
from bnfuse.data.targets import Target, are_alike, checked, chosen_first, fed_labels, scored
from bnfuse.graph.labels import classes_of
from bnfuse.graph.soft_labels import KEY as SOFTENED
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import static_shape
from bnfuse.training.labelling import Labelling, Recipe
from bnfuse.training.loading import Loader, fed
from bnfuse.training.scoring import Evaluation, evaluate_batches, merged
from bnfuse.training.team import ALONE, Team

if TYPE_CHECKING:
    from bnfuse.runtime import Step


def run_steps(step: Step, data: Any, *, steps: int, seed: int = 0, team: Team = ALONE) -> list[float]:
    """Run `steps` steps on shuffled batches of the data, or on one random batch. Gives their losses. Of several ranks
    each takes its part of every batch."""
    if data is None:
        feeds = random_feeds(step, np.random.default_rng([seed, team.rank] if team.rank else seed))
        return [step(*(feeds[name] for name in step.inputs)) for _ in range(steps)]
    found = data_for(step, data)
    loader = Loader(found, batch_of(step), seed, rank=team.rank, size=team.size)  # complains where no batch is full
    some: Iterator[tuple[np.ndarray, np.ndarray]]
    if isinstance(found.train_x, LoadedImages):
        some = ((batch.x, batch.y) for batch in loader.batches(1, steps))  # an epoch has one batch at the least
    else:
        chosen = (loader.part(places) for _, _, places in loader.places(1, steps))
        some = ((found.train_x[places], found.train_y[places]) for places in chosen)
    some = itertools.islice(some, steps)
    labelling, names = labelling_of(step, found, Recipe()), label_inputs(step)
    return [step(x, *fed_labels(y if labelling is None else labelling.rows(y), names)) for x, y in some]


def label_inputs(source: Step | TrainingGraph) -> tuple[str, ...]:
    """List the inputs with labels that a call of the step takes behind the data."""
    if isinstance(source, TrainingGraph):
        return source.signature.labels
    return tuple(name for name in source.inputs if name in source.program.signature["labels"])


def labelling_of(source: Step | TrainingGraph, data: Dataset, recipe: Recipe) -> Labelling | None:
    """Settle what becomes of the labels of the data; None where they are fed as they are.

    Raises BnfuseError where the recipe asks for numbers for each class, and the step takes classes.
    """
    if not takes_probabilities(source):
        if recipe.is_plain:
            return None
        raise BnfuseError(
            "the step takes a class for each image: label smoothing, class weights, mixup and cutmix need a number for "
            "each class. Give bnfuse.train the graph instead, or compile bnfuse.training.with_soft_labels(graph)"
        )
    if data.train_y.dtype.names is not None:
        names = ", ".join(label_inputs(source))
        raise BnfuseError(
            f"{data.name}: has labels for each of {names}: give one class for each image, for all of them"
        )
    if recipe.weights is not None and not is_softened(source):
        raise BnfuseError(
            "class weights are those of a cross-entropy of classes: build the graph with --loss cross-entropy, without "
            "options of its own"
        )
    classes = classes_of_logits(source)
    assert classes is not None
    if not isinstance(data.train_x, LoadedImages):
        return recipe.labelling(classes, None if isinstance(data.train_x, LoadedImages) else data.train_y)
    if recipe.balances:
        raise BnfuseError(f"{data.train_x.name}: its labels are not known beforehand: give class weights as numbers")
    return recipe.labelling(classes, np.arange(classes))


def takes_probabilities(source: Step | TrainingGraph) -> bool:
    """Tell whether all labels are numbers for each class of each image, float [N, classes] like the logits."""
    names = label_inputs(source)
    inputs, classes = inputs_of(source, names), classes_of_logits(source)
    return bool(names) and all(
        dtype.kind == "f" and len(shape) == 2 and shape[1] == classes for shape, dtype in inputs.values()
    )


def is_softened(source: Step | TrainingGraph) -> bool:
    """Tell whether the labels were classes before `with_soft_labels`."""
    if isinstance(source, TrainingGraph):
        return SOFTENED in source.model.metadata_props
    return any(entry.key == SOFTENED for entry in onnx.ModelProto.FromString(source.model).metadata_props)


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


def evaluate_step(step: Step, images: np.ndarray, labels: np.ndarray) -> Evaluation:
    """Evaluate a step on any number of images [N, C, H, W] with integer labels [N].

    Every image counts once: the last batch is filled up, and what filled it is not counted. Raises DivergedError where
    a logit is not finite.
    """
    made = slices(images, labels, batch_of(step))
    return evaluate_batches(step.evaluate, made, ignored=ignored_by(step))


def evaluate_data(
    step: Step,
    data: Dataset,
    part: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    normalise: bool = False,
    ema: bool = False,
    team: Team = ALONE,
) -> Evaluation:
    """Do what `evaluate_step` does on a part of the data (by default the one held out), normalised as the training part
    is; with `ema` by the average of the weights. Of several ranks each evaluates its share of the images, and all get
    what it comes to; what one complains of is raised on all."""
    images, labels = part or data.held_out
    own = team.share(len(labels), batch_of(step))
    if team.size > 1:  # DataLoaders are one process's
        streamed = isinstance(images, StreamedImages)
        images = images.take(np.arange(len(labels))[own]) if streamed else images[own]
        labels = labels[own]
    made = ((fed(data, x, normalise), y) for x, y in slices(images, labels, batch_of(step)))
    logits_of = functools.partial(step.evaluate, ema=True) if ema else step.evaluate
    evaluate = functools.partial(evaluate_batches, logits_of, made, names=data.class_names, ignored=ignored_by(step))
    return merged(team.gathered(team.together(evaluate)))


def slices(images: Any, labels: np.ndarray, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Go through images and labels in order, `batch` at a time; the last one has what is left."""
    if isinstance(images, LoadedImages):
        yield from images.all()
        return
    if isinstance(images, StreamedImages):
        yield from ((x, labels[part]) for part, x in in_order(images, batch))
        return
    for start in range(0, len(labels), batch):
        yield images[start : start + batch], labels[start : start + batch]


def data_for(source: Step | TrainingGraph, data: Any, **options: Any) -> Dataset:
    """Read a data set by name, folder or file, brought to the size of the graph's input and normalised."""
    found = raw_data_for(source, data, **options)
    return found if isinstance(data, Dataset) else found.normalised()


def with_loaders(source: Step | TrainingGraph, data: Any, *, held_out: bool = False) -> Any:
    """Give a Dataset where `data` are DataLoaders of torch (one, a sequence for train, val and test, or a mapping of
    these), and anything else as it is. With `held_out` a single one is what is scored."""
    loaders = loaders_in(data)
    if loaders is None:
        return data
    taken = taken_by(source)
    return dataset_of(loaders, taken.shape, taken.targets, held_out=held_out)


def raw_data_for(source: Step | TrainingGraph, data: Any, **options: Any) -> Dataset:
    """Read it and do not normalise it. A graph tells all that is asked of it before it is compiled. `options` are those
    of `load_data`; a Dataset is taken as it is, where it fits."""
    taken = taken_by(source)
    if isinstance(data, Dataset):
        if not any(isinstance(images, LoadedImages) for images, _ in data.parts.values()):
            check_given(data, taken)
        if asked := [name for name, value in options.items() if value is not None and value is not False]:
            raise BnfuseError(f"{data.name}: is a Dataset, which is fed as it is: leave out {', '.join(asked)}")
        return data
    if not isinstance(data, str | os.PathLike):
        what = "a name, a path, DataLoaders of torch, or a bnfuse.data.Dataset of arrays"
        raise BnfuseError(f"data is a {type(data).__name__}: give {what}")
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
    if takes_probabilities(source):  # made of a class for each image
        classes = classes_of_logits(source)
        return Taken(shape, tuple(Target(label, (), np.dtype(np.int64), classes) for label in labels))
    for label in labels:
        label_shape, label_type = inputs[label]
        of_image = len(label_shape) == 1 or label_shape[1:] == (shape_of_logits(source) or ())[2:]
        fits = label_shape[:1] == shape[:1] and (len(labels) > 1 or (of_image and label_type.kind in "iu"))
        if not fits:
            raise BnfuseError(
                f"the graph's input '{label}' is {label_type} {list(label_shape)}: data sets have an integer label for "
                f"each image, {[shape[0]]}, or for each pixel of the logits. Compile it and call the step."
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
    shape = shape_of_logits(source)
    return shape[1] if shape is not None and len(shape) > 1 else None


def shape_of_logits(source: Step | TrainingGraph) -> tuple[int, ...] | None:
    """Give the shape of the logits, None where there are none or it is not known."""
    if isinstance(source, TrainingGraph):
        found = next((v for v in source.model.graph.outputs if v.name == source.signature.logits), None)
        return None if found is None else static_shape(found)
    logits = source.program.outputs.get(source.program.signature["logits"] or "")
    return None if logits is None else tuple(logits.shape)


def ignored_by(source: Step | TrainingGraph) -> int | None:
    """Tell which label counts for nothing among those that are scored."""
    return taken_by(source).targets[0].ignored


def require_followed(data: Dataset, augment: Augment) -> None:
    """Raise where labels of pixels would not follow what is done to images."""
    if scored(data.train_y[:1]).ndim > 2 and augment not in (Augment(), Augment(flip=True)):
        raise BnfuseError(
            f"{data.name}: has labels of pixels, which follow --augment flip and nothing else: leave {augment} out"
        )


def classes_of_step(step: Step, label: str) -> int | None:
    """Tell how many classes the integer labels of an input run over, None where that is not known."""
    if label in step.program.classes:
        return int(step.program.classes[label]["count"])
    return classes_of_logits(step)


def check_given(data: Dataset, taken: Taken) -> None:
    """Raise where a Dataset made in Python does not fit to the graph."""
    for part, (x, y) in data.parts.items():
        for name, array in ((f"{part}_x", x), (f"{part}_y", y)):
            if not isinstance(array, np.ndarray | StreamedImages):
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
    if fields is None and targets[0].is_map:
        checked(y, targets[0], count, f"{name}: {part}_y")
        return
    scores = scored(check_all_labels(y, count, name, f"{part}_x"))
    if scores.ndim > 2:
        raise BnfuseError(f"{name}: {part}_y has the shape {list(y.shape)}: the graph takes one label for each image")
    if taken.classes is not None and int(scores.max()) >= taken.classes:
        raise BnfuseError(f"{name}: {part}_y has labels up to {scores.max()}, the graph {taken.classes} classes")


def fed_statistics(data: Dataset, normalise: bool = False) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation, channel by channel, of the training images as they are fed: mu_D and sigma_D
    of virtual samples ([Chen18], section 4.2). Of streamed images they are what these are normalised by."""
    if isinstance(data.train_x, LoadedImages):
        raise BnfuseError(f"{data.train_x.name}: does not tell mean and deviation, by which virtual samples are drawn")
    if isinstance(data.train_x, StreamedImages):
        return (tuple(0.0 for _ in data.mean), tuple(1.0 for _ in data.std)) if normalise else (data.mean, data.std)
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
