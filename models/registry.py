"""The zoo: name -> how to build it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import onnx
import onnx_graphsurgeon as gs

from bnfuse.errors import BnfuseError

from . import densenet, resnet
from .layers import Network

MAX_SIDE = 1 << 14  # of an image, and the most classes, channels or images of a batch that make sense


@dataclasses.dataclass(frozen=True)
class Entry:
    """A network of the zoo. `builder(batch, image, channels, classes, seed, **metaparameters)`."""

    builder: Callable[..., Network]
    about: str
    image: int = 224
    classes: int = 1000
    batch: int = 16
    fixed: tuple[tuple[str, object], ...] = ()  # metaparameters that the name decides

    @property
    def metaparameters(self) -> dict[str, object]:
        """Metaparameters that may be set, with their defaults."""
        keywords = inspect.signature(self.builder).parameters.values()
        fixed = dict(self.fixed)
        return {k.name: k.default for k in keywords if k.kind is k.KEYWORD_ONLY and k.name not in fixed}


MODELS: dict[str, Entry] = {
    "densenet121": Entry(densenet.densenet121, "DenseNet-121: dense blocks of 6, 12, 24 and 16 bottleneck layers"),
    "densenet40": Entry(densenet.densenet40, "DenseNet-40 for small images, growth 12", 32, 10),
    "resnet18": Entry(resnet.resnet18, "ResNet-18: residual blocks of two 3x3 convolutions"),
    "resnet20": Entry(resnet.resnet20, "ResNet-20 for small images", 32, 10),
    "resnet50": Entry(resnet.resnet50, "ResNet-50: residual blocks of 1x1, 3x3 and 1x1 convolutions"),
    "resnet56": Entry(resnet.resnet56, "ResNet-56 for small images", 32, 10),
}


def build_forward(
    name: str,
    *,
    batch: int | None = None,
    image: int | None = None,
    channels: int = 3,
    classes: int | None = None,
    seed: int = 0,
    **metaparameters: object,
) -> onnx.ModelProto:
    """The forward graph of a zoo network: `data` [batch, channels, image, image] -> `logits` [batch, classes].

    BatchNormalization is in training mode; parameters are initializers. Metaparameters may be strings (as `--set` has
    them): they are read as what their default is.
    """
    entry = entry_of(name)
    sizes = {
        "batch": entry.batch if batch is None else batch,
        "image": entry.image if image is None else image,
        "channels": channels,
        "classes": entry.classes if classes is None else classes,
    }
    for what, size in sizes.items():
        if not 1 <= size <= MAX_SIDE:
            raise BnfuseError(f"{name}: {what}={size} is out of range: it must be from 1 to {MAX_SIDE}")
    if seed < 0:
        raise BnfuseError(f"{name}: seed={seed} is out of range: it must not be negative")
    chosen = {**read_metaparameters(name, entry, metaparameters), **dict(entry.fixed)}
    try:
        graph = entry.builder(sizes["batch"], sizes["image"], channels, sizes["classes"], seed, **chosen)
    except BnfuseError as error:
        raise BnfuseError(f"{name}: {error}") from None
    graph.name = name
    model = gs.export_onnx(graph, do_type_check=False)
    onnx.checker.check_model(model)
    return model


def entry_of(name: str) -> Entry:
    if name not in MODELS:
        raise BnfuseError(f"no network named '{name}' in the zoo: there are {', '.join(sorted(MODELS))}")
    return MODELS[name]


def read_metaparameters(name: str, entry: Entry, given: dict[str, object]) -> dict[str, object]:
    known = entry.metaparameters
    for key in given:
        if key not in known:
            settable = ", ".join(f"{k}={v}" for k, v in known.items()) or "none"
            raise BnfuseError(f"{name} has no metaparameter '{key}': it has {settable}")
    return {key: read_like(name, key, value, known[key]) for key, value in given.items()}


def read_like(name: str, key: str, value: object, default: object) -> object:
    """`value` as the type of `default`."""
    kind = type(default)
    try:
        return kind(value)  # type: ignore[call-arg]
    except (TypeError, ValueError):
        raise BnfuseError(f"{name}: {key}={value} must be of the kind of its default, {default!r}") from None
