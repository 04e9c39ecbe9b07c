"""A state by the names of torch or of a graph, held against what a graph has.

found = matched(state, graph_names, module, to_array)    # by the graph's names, with what is missing and unexpected
fit = fitted(arrays, shapes, classes)                    # the arrays whose shapes fit; a line for those that do not
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import some
from bnfuse.graph.module_state import COUNT, ModuleState, digest_of

COMPILED, PARALLEL = "_orig_mod.", "module."  # what torch.compile and DistributedDataParallel put into names
MOMENTS = "optimizer."  # of a checkpoint of ours, beside the state


@dataclasses.dataclass(frozen=True)
class Matched:
    """A state by the names of a graph, and what of it does not fit; the names of both lists are the state's kind."""

    values: dict[str, Any]
    tracked: dict[str, int]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def matched(
    state: Mapping[str, Any],
    own: Collection[str],
    module: ModuleState,
    to_array: Callable[[Any, str], np.ndarray],
) -> Matched:
    """Find the tensors `own` of a graph in a state: under the graph's names or the module's, also with the prefixes of
    torch.compile and DistributedDataParallel.

    Where no name is known, and all begin with the same attribute of a module around it ("model." of Lightning), they
    are meant without. Moments of an optimiser are left out, and so is what no result of the graph depends on.
    `to_array(value, what)` gives a value as numpy's. Raises BnfuseError where a tensor comes twice with different
    values, and where a buffer differs that is a constant of the graph.
    """
    order, own = tuple(own), frozenset(own)
    graph_names = {**{name: name for name in own}, **{k: v for k, v in module.names.items() if v in own}}
    known = {*graph_names, *module.constants, *module.unread, *module.tracked}
    values: dict[str, Any] = {}
    tracked: dict[str, int] = {}
    unexpected = []
    prefix = common_prefix(state, known, own)
    for given, value in state.items():
        name = own_name(given.removeprefix(prefix), known, own)
        if name in graph_names:
            _put(values, graph_names[name], value, given, to_array)
        elif is_count(name, module, own):
            tracked[name] = _count(to_array(value, f"the state's '{given}'"), given)
        elif name in module.constants:
            if digest_of(to_array(value, f"the state's '{given}'")) != module.constants[name]:
                raise BnfuseError(
                    f"the state's '{given}' is a constant of the graph, with other values there: build the graph anew "
                    "of the module with that state"
                )
        elif not (name in module.unread or given.startswith(MOMENTS)):
            unexpected.append(given)
    needed: dict[str, str] = {}  # name of the graph -> what it is called in messages
    for name, graph_name in module.names.items() if module.is_known else zip(order, order, strict=True):
        if graph_name in own:
            needed.setdefault(graph_name, name)
    missing = tuple(name for graph_name, name in needed.items() if graph_name not in values)
    return Matched(values, tracked, missing, tuple(unexpected))


def common_prefix(state: Iterable[str], known: Collection[str], own: Collection[str]) -> str:
    """Give what all names of a state begin with in front of known ones, where none is known as it is; else nothing."""
    names = [name for name in state if not name.startswith(MOMENTS)]
    if not names or any(is_known(own_name(name, known, own), known, own) for name in names):
        return ""
    first, dot, _ = names[0].partition(".")
    prefix = first + dot
    meant = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    found = any(is_known(own_name(name, known, own), known, own) for name in meant)
    return prefix if dot and found and len(meant) == len(names) else ""


def is_known(name: str, known: Collection[str], own: Collection[str]) -> bool:
    """Tell whether a name is one of the graph or the module, or that of a count of batches."""
    return name in known or statistic_of(name) in own


def own_name(given: str, known: Collection[str], own: Collection[str]) -> str:
    """Give a name of a state as the graph or the module has it: without the prefixes of wrappers, where it is not known
    with them."""
    name = given
    for shorter in _shortened(given):
        if is_known(name, known, own):
            break
        name = shorter
    return name if is_known(name, known, own) else given


def _shortened(name: str) -> Iterable[str]:
    """Take wrappers' parts out of a name, one after the other."""
    if COMPILED in name:
        name = name.replace(COMPILED, "")
        yield name
    while name.startswith(PARALLEL):
        name = name.removeprefix(PARALLEL)
        yield name


def statistic_of(name: str) -> str:
    """Name the running mean of the BatchNorm whose count of batches this is; of anything else nothing."""
    prefix, dot, last = name.rpartition(".")
    return f"{prefix}{dot}running_mean" if last == COUNT else ""


def is_count(name: str, module: ModuleState, own: Collection[str]) -> bool:
    """Tell whether a name is that of a BatchNorm's count of batches."""
    return name in module.tracked or statistic_of(name) in own


def _count(array: np.ndarray, given: str) -> int:
    if array.size != 1 or array.dtype.kind not in "iu":
        raise BnfuseError(f"the state's '{given}' is {array.dtype} {list(array.shape)}: it must be a count of batches")
    return int(array.reshape(()))


def _put(values: dict[str, Any], name: str, value: Any, given: str, to_array: Callable[[Any, str], np.ndarray]) -> None:
    """Put a value in its place. Raises BnfuseError where another one is there: of a tensor under two names."""
    if name in values and not np.array_equal(to_array(value, given), to_array(values[name], given), equal_nan=True):
        raise BnfuseError(f"the state's '{given}' is one tensor with '{name}' in the graph, and has other values here")
    values[name] = value


@dataclasses.dataclass(frozen=True)
class Fit:
    """Arrays of a state beside the shapes of a graph: those that go in, and the names of the head that was left out."""

    arrays: dict[str, np.ndarray]
    head: tuple[str, ...] = ()


def fitted(
    arrays: Mapping[str, np.ndarray],
    own: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    classes: int | None,
    *,
    skip_head: bool = False,
    remedy: str = "skip_head=True",
) -> Fit:
    """Hold arrays against shape and type of the graph's own tensors. With `skip_head` the last layer of a network for
    another number of classes is left out: tensors that differ in one dimension, which is `classes` in the graph.

    Raises BnfuseError, which names all that do not fit in a line. `remedy` is how `skip_head` is said.
    """
    wrong = {name: array for name, array in arrays.items() if array.shape != own[name][0]}
    head = [name for name, array in wrong.items() if _is_head(array.shape, own[name][0], classes)]
    left = head if skip_head else []
    others = [name for name in wrong if name not in left]
    if others:
        name = others[0]
        found, wanted = list(wrong[name].shape), list(own[name][0])
        more = f" (and {some([repr(n) for n in others[1:]])} alike)" if others[1:] else ""
        what = f"the state's '{name}' has the shape {found}, not {wanted}{more}"
        if len(head) == len(wrong) and not skip_head:
            what += f": it is for another number of classes than {classes}. {remedy} leaves the last layer as it is"
        raise BnfuseError(what)
    if skip_head and not left:
        raise BnfuseError(
            f"{remedy}: no tensor of the state is for another number of classes than {classes}: leave it out"
        )
    for name, array in arrays.items():
        if not np.can_cast(array.dtype, own[name][1], "same_kind"):
            raise BnfuseError(f"the state's '{name}' is {array.dtype}, not {own[name][1]}")
    return Fit({name: array for name, array in arrays.items() if name not in left}, tuple(left))


def _is_head(found: tuple[int, ...], wanted: tuple[int, ...], classes: int | None) -> bool:
    """Tell whether two shapes differ in one dimension alone, which is the number of classes in the graph."""
    if classes is None or len(found) != len(wanted):
        return False
    differing = [b for a, b in zip(found, wanted, strict=True) if a != b]
    return differing == [classes]


def require_all(missing: Collection[str], unexpected: Collection[str], total: int, remedy: str) -> None:
    """Raise BnfuseError, one line with all that is missing and all that is unexpected, unless neither is anything."""
    if not missing and not unexpected:
        return
    found = [f"lacks {some(list(map(repr, missing)))} ({len(missing)} of the graph's {total} names)"] if missing else []
    found += [f"has {some(list(map(repr, unexpected)))} ({len(unexpected)} names), which the graph has not"] * bool(
        unexpected
    )
    raise BnfuseError(f"the state {' and '.join(found)}: is it of this network? {remedy}")
