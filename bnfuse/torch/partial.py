"""fallback="torch": the largest submodules that can be captured are fused, each on its own; the rest stays torch's.

run a copy of the module once, with hooks     what each submodule is called with, and how often
from the root down                            fuse a submodule, or say why not and look at its children
copies of the modules on the way              so that the module that was given stays as it is
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnfuse.core.errors import BnfuseError

from .reports import Part, Report, report
from .shell import rebound
from .undisturbed import as_found

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)
MAPS = (nn.modules.conv._ConvNd, nn.Linear)

FuseOne = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], nn.Module]


@dataclasses.dataclass
class Seen:
    """How a submodule is called: the arguments of its last call, and how many calls there were."""

    calls: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Partial:
    """What a module of which parts are fused holds in the place of an engine."""

    report: Report


def fuse_parts(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str, fuse_one: FuseOne
) -> nn.Module:
    """Fuse the largest parts of a module, of which the whole cannot be fused for this reason.

    Gives a module of the same class and the same parts, of which some are fused. Raises BnfuseError where none is.
    """
    seen = calls_of(module, args, kwargs)
    parts = [Part("", reason=reason)]
    made = _rebuilt(module, "", seen, fuse_one, parts)
    if made is module:
        reasons = "; ".join(map(str, parts[:3]))
        raise BnfuseError(f"no part of {type(module).__name__} can be fused: {reasons}")
    made.__dict__["_bnfuse"] = Partial(Report(tuple(parts)))
    return made


def _rebuilt(module: nn.Module, path: str, seen: Mapping[str, Seen], fuse_one: FuseOne, parts: list[Part]) -> nn.Module:
    """Give the module with what can be fused below it, itself where nothing can."""
    children: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        where = f"{path}.{name}".lstrip(".")
        if child is None or not has_norms(child):
            continue
        found = _fused(child, where, seen.get(where, Seen()), fuse_one, parts)
        found = _rebuilt(child, where, seen, fuse_one, parts) if found is None else found
        if found is not child:
            children[name] = found
    if not children:
        return module
    made = copied(module)
    for name, child in children.items():
        made._modules[name] = child
    return made


def _fused(child: nn.Module, path: str, seen: Seen, fuse_one: FuseOne, parts: list[Part]) -> nn.Module | None:
    """Fuse one submodule, or note why it cannot be."""
    reason = ""
    leaves = pytree.tree_leaves((seen.args, seen.kwargs))
    if seen.calls != 1:
        reason = "is called several times in a forward" if seen.calls else "is not called, or not as a module"
    elif not any(isinstance(one, torch.Tensor) for one in leaves):
        reason = "is called without a tensor"
    elif not any(isinstance(one, MAPS) for one in child.modules()):
        reason = "has no convolution or product to fuse its norm with"
    if not reason:
        try:
            made = fuse_one(child, seen.args, seen.kwargs)
        except BnfuseError as error:
            reason = str(error)
        else:
            parts.append(Part(path, report(made).parts[0].rewrite))
            return made
    parts.append(Part(path, reason=reason))
    return None


def has_norms(module: nn.Module) -> bool:
    """Tell whether there is a norm below a module: what has none gains nothing."""
    return any(isinstance(one, NORMS) for one in module.modules())


def copied(module: nn.Module) -> nn.Module:
    """Copy a module that shares all but its table of submodules."""
    made: nn.Module = type(module).__new__(type(module))
    made.__dict__.update(rebound(module.__dict__, module, made))
    made.__dict__["_modules"] = module._modules.copy()
    return made


def calls_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Seen]:
    """Run a copy of the module once, and note how its submodules are called. The module stays as it is."""
    seen: dict[str, Seen] = {}
    double = copy.deepcopy(module)

    def noting(path: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = seen.setdefault(path, Seen())
            found.calls, found.args, found.kwargs = found.calls + 1, bare(args), bare(kwargs)

        return note

    handles = [
        one.register_forward_pre_hook(noting(path), with_kwargs=True) for path, one in double.named_modules() if path
    ]
    try:
        with as_found(double, watched=False):
            double(*bare(args), **bare(dict(kwargs)))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def bare(given: Any) -> Any:
    """Cut tensors loose from what they were computed of, with or without a gradient as they are."""

    def loose(one: Any) -> Any:
        return one.detach().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one

    return pytree.tree_map(loose, given)
