"""What of a module a program was captured under, looked at in each call: modes, flags, attributes, hooks, parts.

A program is right as long as none of it changes. What changes chooses another program, or has one captured; what a
program cannot honour is refused.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

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
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.memory_format)
OWN = frozenset({"training", "_is_full_backward_hook", "call_super_init", "dump_patches", "_bnfuse"})


@dataclasses.dataclass(frozen=True)
class Part:
    """One module of the tree, and how its plain attributes are read."""

    path: str
    module: nn.Module
    attributes: tuple[str, ...]
    values: Callable[[dict[str, Any]], Any]


class Watch:
    """The tree of modules below a root, as it was when it was looked at. Looking again has to cost next to nothing."""

    def __init__(self, root: nn.Module, ignored: Iterable[str] = ()) -> None:
        self.root, self.ignored = root, frozenset(ignored)
        self.parts = [self._part(path, module) for path, module in root.named_modules()]
        self.parameters: list[tuple[dict[str, Any], str]] = []
        self.names: dict[str, tuple[dict[str, Any], str]] = {}
        for path, module in root.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for key in (key for key, tensor in held.items() if tensor is not None):
                    self.names[f"{path}.{key}" if path else key] = held, key
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
        self._hooks = [part.module.__dict__[name] for part in self.parts[1:] for name in HOOKS]

    def _part(self, path: str, module: nn.Module) -> Part:
        held = module.__dict__
        attributes = tuple(
            key
            for key, value in held.items()
            if key not in OWN and f"{path}.{key}".lstrip(".") not in self.ignored and is_plain(value)
        )
        return Part(path, module, attributes, operator.itemgetter(*attributes) if attributes else lambda _: ())

    def is_whole(self) -> bool:
        """Tell whether the tree has the same modules, and parameters and buffers of the same names."""
        return not (
            any(self._empty)
            or any(tuple(table) != keys or tuple(table.values()) != values for table, keys, values in self._children)
            or any(tuple(table) != keys or missing(table) != none for table, keys, none in self._tensors)
        )

    def refuse_hooks(self) -> None:
        """Raise where a submodule has a hook, which a fused forward would not call."""
        if any(getattr(nn.modules.module, name) for name in GLOBAL):
            raise BnfuseError("a hook for all modules is registered: a fused module calls none of its submodules")
        if not any(self._hooks):
            return
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

    def attributes(self) -> tuple[Any, ...]:
        """Give the plain attributes of all modules, by which they may compute."""
        try:
            return tuple([part.values(part.module.__dict__) for part in self.parts])
        except KeyError as error:
            return ("gone", str(error))

    def changed(self, before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        """Name the first attribute that differs."""
        for part, old, new in zip(self.parts, before, now, strict=False):
            if old != new:
                pairs = [(old, new)] if len(part.attributes) == 1 else zip(old, new, strict=False)
                for key, (was, is_now) in zip(part.attributes, pairs, strict=False):
                    if was != is_now:
                        return f"{part.path}.{key}".lstrip(".")
        return "an attribute"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give all parameters and buffers by name."""
        return {name: held[key] for name, (held, key) in self.names.items()}


def missing(table: dict[str, Any]) -> tuple[bool, ...]:
    """Tell which entries of a table are None."""
    return tuple([one is None for one in table.values()])


def is_plain(value: Any) -> bool:
    """Tell whether an attribute is a number, a text, a type or a tuple of those: what a forward may depend on."""
    if isinstance(value, tuple):
        return all(is_plain(one) for one in value)
    return isinstance(value, PLAIN)
