"""The problem of a generic operator, and the views through which all elementwise and moving kinds are written.

Every operand is dense and is seen through a *view*: an element offset and a stride per axis of a common index space.
Broadcasting is a stride of 0, a transposition permutes strides, a slice has an offset and larger strides, and so on.
`nest`, `each` and `rows` walk a space; how is the code generator's, which has said so by `walked_by`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.steps import Expr

Shape = tuple[int, ...]
Type = tuple[Shape, str]  # shape and dtype


@dataclasses.dataclass(frozen=True)
class GenericProblem:
    """An operator of the standard domain on dense tensors of any rank.

    `inputs` and `outputs` are those that exist, in order. Operands that must be known when compiling (shapes, axes,
    starts, ends, steps, pads, split lengths, a Dropout's ratio) are no inputs but attributes, under the name that ONNX
    gives the input; lists as tuples.
    """

    op_type: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    def attribute(self, name: str, default: Any = None) -> Any:
        """Give an attribute's value, lists as tuples, or `default`."""
        return dict(self.attributes).get(name, default)

    def number(self, name: str, default: float) -> Any:
        """Give an attribute that is one number, perhaps given as a tensor of one element."""
        value = self.attribute(name, default)
        return value[0] if isinstance(value, tuple) else value

    def shape(self, index: int = 0) -> Shape:
        """Give the shape of an input."""
        return self.inputs[index][0]

    @property
    def out_shape(self) -> Shape:
        """Give the shape of the first output."""
        return self.outputs[0][0]

    @property
    def out_dtype(self) -> str:
        """Name the dtype of the first output."""
        return self.outputs[0][1]

    def axis(self, default: int) -> int:
        """Give the attribute `axis` counted from the front, of the first input."""
        return int(self.number("axis", default)) % max(1, len(self.shape()))


class Buffers(Protocol):
    """The arguments of a kernel under construction, by name."""

    def __getitem__(self, name: str) -> Any: ...
    def __contains__(self, name: str) -> bool: ...


Emit = Callable[[GenericProblem, Buffers], None]


@dataclasses.dataclass(frozen=True)
class View:
    """A dense tensor over an index space: the element at index i is  base + sum i[axis]*strides[axis]."""

    strides: tuple[int, ...]
    base: int = 0


def row_major(shape: Shape) -> tuple[int, ...]:
    """Count the elements from one place to the next along each axis of a dense tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def dense_view(shape: Shape) -> View:
    """View a dense tensor over its own shape."""
    return View(row_major(shape))


def broadcast_view(shape: Shape, space: Shape) -> View:
    """View a tensor of this shape, broadcast to the space by numpy's rule."""
    missing = len(space) - len(shape)
    own = row_major(shape)
    return View((0,) * missing + tuple(0 if size == 1 else s for size, s in zip(shape, own, strict=True)))


def collapse(space: Shape, views: Sequence[View]) -> tuple[Shape, list[View]]:
    """Give the same walk over the fewest axes: none of size 1, no neighbours that every view walks as one."""
    kept = [i for i, size in enumerate(space) if size != 1]
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for i in kept:
        if sizes and all(own[-1] == view.strides[i] * space[i] for own, view in zip(strides, views, strict=True)):
            sizes[-1] *= space[i]
            for own, view in zip(strides, views, strict=True):
                own[-1] = view.strides[i]
        else:
            sizes.append(space[i])
            for own, view in zip(strides, views, strict=True):
                own.append(view.strides[i])
    return tuple(sizes), [View(tuple(own), view.base) for own, view in zip(strides, views, strict=True)]


Along = Callable[[Callable[[Expr], None]], None]  # calls what it is given at each element of a row


class Walk(Protocol):
    """How a code generator goes over a space, and deals it to threads."""

    @property
    def busy(self) -> int:
        """Count the threads that are to have work: for fewer it is worth sharing out in a more costly way."""

    def nest(self, space: Shape, views: Sequence[View], emit: Callable[..., None]) -> None:
        """Emit `emit(index of each view)` for every point. It may be vectorised: no loops, branches or names in it."""

    def each(self, count: int, emit: Callable[[Expr], None]) -> None:
        """Emit `emit(i)` for i < count. A thread does what it emits alone, loops and registers included."""

    def rows(self, count: int, inner: int, emit: Callable[[Expr, Along], None]) -> None:
        """Emit `emit(row, along)` for row < count; `along(visit)` visits the elements k < inner of the row.

        Threads may share a row: what stands around `along` is done by each of them for its own elements.
        """

    def register(self, dtype: str) -> Any:
        """Give a buffer of one element, a thread's own."""


_walk: contextvars.ContextVar[Walk | None] = contextvars.ContextVar("walk", default=None)


@contextlib.contextmanager
def walked_by(walk: Walk) -> Iterator[None]:
    """Set, within the block, what `walk` gives."""
    token = _walk.set(walk)
    try:
        yield
    finally:
        _walk.reset(token)


def walk() -> Walk:
    """Give the way to walk that the code generator at work has."""
    found = _walk.get()
    assert found is not None, "walk outside of walked_by"
    return found


def nest(space: Shape, views: Sequence[View], emit: Callable[..., None]) -> None:
    """Emit `emit(index of each view)` for every point of the space."""
    walk().nest(space, views, emit)


def starts_of(row: Expr, outer: Shape, views: Sequence[View]) -> list[Expr]:
    """Write where each view has the first element of a row, whose number counts over the axes `outer`."""
    starts: list[Expr] = [tirx.const(view.base, "int32") for view in views]
    for axis in reversed(range(len(outer))):
        place = row if axis == 0 else tirx.floormod(row, outer[axis])
        row = tirx.floordiv(row, outer[axis])
        starts = [at_stride(start, place, view.strides[axis]) for start, view in zip(starts, views, strict=True)]
    return starts


def at_stride(base: Expr, place: Expr, stride: int) -> Expr:
    """Write base + place*stride, int32; `base` alone where the stride is 0."""
    if stride == 0:
        return base if not isinstance(base, int) else tirx.const(base, "int32")
    return base + place * stride


def dtype_of(x: Expr) -> str:
    """Name the dtype of an expression."""
    return str(x.ty.dtype)


def store(args: Buffers, name: str, index: Expr, value: Expr) -> None:
    """Store a value at a flat index of the argument `name`."""
    T.buffer_store(args[name], value, [index])
