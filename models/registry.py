"""The zoo: name -> how to build it."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from bnfuse.core.errors import BnfuseError

from . import alexnet, densenet, gnmt, googlenet, mobilenet, nin, resnet, squeezenet, transformer, vgg
from .count import Counts, count
from .layers import Network, Size, pair

MAX_SIDE = 1 << 14  # of an image, and the most classes, channels or images of a batch that make sense
MAX_WORDS = 1 << 20  # of a vocabulary
MAX_LAYERS = 1 << 9  # that a metaparameter asks for: every one of them is several nodes


@dataclasses.dataclass(frozen=True)
class Entry:
    """A network of the zoo. `builder(batch, image, channels, classes, seed, **metaparameters)`.

    A `shape_only` one serves estimates: no training graph is made of it. It works on sequences, so it has no image and
    no classes, and its builder is `builder(batch, **metaparameters)`.
    """

    builder: Callable[..., Network]
    about: str
    image: int | None = 224
    classes: int | None = 1000
    batch: int = 16
    fixed: tuple[tuple[str, object], ...] = ()  # metaparameters that the name decides
    shape_only: bool = False

    @classmethod
    def of_shapes(cls, builder: Callable[..., Network], about: str, batch: int) -> Entry:
        """Make an entry that serves estimates alone."""
        return cls(builder, about, None, None, batch, shape_only=True)

    @property
    def metaparameters(self) -> dict[str, object]:
        """Metaparameters that may be set, with their defaults."""
        keywords = inspect.signature(self.builder).parameters.values()
        fixed = dict(self.fixed)
        return {k.name: k.default for k in keywords if k.kind is k.KEYWORD_ONLY and k.name not in fixed}


def _vgg(depth: int, norm: bool) -> Entry:
    about = f"VGG-{depth}, {'BN after every convolution' if norm else 'without BN'}"
    return Entry(vgg.vgg, about, fixed=(("depth", depth), ("norm", norm)))


def _squeezenet(norm: bool) -> Entry:
    about = "SqueezeNet 1.0, BN after every convolution" if norm else "SqueezeNet 1.0 as published, without BN"
    return Entry(squeezenet.squeezenet, about, fixed=(("norm", norm),))


def _googlenet(norm: bool) -> Entry:
    about = f"GoogLeNet, {'BN after every convolution' if norm else 'without BN'}; no LRN, no auxiliary heads"
    return Entry(googlenet.googlenet, about, fixed=(("norm", norm),))


MODELS: dict[str, Entry] = {
    "alexnet": Entry(alexnet.alexnet, "AlexNet as one tower, no LRN", 227),
    "densenet121": Entry(densenet.densenet121, "DenseNet-121: dense blocks of 6, 12, 24 and 16 bottleneck layers"),
    "densenet40": Entry(densenet.densenet40, "DenseNet-40 for small images, growth 12", 32, 10),
    "googlenet": _googlenet(norm=True),
    "googlenet-plain": _googlenet(norm=False),
    "mobilenetv2": Entry(mobilenet.mobilenetv2, "MobileNetV2: inverted residuals, depthwise convolutions, ReLU6"),
    "nin": Entry(nin.nin, "Network in Network: 1x1 convolutions, no linear layer, no BN", 227),
    "resnet18": Entry(resnet.resnet18, "ResNet-18: residual blocks of two 3x3 convolutions"),
    "resnet20": Entry(resnet.resnet20, "ResNet-20 for small images", 32, 10),
    "resnet50": Entry(resnet.resnet50, "ResNet-50: residual blocks of 1x1, 3x3 and 1x1 convolutions"),
    "resnet56": Entry(resnet.resnet56, "ResNet-56 for small images", 32, 10),
    "squeezenet": _squeezenet(norm=True),
    "squeezenet-plain": _squeezenet(norm=False),
    "vgg11": _vgg(11, norm=True),
    "vgg11-plain": _vgg(11, norm=False),
    "vgg16": _vgg(16, norm=True),
    "vgg16-plain": _vgg(16, norm=False),
    "vgg19": _vgg(19, norm=True),
    "vgg19-plain": _vgg(19, norm=False),
}

SHAPE_ONLY: dict[str, Entry] = {
    "gnmt": Entry.of_shapes(gnmt.gnmt, "GNMT: 8 + 8 LSTM layers, unrolled in time, with attention", 32),
    "transformer": Entry.of_shapes(transformer.transformer, "Transformer, big: 6 + 6 layers of 16 heads", 128),
}


def build_forward(
    name: str,
    /,
    *,
    batch: int | None = None,
    image: Size | None = None,
    channels: int = 3,
    classes: int | None = None,
    seed: int = 0,
    **metaparameters: Any,
) -> onnx.ModelProto:
    """Give the forward graph of a zoo network: `data` [batch, channels, *image] -> `logits` [batch, classes].

    `image` is the side of a square, or (height, width).

    BatchNormalization is in training mode; parameters are initializers. Metaparameters may be strings (as `--set` has
    them): they are read as what their default is.
    """
    if entry_of(name).shape_only:
        raise BnfuseError(f"{name} has shapes only, nothing to train or rewrite: `bnfuse estimate {name}` takes it")
    if not whole(seed) or seed < 0:
        raise BnfuseError(f"{name}: seed={seed} is out of range: it must be a whole number, not negative")
    graph = build_graph(name, batch=batch, image=image, channels=channels, classes=classes, seed=seed, **metaparameters)
    return gs.export_onnx(graph, do_type_check=False)


def count_forward(
    name: str,
    /,
    *,
    batch: int | None = None,
    image: Size | None = None,
    channels: int = 3,
    classes: int | None = None,
    **metaparameters: Any,
) -> Counts:
    """Parameters and FLOPs of a zoo network, without making its weights."""
    return count(build_graph(name, batch=batch, image=image, channels=channels, classes=classes, **metaparameters))


def build_graph(
    name: str,
    /,
    *,
    batch: int | None = None,
    image: Size | None = None,
    channels: int = 3,
    classes: int | None = None,
    seed: int | None = None,
    **metaparameters: Any,
) -> Network:
    """`build_forward` as a gs.Graph; without a seed its weights are zeros that take no memory."""
    entry = entry_of(name)
    if seed is not None and not whole(seed):
        raise BnfuseError(f"{name}: seed={seed} is no whole number")
    image = entry.image if image is None else image
    classes = entry.classes if classes is None else classes
    batch = entry.batch if batch is None else batch
    chosen = {**read_metaparameters(name, entry, metaparameters), **dict(entry.fixed)}
    try:
        if entry.shape_only:
            check_sequence(batch, image, channels, classes)
            graph = entry.builder(batch, **chosen)
        else:
            assert image is not None and classes is not None  # only networks of shapes have neither
            check_sizes(batch, image, channels, classes)
            graph = entry.builder(batch, image, channels, classes, seed, **chosen)
    except BnfuseError as error:
        raise BnfuseError(f"{name}: {error}") from None
    graph.name = name
    return graph


def check_sizes(batch: int, image: Size, channels: int, classes: int) -> None:
    """Raise BnfuseError where a size makes no sense."""
    sizes = (("batch", batch), ("channels", channels), ("classes", classes), *(("image", side) for side in pair(image)))
    for what, size in sizes:
        check_size(what, size)


def check_size(what: str, size: object) -> None:
    """Raise BnfuseError where a size is no whole number from 1 to MAX_SIDE."""
    if not whole(size):
        raise BnfuseError(f"{what}={size} is no whole number (on the command line it is --{what}, not --set)")
    if not 1 <= size <= MAX_SIDE:  # type: ignore[operator]
        raise BnfuseError(f"{what}={size} is out of range: it must be from 1 to {MAX_SIDE}")


def whole(value: object) -> bool:
    """Tell whether a value is a whole number, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_sequence(batch: int, image: Size | None, channels: int, classes: int | None) -> None:
    """Raise BnfuseError where a network of sequences is asked for what it has not."""
    if image is not None or classes is not None or channels != 3:
        raise BnfuseError("it reads sequences, not images: its sizes are metaparameters (--set steps=50)")
    check_size("batch", batch)


def entry_of(name: str) -> Entry:
    """Find a network; raises BnfuseError with the names there are."""
    every = MODELS | SHAPE_ONLY
    if name not in every:
        raise BnfuseError(f"no network named '{name}' in the zoo: there are {', '.join(sorted(every))}")
    return every[name]


def read_metaparameters(name: str, entry: Entry, given: dict[str, object]) -> dict[str, object]:
    """Read what was given in the types of the builder's parameters; raises BnfuseError."""
    known = entry.metaparameters
    for key in given:
        if key not in known:
            settable = ", ".join(f"{k}={v}" for k, v in known.items()) or "none"
            raise BnfuseError(f"{name} has no metaparameter '{key}': it has {settable}")
    chosen = {key: read_like(name, key, value, known[key]) for key, value in given.items()}
    for key, value in chosen.items():
        most = {"vocabulary": MAX_WORDS, "layers": MAX_LAYERS, "depth": MAX_LAYERS}.get(key, MAX_SIDE)
        if isinstance(value, int | float) and not 0 <= value <= most:
            raise BnfuseError(f"{name}: {key}={value} is out of range: it must be from 0 to {most}")
    return chosen


def read_like(name: str, key: str, value: object, default: object) -> object:
    """`value` as the type of `default`; a bool as true or false."""
    if isinstance(default, bool):
        known = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() in known:
            return known[str(value).lower()]
        raise BnfuseError(f"{name}: {key}={value} must be true or false")
    try:
        return type(default)(value)  # type: ignore[call-arg]
    except (TypeError, ValueError):
        raise BnfuseError(f"{name}: {key}={value} must be of type {type(default).__name__}, like {default!r}") from None
