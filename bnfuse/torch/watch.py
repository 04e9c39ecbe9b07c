"""What of a module a program was captured under, looked at in each call: modes, flags, attributes, hooks, parts.

A program is right as long as none of it changes. What changes chooses another program, or has one captured; what a
program cannot honour is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from bnfuse.core.errors import BnfuseError

HOOKS = {  # what nn.Module calls when it is called, by the attribute that holds it
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
GLOBAL = ("_global_backward_hooks", "_global_backward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks")
WEIGHTS = {  # of torch.nn.utils, with what to do instead
    "weight_norm": "take torch.nn.utils.parametrizations.weight_norm, which is fused",
    "spectral_norm": "fuse the parts around it, which fuse(..., fallback='torch') does",
}
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.memory_format)
SMALL = 64  # elements of a tensor or array that is compared by its numbers in each call
DEEPEST = 8  # containers in containers that are looked into
OWN = frozenset({*nn.Module().__dict__, "_is_full_backward_hook", "_bnfuse", "_compiled_call_impl"})


@dataclasses.dataclass(frozen=True, eq=False)
class Same:
    """An object that is compared by its identity, whatever it says of equality."""

    one: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.one is other.one

    def __hash__(self) -> int:
        return id(self.one)


class Attributes:
    """What the attributes of all modules were: name and value, part by part. Hashed once: it is looked up by."""

    def __init__(self, parts: tuple[tuple[tuple[str, Any], ...], ...]) -> None:
        self.parts, self.hashed = parts, hash(parts)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Attributes) and self.hashed == other.hashed and self.parts == other.parts
        )

    def __hash__(self) -> int:
        return self.hashed


class Part:
    """One module of the tree, and its attributes as they were when they were last looked at.

    Those made of plain values alone are compared in one go (`quick`, a copy of them: `seen`); others are made into
    something to compare in each call (`others`).
    """

    def __init__(self, path: str, module: nn.Module, ignored: frozenset[str]) -> None:
        self.path, self.module, self.ignored = path, module, ignored
        self.look()

    def look(self) -> None:
        """Look at all attributes."""
        held = self.held = self.module.__dict__
        self.count = len(held)
        names = [key for key in held if key not in OWN and f"{self.path}.{key}".lstrip(".") not in self.ignored]
        quick = [key for key in names if is_plain_within(held[key])]
        self.quick: Callable[[dict[str, Any]], Any] = operator.itemgetter(*quick) if quick else nothing
        self.seen = copy.deepcopy(self.quick(held))
        self.others = {key: frozen(held[key]) for key in names if key not in {*quick}}
        self.values = tuple(sorted((key, self.others.get(key, frozen(held[key]))) for key in names))

    def is_same(self) -> bool:
        """Tell whether the attributes are what they were."""
        held = self.held
        try:
            return (
                len(held) == self.count
                and bool(self.quick(held) == self.seen)
                and all(frozen(held[key]) == value for key, value in self.others.items())
            )
        except (KeyError, RuntimeError, ValueError, TypeError):  # it is gone, or a tensor now
            return False


class Watch:
    """The tree of modules below a root, as it was when it was looked at. Looking again has to cost next to nothing."""

    def __init__(self, root: nn.Module, ignored: Iterable[str] = ()) -> None:
        self.root, self.ignored = root, frozenset(ignored)
        self.parts = [Part(path, module, self.ignored) for path, module in root.named_modules()]
        self._attributes = Attributes(tuple(part.values for part in self.parts))
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.names: dict[str, tuple[dict[str, Any], str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for key in (key for key, tensor in held.items() if tensor is not None):
                    self.names[f"{path}.{key}" if path else key] = held, key
        first: dict[int, tuple[dict[str, Any], str]] = {}
        owners = [(first.setdefault(id(held[key]), (held, key)), (held, key)) for held, key in self.names.values()]
        self._pairs = [(one, other) for one, other in owners if one is not other]
        self._empty: list[dict[str, Any]] = []
        self._children: list[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]] = []
        self._tensors: list[tuple[dict[str, Any], tuple[str, ...], tuple[bool, ...]]] = []
        for part in self.parts:
            held = part.module._parameters
            self.parameters += [(held, key) for key, one in held.items() if one is not None]
            modules: dict[str, Any] = part.module._modules
            if modules:
                self._children.append((modules, tuple(modules), tuple(modules.values())))
            for table in (held, part.module._buffers):
                if table:
                    self._tensors.append((table, tuple(table), missing(table)))
            self._empty += [table for table in (modules, held, part.module._buffers) if not table]
        self._tied = self.ties()
        self._last: list[tuple[Any, ...]] = []  # names and identities of the tensors that were looked at
        self._hooks = [part.module.__dict__[name] for part in self.parts[1:] for name in HOOKS]

    def is_whole(self) -> bool:
        """Tell whether the tree has the same modules, and parameters and buffers of the same names, of which the same
        are one tensor."""
        if any(self._empty) or any(
            tuple(table) != keys or tuple(table.values()) != values for table, keys, values in self._children
        ):
            return False
        now = [(tuple(table), *map(id, table.values())) for table, _, _ in self._tensors]
        if now != self._last:
            if any(tuple(table) != keys or missing(table) != none for table, keys, none in self._tensors):
                return False
            if self.ties() != self._tied:
                return False
            self._last = now
        return True

    def ties(self) -> tuple[int, list[bool]]:
        """Count the tensors that there are, and tell which of the names that were one tensor still are."""
        return len({id(held[key]) for held, key in self.names.values()}), [
            held[key] is other[name] for (held, key), (other, name) in self._pairs
        ]

    def refuse_hooks(self) -> None:
        """Raise where a submodule has a hook, which a fused forward would not call."""
        if any(getattr(nn.modules.module, name) for name in GLOBAL):
            raise BnfuseError("a hook for all modules is registered: a fused module calls none of its submodules")
        if not any(self._hooks) and not self.root._forward_pre_hooks:
            return
        for part in self.parts:
            if (kind := remade_weight(part.module)) is not None:
                who = f"submodule '{part.path}'" if part.path else "the module"
                raise BnfuseError(
                    f"{who} has torch.nn.utils.{kind}, a hook that makes its weight anew in front of each call, which "
                    f"a fused module does not call: {WEIGHTS[kind]}"
                )
        for part in self.parts[1:]:
            for name, kind in HOOKS.items():
                if part.module.__dict__[name]:
                    raise BnfuseError(
                        f"submodule '{part.path}' has {kind}: a fused module does not call its submodules. Remove the "
                        "hook, or fuse the parts around it"
                    )

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([part.module.training for part in self.parts])

    def flags(self) -> tuple[bool, ...]:
        """Which parameters have requires_grad."""
        return tuple([held[key].requires_grad for held, key in self.parameters])

    def attributes(self) -> Attributes:
        """Give the attributes of all modules, by which they may compute."""
        try:
            others = [
                part
                for part in self.parts
                if len(part.held) != part.count or part.quick(part.held) != part.seen or part.others
            ]
        except (KeyError, RuntimeError, ValueError, TypeError):  # one is gone, or a tensor now
            others = self.parts
        others = [part for part in others if not part.is_same()]
        if others:
            for part in others:
                part.look()
            self._attributes = Attributes(tuple(part.values for part in self.parts))
        return self._attributes

    def changed(self, before: Attributes, now: Attributes) -> str:
        """Name the first attribute that differs."""
        for part, old, new in zip(self.parts, before.parts, now.parts, strict=False):
            for key, _ in sorted({*old} ^ {*new}, key=lambda pair: pair[0]):
                return f"{part.path}.{key}".lstrip(".")
        return "an attribute"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give all parameters and buffers by name."""
        return {name: held[key] for name, (held, key) in self.names.items()}


def remade_weight(module: nn.Module) -> str | None:
    """Name what of torch.nn.utils makes the weight of a module anew by a hook; None where nothing does."""
    places = [type(hook).__module__.rpartition(".")[2] for hook in module._forward_pre_hooks.values()]
    return next((place for place in places if place in WEIGHTS), None)


def missing(table: dict[str, Any]) -> tuple[bool, ...]:
    """Tell which entries of a table are None."""
    return tuple([one is None for one in table.values()])


def is_plain(value: Any) -> bool:
    """Tell whether an attribute is a number, a text, a type or a tuple of those: what a forward may depend on."""
    if isinstance(value, tuple):
        return all(is_plain(one) for one in value)
    return isinstance(value, PLAIN)


def is_plain_within(value: Any, depth: int = 0) -> bool:
    """Tell whether a value is plain, or a list, tuple or dict of such: Python compares those by itself."""
    if type(value) in (list, tuple, dict) and depth < DEEPEST:
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return all(is_plain_within(one, depth + 1) for one in inner)
    return type(value) in PLAIN


def frozen(value: Any, depth: int = 0, *, reads: bool = True) -> Any:
    """Make of an attribute what can be kept and compared: what it contains, or, of what is not known, which object it
    is. Without `reads` tensors are taken as objects too."""

    def inner(one: Any) -> Any:
        return frozen(one, depth + 1, reads=reads)

    if type(value) in PLAIN or depth > DEEPEST:
        return value if type(value) in PLAIN else Same(value)
    if isinstance(value, dict):
        return dict, tuple([(inner(key), inner(one)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return type(value), tuple([inner(one) for one in value])
    if isinstance(value, set | frozenset):
        return type(value), frozenset([inner(one) for one in value])
    if isinstance(value, np.generic | np.ndarray) and value.size <= SMALL and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    is_read = reads and isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return content(value) if is_read else Same(value)


def content(tensor: torch.Tensor) -> Any:
    """Tell which numbers a tensor has: those themselves where they are few and on the CPU, or else which tensor it is,
    where it lies, and how often it was written to."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return Same(tensor)
    if tensor.device.type == "cpu" and tensor.numel() <= SMALL and not tensor.is_conj() and not tensor.is_neg():
        return tensor.dtype, tuple(tensor.shape), repr(tensor.detach().tolist())
    version = 0 if tensor.is_inference() else tensor._version
    return Same(tensor), tensor.data_ptr(), tuple(tensor.shape), version


def nothing(_: Any) -> tuple[()]:
    """Give the values of no attributes."""
    return ()
