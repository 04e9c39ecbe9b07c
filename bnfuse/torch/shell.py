"""The shell of a fused module: a subclass of the module's own class over the module's own tables.

The fused module has the same parameters, buffers and submodules, the same objects; hooks of its own; and a forward that
hands the call to its engine (engine.py).
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bnfuse.core.errors import BnfuseError

if TYPE_CHECKING:
    from .engine import Engine

HOLDS_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class FusedModule(nn.Module):
    """What a fused module has before its own class: what copies of it are. `class_of` adds the fused forward."""

    _bnfuse: Engine

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        engine = self._bnfuse
        module = copy.deepcopy(plain(self, engine.own_forward), memo)
        fused = shell(module)
        forward = rebound(module.__dict__.get("forward"), module, fused)
        fused.__dict__["_bnfuse"] = type(engine)(fused, forward, engine.options, engine.programs)
        memo[id(self)] = fused
        return fused

    def __copy__(self) -> Any:
        raise BnfuseError(
            "copy.copy of a fused module would share its tables and its step: take copy.deepcopy, or fuse a copy"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BnfuseError(
            "a fused module cannot be pickled, for it holds native code and memory: save its state_dict(), and fuse "
            "the module again where it is loaded"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise BnfuseError("nn.DataParallel copies a module to other GPUs: use DistributedDataParallel, a process each")


@functools.cache
def class_of(kind: Any) -> type[FusedModule]:
    """Make the class of a fused module, which looks like the module's own: its forward has the same arguments, and runs
    as one node of autograd."""
    named: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}

    def forward(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        return self._bnfuse.call(args, kwargs)

    # exporters and loggers ask for its arguments; what else the own forward has is of that alone
    named["forward"] = torch.compiler.disable(functools.update_wrapper(forward, kind.forward, updated=()))
    return type(kind.__name__, (FusedModule, kind), named)


def shell(module: nn.Module) -> FusedModule:
    """Make the fused module: the tables of parameters, buffers and submodules are the module's own ones."""
    own: Any = type(module)
    kind: Any = class_of(own)
    made: FusedModule = kind.__new__(kind)
    made.__dict__.update(rebound(module.__dict__, module, made))
    for path, part in module.named_modules():
        if path and (odd := [key for key, value in part.__dict__.items() if rebound(value, module, made) is not value]):
            raise BnfuseError(
                f"'{path}.{odd[0]}' holds the module around it, or a method of that: a fused one is another, with a "
                "mode of its own. Call the method with the module"
            )
    made.__dict__.pop("forward", None)
    made.__dict__.pop("_compiled_call_impl", None)
    for name in HOLDS_HOOKS:
        made.__dict__[name] = module.__dict__[name].copy()
    return made


def plain(fused: FusedModule, forward: Any) -> nn.Module:
    """Make a module of the first class, of the same parts, in the same mode and without hooks. `forward` is the one
    that the module had as an attribute of its own, None where it had none."""
    kind: Any = type(fused).__mro__[2]
    made: nn.Module = kind.__new__(kind)
    kept = {key: value for key, value in fused.__dict__.items() if key not in ("_bnfuse", "forward")}
    made.__dict__.update(rebound(kept, fused, made))
    for name in HOLDS_HOOKS:
        made.__dict__[name] = OrderedDict()
    if forward is not None:
        made.__dict__["forward"] = rebound(forward, fused, made)
    return made


def rebound(value: Any, old: nn.Module, new: nn.Module, depth: int = 4) -> Any:
    """Give a value in which methods of one module are those of another, which has its attributes: they read modes
    there. What holds none is the same object."""
    if value is old:
        return new
    if not depth:
        return value
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    if type(value) is functools.partial:
        parts = value.func, value.args, value.keywords
        func, args, keywords = (rebound(one, old, new, depth - 1) for one in parts)
        changed = any(a is not b for a, b in zip(parts, (func, args, keywords), strict=True))
        return functools.partial(func, *args, **keywords) if changed else value
    if type(value) is dict:
        found = {key: rebound(one, old, new, depth - 1) for key, one in value.items()}
        return found if any(found[key] is not one for key, one in value.items()) else value
    if type(value) in (list, tuple):
        items = [rebound(one, old, new, depth - 1) for one in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    return value
