"""The expressions of a kernel's TIR as closures of numpy values: what lockstep.py runs statements with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lockstep_memory import Arena, Local, LockstepError, Machine, Pointer, Shared, Value
from lockstep_ops import BFLOAT16, FUNCTIONS, Run, ptx, same_bits, shuffle

_EXTERNS = {"__fmaf_rn": "fma", "fmaf": "fma"}


def key_of(var: Any) -> int:
    """What tells variables apart: `==` of two of them would make an expression."""
    return int(var.__chandle__())


_TYPES: dict[int, tuple[Any, np.dtype]] = {}  # by the handle of a TIR type, which is kept alive, and of a buffer of any


def dtype_of(ty: Any) -> np.dtype:
    """The numpy type of an element of a TIR type, looked up once: asking TVM takes longer than most instructions."""
    key = key_of(ty)
    if key not in _TYPES:
        name = str(ty.dtype).split("x")[0]
        _TYPES[key] = ty, BFLOAT16 if name == "bfloat16" else np.dtype(name)
    return _TYPES[key][1]


class Values:
    """Closures of expressions. `values` holds what variables are bound to, `memories` what buffers are."""

    def __init__(self, machine: Machine, arena: Arena) -> None:
        self.machine, self.arena = machine, arena
        self.values: dict[int, Value] = {}
        self.memories: dict[int, tuple[Any, np.dtype, list[int]]] = {}
        self.made: dict[int, Callable[[], Value]] = {}  # closures of expressions, by the node's handle
        self.read: dict[Callable[[], Value], tuple[int, ...]] = {}  # the variables of those that read nothing else
        self.integers: dict[tuple[int, int], Callable[[], Value]] = {}  # closures of constants, by value and type
        self.handlers: dict[type, Callable[[Any], Callable[[], Value]]] = {}  # of expressions, by the node's type

    def value(self, node: Any) -> Callable[[], Value]:
        """The closure of an expression: one for all places of a node."""
        key = key_of(node)
        if key not in self.made:
            self.made[key] = self._made(node)
        return self.made[key]

    def _made(self, node: Any) -> Callable[[], Value]:
        kind = type(node)
        if kind not in self.handlers:
            self.handlers[kind] = self._handler(kind.__name__, node)
        return self.handlers[kind](node)

    def _handler(self, kind: str, node: Any) -> Callable[[Any], Callable[[], Value]]:
        if kind in _BINARY:
            return functools.partial(self._binary, _BINARY[kind])
        handler = getattr(self, f"_get_{kind.lower()}", None)
        if handler is None:
            raise NotImplementedError(f"expression {kind} is not interpreted: {node}")
        return handler

    def _get_intimm(self, node: Any) -> Callable[[], Value]:
        value, ty = int(node.value), node.ty
        key = value, key_of(ty)
        if key not in self.integers:
            self.integers[key] = self._constant(np.array(value).astype(dtype_of(ty))[()])
        return self.integers[key]

    def _get_floatimm(self, node: Any) -> Callable[[], Value]:
        return self._constant(dtype_of(node.ty).type(float(node.value)))

    def _constant(self, value: Value) -> Callable[[], Value]:
        def run() -> Value:
            return value

        self.read[run] = ()
        return run

    def _get_var(self, node: Any) -> Callable[[], Value]:
        values, var = self.values, key_of(node)

        def run() -> Value:
            return values[var]

        self.read[run] = (var,)
        return run

    def _kept(self, make: Callable[[], Value], *operands: Callable[[], Value]) -> Callable[[], Value]:
        """`make`, which is of these operands alone: computed anew where a variable that they read was bound anew. What
        is of threads and not of loops is so computed once."""
        if any(operand not in self.read for operand in operands):
            return make
        read = tuple({var: None for operand in operands for var in self.read[operand]})
        if not read:
            return self._constant(make())
        run = _kept_of_one(make, read[0], self.values) if len(read) == 1 else _kept_of(make, read, self.values)
        self.read[run] = read
        return run

    def _fixed(self, value: Callable[[], Value]) -> Value:
        """The value of a constant; None where it is none."""
        return value() if self.read.get(value) == () else None

    def _binary(self, make: Callable[[np.dtype], Callable[[Value, Value], Value]], node: Any) -> Callable[[], Value]:
        left = node.a
        function, a, b = make(dtype_of(left.ty)), self.value(left), self.value(node.b)
        by = self._fixed(b)
        return self._kept((lambda: function(a(), b())) if by is None else (lambda: function(a(), by)), a, b)

    def _get_and(self, node: Any) -> Callable[[], Value]:
        return self._choose(node.a, node.b, None, np.bool_(False))

    def _get_or(self, node: Any) -> Callable[[], Value]:
        return self._choose(node.a, None, node.b, np.bool_(True))

    def _get_not(self, node: Any) -> Callable[[], Value]:
        value = self.value(node.a)
        return self._kept(lambda: np.logical_not(value()), value)

    def _get_bitwisenot(self, node: Any) -> Callable[[], Value]:
        value = self.value(node.a)
        return lambda: np.invert(value())

    def _get_select(self, node: Any) -> Callable[[], Value]:
        """Both sides are computed, so both must be legal for every lane: if_then_else guards."""
        condition, a, b = (self.value(n) for n in (node.condition, node.true_value, node.false_value))

        def run() -> Value:
            holds, first, second = condition(), a(), b()
            return (first if holds else second) if np.ndim(holds) == 0 else np.where(holds, first, second)

        return self._kept(run, condition, a, b)

    def _choose(self, condition: Any, then: Any, other: Any, default: Value = None) -> Callable[[], Value]:
        """One of two expressions, each computed only by the lanes that want it (a missing one is the default)."""
        test, machine = self.value(condition), self.machine
        a = self.value(then) if then is not None else lambda: default
        b = self.value(other) if other is not None else lambda: default

        def run() -> Value:
            holds = test()
            if np.ndim(holds) == 0:
                return a() if holds else b()
            first, second = machine.under(holds, a), machine.under(~holds, b)
            if first is None or second is None:
                return first if second is None else second
            return np.where(holds, first, second)

        return run

    def _get_cast(self, node: Any) -> Callable[[], Value]:
        value, dtype = self.value(node.value), dtype_of(node.ty)
        return self._kept(lambda: value().astype(dtype), value)

    def _get_ramp(self, node: Any) -> Callable[[], Value]:
        """Elements of vectors are the first axis: (vector, lanes or 1)."""
        base, stride, count = self.value(node.base), self.value(node.stride), int(node.lanes)
        steps = np.arange(count)[:, None]
        return lambda: np.atleast_1d(base())[None] + (steps * stride()).astype(dtype_of(node.ty))

    def _get_broadcast(self, node: Any) -> Callable[[], Value]:
        return self.value(node.value)

    def _get_tensorload(self, node: Any) -> Callable[[], Value]:
        memory, dtype, shape = self.memories[key_of(node.source)]
        index = self._index(node.indices, shape)
        if isinstance(memory, Local):
            register = self._register(memory, index)
            return _by_row(memory.load, index) if register is None else lambda: memory.load_register(register)
        size = dtype.itemsize

        def element(at: Value) -> Value:
            words = memory.read(np.asarray(at, np.int64) * size, size, size)[..., 0]
            return words.view(dtype) if np.ndim(words) else np.asarray(words).view(dtype)[()]

        return _by_row(element, index)

    def _get_call(self, node: Any) -> Callable[[], Value]:
        name = node.op.name
        last = name.rsplit(".", 1)[1]
        if name.startswith("tirx.ptx."):
            return ptx(self, last, node.args)
        if last in _CALLS:
            return _CALLS[last](self, node)
        if last.startswith("__shfl"):
            return shuffle(self, last.removeprefix("__shfl_").removesuffix("sync").removesuffix("_"), node.args)
        args = list(node.args)
        if last in ("call_pure_extern", "call_extern"):
            called = args.pop(0).value
            last = _EXTERNS.get(called, called.removesuffix("f"))
        if last == "func_call":  # a function in CUDA: its name, the operands, its text
            last = args.pop(0).value
            args.pop()
        if last not in FUNCTIONS:
            raise NotImplementedError(f"call {name} is not interpreted: add it to lockstep_ops.FUNCTIONS")
        function, operands = FUNCTIONS[last], [self.value(arg) for arg in args]
        return self._kept(lambda: function(*(operand() for operand in operands)), *operands)

    def _sync(self, scope: str) -> Run:
        return self.arena.warp_barrier if scope == "warp" else self.arena.barrier

    def _reinterpret(self, node: Any) -> Callable[[], Value]:
        value, dtype = self.value(node.args[0]), dtype_of(node.ty)

        return lambda: same_bits(value(), dtype)

    def _address_of(self, load: Any) -> Callable[[], Pointer]:
        memory, dtype, shape = self.memories[key_of(load.source)]
        if isinstance(memory, Local):
            raise NotImplementedError(f"the address of registers ({load}) is not interpreted")
        index, size = self._index(load.indices, shape), dtype.itemsize
        return lambda: Pointer(memory, np.asarray(index(), np.int64) * size, size)

    def _shared_address(self, node: Any) -> Callable[[], Value]:
        pointer = self.value(node)

        def run() -> Value:
            found = pointer()
            if not isinstance(found.memory, Shared):
                raise LockstepError(f"the shared address of {found.memory.name}, which is not shared memory")
            return (found.memory.start + found.offset).astype(np.uint32)[()]

        return run

    # Memory ----------------------------------------------------------------------------------------------------------

    def _index(self, indices: Sequence[Any], shape: Sequence[int]) -> Callable[[], Value]:
        """The flat index, each dimension checked (one that the flat bounds would let pass into another row)."""
        parts = [self.value(index) for index in indices]
        if len(parts) == 1:
            return parts[0]
        machine = self.machine

        def run() -> Value:
            flat: Value = np.int64(0)
            for axis, (part, extent) in enumerate(zip(parts, shape, strict=True)):
                index = part()
                for row in index if np.ndim(index) == 2 else (index,):
                    bad = (row < 0) | (row >= extent)
                    bad = machine.spread(bad) if np.ndim(bad) else bad
                    machine.fail_where(bad, row, _outside_axis(axis, extent))
                flat = flat * extent + index
            return flat

        return run

    def _register(self, memory: Local, index: Callable[[], Value]) -> int | None:
        """The number of a register that the text names, as most do: it is looked at once."""
        found = self._fixed(index)
        return int(found) if found is not None and 0 <= found < memory.elements else None

    def _place(self, buffer: Any, indices: Sequence[Any]) -> Callable[[Value], None]:
        memory, dtype, shape = self.memories[key_of(buffer)]
        index, machine = self._index(indices, shape), self.machine
        register = self._register(memory, index) if isinstance(memory, Local) else None

        def one(at: Value, value: Value) -> None:
            if isinstance(memory, Local):
                memory.store(at, value)
            else:
                data = np.ascontiguousarray(machine.spread(value)).view(f"u{dtype.itemsize}")[:, None]
                memory.write(np.asarray(at, np.int64) * dtype.itemsize, data, dtype.itemsize)

        def store(value: Value) -> None:
            if value.dtype != dtype:
                value = same_bits(value, dtype)
            if register is not None:
                memory.store_register(register, value)
                return
            at = index()
            if np.ndim(at) < 2:
                one(at, value)
                return
            for i, row in enumerate(at):
                part = value[i] if np.ndim(value) == 2 else value
                one(_narrow(row), _narrow(part) if np.ndim(part) else part)

        return store

    def memory_of(self, buffer: Any) -> Any:
        """The memory that a buffer is a view of."""
        return self.memories[key_of(buffer)][0]

    def place(self, node: Any) -> Callable[[Value], None]:
        """Stores into a register that an instruction names as its destination (the same bits, if types differ)."""
        return self._place(node.source, node.indices)


def _kept_of_one(make: Callable[[], Value], var: int, values: Mapping[int, Value]) -> Callable[[], Value]:
    """See `Values._kept`. A value is bound by replacing it."""
    before: Value = None
    kept: Value = None

    def run() -> Value:
        nonlocal before, kept
        value = values[var]
        if value is not before:
            before, kept = value, make()
        return kept

    return run


def _kept_of(make: Callable[[], Value], read: Sequence[int], values: Mapping[int, Value]) -> Callable[[], Value]:
    before: list[Value] = [None] * len(read)
    kept: Value = None

    def run() -> Value:
        nonlocal before, kept
        for var, value in zip(read, before):  # noqa: B905 - of one length, and strict takes time
            if values[var] is not value:
                before, kept = [values[var] for var in read], make()
                break
        return kept

    return run


def _outside_axis(axis: int, extent: int) -> Callable[[int], str]:
    return lambda index: f"index {index} of axis {axis} out of bounds ({extent})"


def _narrow(row: np.ndarray) -> Value:
    return row[0] if row.shape == (1,) else row


def _by_row(load: Callable[[Value], Value], index: Callable[[], Value]) -> Callable[[], Value]:
    """A load whose index may be a vector: its elements are loaded one by one and stacked."""

    def run() -> Value:
        at = index()
        if np.ndim(at) < 2:
            return load(at)
        return np.stack([np.atleast_1d(load(_narrow(row))) for row in at])

    return run


def _divide(dtype: np.dtype) -> Callable[[Value, Value], Value]:
    """C's division: integers round toward zero."""
    if dtype.kind == "i":
        return lambda a, b: (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(dtype)
    return np.floor_divide if dtype.kind == "u" else np.divide


def _plain(function: Any) -> Callable[[np.dtype], Any]:
    return lambda dtype: function


# Kind of node -> function of the operands' type that gives the function.
_BINARY: dict[str, Callable[[np.dtype], Any]] = {
    "Add": _plain(np.add),
    "Sub": _plain(np.subtract),
    "Mul": _plain(np.multiply),
    "Div": _divide,
    "Mod": _plain(np.fmod),
    "FloorDiv": _plain(np.floor_divide),
    "FloorMod": _plain(np.remainder),
    "Min": lambda dtype: np.fmin if dtype.kind == "f" else np.minimum,
    "Max": lambda dtype: np.fmax if dtype.kind == "f" else np.maximum,
    "EQ": _plain(np.equal),
    "NE": _plain(np.not_equal),
    "LT": _plain(np.less),
    "LE": _plain(np.less_equal),
    "GT": _plain(np.greater),
    "GE": _plain(np.greater_equal),
    "BitwiseAnd": _plain(np.bitwise_and),
    "BitwiseOr": _plain(np.bitwise_or),
    "BitwiseXor": _plain(np.bitwise_xor),
    "LShift": _plain(np.left_shift),
    "RShift": _plain(np.right_shift),
}

_CALLS: dict[str, Callable[[Values, Any], Callable[[], Any]]] = {
    "if_then_else": lambda compiler, node: compiler._choose(*node.args),
    "address_of": lambda compiler, node: compiler._address_of(node.args[0]),
    "reinterpret": lambda compiler, node: compiler._reinterpret(node),
    "cvta_generic_to_shared": lambda compiler, node: compiler._shared_address(node.args[0]),
    "cta_sync": lambda compiler, node: compiler._sync("shared"),
    "warp_sync": lambda compiler, node: compiler._sync("warp"),
    "tvm_storage_sync": lambda compiler, node: compiler._sync(node.args[0].value),
    "thread_fence": lambda compiler, node: lambda: None,
    "likely": lambda compiler, node: compiler.value(node.args[0]),
    "ldg": lambda compiler, node: compiler.value(node.args[0].args[0]),
}
