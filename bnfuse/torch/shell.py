"""The shell of a fused module: a subclass of the module's own class over the module's own tables.

The fused module has the same parameters, buffers and submodules, the same objects; hooks of its own; and a forward that
hands the call to its engine (engine.py).
"""

from __future__ import annotations

import copy
import functools
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
    """What a fused module has before its own class: the fused forward, and what copies of it are."""

    _bnfuse: Engine

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused forward, as one node of autograd."""
        return self._bnfuse.call(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        engine = self._bnfuse
        module = copy.deepcopy(plain(self, engine.own_forward), memo)
        fused = shell(module)
        forward = module.__dict__.get("forward")
        fused.__dict__["_bnfuse"] = type(engine)(fused, forward, engine.options, engine.programs)
        memo[id(self)] = fused
        return fused

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BnfuseError(
            "a fused module cannot be pickled, for it holds native code and memory: save its state_dict(), and fuse "
            "the module again where it is loaded"
        )

    def _replicate_for_data_parallel(self) -> Any:
        raise BnfuseError("nn.DataParallel copies a module to other GPUs: use DistributedDataParallel, a process each")


@functools.cache
def class_of(kind: Any) -> type[FusedModule]:
    """Make the class of a fused module, which looks like the module's own."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (FusedModule, kind), named)


def shell(module: nn.Module) -> FusedModule:
    """Make the fused module: the tables of parameters, buffers and submodules are the module's own ones."""
    own: Any = type(module)
    kind: Any = class_of(own)
    made: FusedModule = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
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
    made.__dict__.update({key: value for key, value in fused.__dict__.items() if key not in ("_bnfuse", "forward")})
    for name in HOLDS_HOOKS:
        made.__dict__[name] = OrderedDict()
    if forward is not None:
        made.__dict__["forward"] = forward
    return made
