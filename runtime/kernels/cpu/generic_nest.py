"""The problem of a generic operator, and the loop nest that serves all of its elementwise and moving kinds.

Every operand is dense and is seen through a *view*: an element offset and a stride per axis of a common index space.
Broadcasting is a stride of 0, a transposition permutes strides, a slice has an offset and larger strides, and so on.

    collapse axes that all views walk as one  ->  parallel over the outer axes, vectors along the inner one
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.layout import flat
from bnfuse.runtime.kernels.cpu.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import Args, vectors
from bnfuse.runtime.targets.target import CpuTarget

Shape = tuple[int, ...]
Type = tuple[Shape, str]  # shape and dtype


@dataclasses.dataclass(frozen=True)
class GenericProblem:
    """An operator of the standard domain or com.microsoft on dense tensors of any rank.

    `inputs` and `outputs` are those that exist, in order. Operands that must be known when compiling (shapes, axes,
    starts, ends, steps, pads, split lengths, a Dropout's ratio) are no inputs but attributes, under the name that ONNX
    gives the input; lists as tuples.
    """

    op_type: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    def attribute(self, name: str, default: Any = None) -> Any:
        return dict(self.attributes).get(name, default)

    def number(self, name: str, default: float) -> Any:
        """An attribute that is one number, perhaps given as a tensor of one element."""
        value = self.attribute(name, default)
        return value[0] if isinstance(value, tuple) else value

    def shape(self, index: int = 0) -> Shape:
        """Of an input."""
        return self.inputs[index][0]

    @property
    def out_shape(self) -> Shape:
        return self.outputs[0][0]

    @property
    def out_dtype(self) -> str:
        return self.outputs[0][1]

    def axis(self, default: int) -> int:
        """The attribute `axis` counted from the front, of the first input."""
        return int(self.attribute("axis", default)) % max(1, len(self.shape()))


Emit = Callable[[GenericProblem, CpuTarget, Args], None]


@dataclasses.dataclass(frozen=True)
class View:
    """A dense tensor over an index space: the element at index i is  base + sum i[axis]*strides[axis]."""

    strides: tuple[int, ...]
    base: int = 0


def row_major(shape: Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def dense_view(shape: Shape) -> View:
    return View(row_major(shape))


def broadcast_view(shape: Shape, space: Shape) -> View:
    """A tensor of this shape, broadcast to the space by numpy's rule."""
    missing = len(space) - len(shape)
    own = row_major(shape)
    return View((0,) * missing + tuple(0 if size == 1 else s for size, s in zip(shape, own, strict=True)))


def collapse(space: Shape, views: Sequence[View]) -> tuple[Shape, list[View]]:
    """The same walk over as few axes as possible: no axes of size 1, no neighbours that every view walks as one."""
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


Nest = Callable[[Shape, Sequence[View], Callable[..., None]], None]
_other: contextvars.ContextVar[Nest | None] = contextvars.ContextVar("other", default=None)


@contextlib.contextmanager
def nested_by(other: Nest) -> Iterator[None]:
    """Within the block, `nest` is what another code generator makes of a space, its views and `emit`."""
    token = _other.set(other)
    try:
        yield
    finally:
        _other.reset(token)


def nest(space: Shape, views: Sequence[View], target: CpuTarget, emit: Callable[..., None]) -> None:
    """`emit(index of each view)` for every point of the space, inside a vectorised loop."""
    other = _other.get()
    if other is not None:
        other(space, views, emit)
        return
    if math.prod(space) == 0:
        T.evaluate(tirx.const(0, "int32"))
        return
    space, views = collapse(space, views)
    if not space:
        emit(*(tirx.const(view.base, "int32") for view in views))
    elif len(space) == 1:
        flat(space[0], target, lambda i: emit(*(at_stride(view.base, i, view.strides[0]) for view in views)))
    else:
        _rows(space, views, target, emit)


def _rows(space: Shape, views: Sequence[View], target: CpuTarget, emit: Callable[..., None]) -> None:
    count, inner = math.prod(space[:-1]), space[-1]
    threads = min(target.threads, count)
    with T.parallel(0, threads) as thread:
        first, own = tir.share(count, threads, thread)
        with T.serial(0, own) as i:
            starts = [T.bind(start) for start in starts_of(first + i, space[:-1], views)]
            for vector in vectors(inner, target.lanes):
                with vector.each() as j:
                    ends = zip(starts, views, strict=True)
                    emit(*(at_stride(start, vector.base + j, view.strides[-1]) for start, view in ends))


def starts_of(row: Expr, outer: Shape, views: Sequence[View]) -> list[Expr]:
    """Where each view has the first element of a row."""
    starts: list[Expr] = [tirx.const(view.base, "int32") for view in views]
    for axis in reversed(range(len(outer))):
        place = row if axis == 0 else tirx.floormod(row, outer[axis])
        row = tirx.floordiv(row, outer[axis])
        starts = [at_stride(start, place, view.strides[axis]) for start, view in zip(starts, views, strict=True)]
    return starts


def at_stride(base: Expr, place: Expr, stride: int) -> Expr:
    if stride == 0:
        return base if not isinstance(base, int) else tirx.const(base, "int32")
    return base + place * stride


def parallel_rows(count: int, target: CpuTarget, emit: Callable[[Expr], None]) -> None:
    """`emit(row)` for each of `count` rows, dealt to the threads."""
    threads = min(target.threads, count)
    with T.parallel(0, threads) as thread:
        first, own = tir.share(count, threads, thread)
        with T.serial(0, own) as i:
            emit(first + i)


def dtype_of(x: Expr) -> str:
    return str(x.ty.dtype)


def store(args: Args, name: str, index: Expr, value: Expr) -> None:
    T.buffer_store(args[name], value, [index])
