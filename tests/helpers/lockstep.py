"""Runs the TIR of a CUDA kernel on the CPU: all threads of several blocks in lockstep, as lanes of numpy arrays.

The un-lowered PrimFunc is turned into closures once. An expression that is the same for all threads stays a numpy
scalar, any other is an array (lanes,). Control flow that depends on the thread narrows the mask of active lanes.
Accesses are checked (bounds, alignment, use before writing, races): see lockstep_memory. What calls mean is in
lockstep_ops, products of warpgroups in lockstep_wgmma.

Lockstep is one legal schedule, not all of them: a race that the records of shared memory miss stays unseen, and global
memory is watched for bounds only. float32 is rounded after every operation, where nvcc contracts a * b + c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lockstep_memory import Arena, Global, Local, LockstepError, Machine, Pointer, Shared, Value
from lockstep_ops import BFLOAT16, FUNCTIONS, Run, ptx, shuffle

__all__ = ["LockstepError", "run"]


_EXTERNS = {"__fmaf_rn": "fma", "fmaf": "fma"}


def run(function: Any, arguments: Mapping[str, Any], *, lanes: int = 1 << 13, races: bool = True) -> None:
    """Run a kernel over its whole grid. Arrays, flat or not, are by parameter name and changed in place.

    16-bit floats come as their bits (uint16) or as ml_dtypes/float16 arrays: only the number of bytes is compared with
    the parameter's.
    Blocks run in groups of at most `lanes` threads, in the order of their linear index.
    """
    with np.errstate(all="ignore"):
        _Compiler(function, arguments, lanes, races).run()


def _key(var: Any) -> int:
    """What tells variables apart: `==` of two of them would make an expression."""
    return int(var.__chandle__())


_TYPES: dict[int, tuple[Any, np.dtype]] = {}  # by the handle of a TIR type, which is kept alive, and of a buffer of any


def _dtype(ty: Any) -> np.dtype:
    """The numpy type of an element of a TIR type, looked up once: asking TVM takes longer than most instructions."""
    key = _key(ty)
    if key not in _TYPES:
        name = str(ty.dtype).split("x")[0]
        _TYPES[key] = ty, BFLOAT16 if name == "bfloat16" else np.dtype(name)
    return _TYPES[key][1]


def _grid(body: Any) -> dict[str, tuple[Any, int]]:
    """Thread index -> (variable, extent), of the launch_thread attributes that begin a kernel."""
    found = {}
    while type(body).__name__ == "AttrStmt":
        if body.attr_key == "thread_extent":
            found[body.node.thread_tag] = body.node.var, int(body.value)
        body = body.body
    return found


class _Compiler:
    """Closures of one function. `values` holds what variables are bound to, `memories` what buffers are."""

    def __init__(self, function: Any, arguments: Mapping[str, Any], lanes: int, races: bool) -> None:
        self.function = function  # keeps the nodes alive, whose handles are keys
        self.grid = _grid(function.body)
        self.extent = {tag: extent for tag, (_, extent) in self.grid.items()}
        threads = math.prod(e for tag, e in self.extent.items() if tag.startswith("threadIdx"))
        self.blocks = math.prod(e for tag, e in self.extent.items() if tag.startswith("blockIdx"))
        self.machine = Machine(threads, max(1, min(self.blocks, lanes // threads)))
        self.arena = Arena(self.machine, races)
        self.values: dict[int, Value] = {}
        self.memories: dict[int, tuple[Any, np.dtype, list[int]]] = {}
        self.made: dict[int, Callable[[], Value]] = {}  # closures of expressions, by the node's handle
        self.read: dict[Callable[[], Value], tuple[int, ...]] = {}  # the variables of those that read nothing else
        self._bind(function, arguments)
        self.body = self.statement(function.body)

    def _bind(self, function: Any, arguments: Mapping[str, Any]) -> None:
        names = [param.name for param in function.params]
        if set(names) != set(arguments):
            raise ValueError(f"the kernel's parameters are {names}, the arguments {sorted(arguments)}")
        for param in function.params:
            given = arguments[param.name]
            if type(param.ty).__name__ == "BufferType":
                self.memories[_key(param)] = self._global(param, given)
            else:
                self.values[_key(param)] = _dtype(param.ty).type(given)

    def _global(self, param: Any, array: np.ndarray) -> tuple[Any, np.dtype, list[int]]:
        dtype, shape = _dtype(param), [int(extent) for extent in param.shape]
        if array.nbytes != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{param.name}: {array.nbytes} bytes given, the parameter is {dtype}{shape}")
        return Global(self.machine, param.name, array), dtype, shape

    def run(self) -> None:
        machine = self.machine
        for first in range(0, self.blocks, machine.group):
            machine.first = first
            machine.mask = None if first + machine.group <= self.blocks else machine.block < self.blocks - first
            self._place_threads(first)
            for memory in {id(m): m for m, _, _ in self.memories.values()}.values():
                memory.reset()
            self.arena.reset()
            self.body()

    def _place_threads(self, first: int) -> None:
        """The thread indices of the lanes; a block index is a scalar where only one block runs."""
        for kind, linear in (("threadIdx", self.machine.thread), ("blockIdx", self.machine.block + first)):
            for axis in "xyz":
                tag = f"{kind}.{axis}"
                extent = self.extent.get(tag, 1)
                index, linear = (linear % extent).astype(np.int32), linear // extent
                if tag in self.grid:
                    uniform = extent == 1 or (kind == "blockIdx" and self.machine.group == 1)
                    self.values[_key(self.grid[tag][0])] = index[0] if uniform else index

    # Statements ------------------------------------------------------------------------------------------------------

    def statement(self, node: Any) -> Run:
        kind = type(node).__name__
        handler = getattr(self, f"_do_{kind.lower()}", None)
        if handler is None:
            raise NotImplementedError(f"statement {kind} is not interpreted: {node}")
        return handler(node)

    def _do_seqstmt(self, node: Any) -> Run:
        steps = [self.statement(child) for child in node.seq]

        def run() -> None:
            for step in steps:
                step()

        return run

    def _do_attrstmt(self, node: Any) -> Run:
        return self.statement(node.body)

    def _do_evaluate(self, node: Any) -> Run:
        if type(node.value).__name__ == "IntImm":
            return lambda: None
        return self._located(self.value(node.value), node)

    @staticmethod
    def _located(step: Run, node: Any) -> Run:
        """The step with its text in the errors it raises."""

        def run() -> None:
            try:
                step()
            except LockstepError as error:
                raise error.at(node) from None

        return run

    def _do_bind(self, node: Any) -> Run:
        value, var, values = self.value(node.value), _key(node.var), self.values

        def run() -> None:
            result = value()
            # a register's row is a view that a later store would change
            values[var] = result.copy() if isinstance(result, np.ndarray) and result.base is not None else result

        return self._located(run, node)

    def _do_allocbuffer(self, node: Any) -> Run:
        buffer = node.buffer
        dtype, shape, scope = _dtype(buffer), [int(extent) for extent in buffer.shape], buffer.scope()
        count = math.prod(shape)
        if scope == "local":
            memory: Any = Local(self.machine, buffer.name, count, dtype)
        elif scope in ("shared", "shared.dyn"):
            memory = self.arena.allocate(buffer.name, count * dtype.itemsize, int(buffer.data_alignment))
        else:
            raise NotImplementedError(f"memory scope {scope} of {buffer.name} is not interpreted")
        self.memories[_key(buffer)] = memory, dtype, shape
        return lambda: None

    def _do_declbuffer(self, node: Any) -> Run:
        buffer = node.buffer
        memory, dtype, _ = self.memories[_key(node.data.args[0])]
        if isinstance(memory, Local) and _dtype(buffer) != dtype:
            raise NotImplementedError(f"view {buffer.name} of registers with another type is not interpreted")
        self.memories[_key(buffer)] = memory, _dtype(buffer), [int(extent) for extent in buffer.shape]
        return lambda: None

    def _do_bufferstore(self, node: Any) -> Run:
        value, place = self.value(node.value), self._place(node.buffer, node.indices)
        return self._located(lambda: place(value()), node)

    def _do_ifthenelse(self, node: Any) -> Run:
        condition, then = self.value(node.condition), self.statement(node.then_case)
        other = self.statement(node.else_case) if node.else_case is not None else None
        machine = self.machine

        def run() -> None:
            holds = condition()
            if np.ndim(holds) == 0:
                if holds:
                    then()
                elif other:
                    other()
                return
            machine.under(holds, then)
            if other:
                machine.under(~holds, other)

        return run

    def _do_for(self, node: Any) -> Run:
        start, extent, body = self.value(node.min), self.value(node.extent), self.statement(node.body)
        var, values, machine = _key(node.loop_var), self.values, self.machine
        dtype = _dtype(node.loop_var.ty).type

        def run() -> None:
            low, count = start(), np.array(extent())[()]  # a copy: the body may store to the register it came from
            if np.ndim(count) == 0:
                for i in range(int(count)):
                    values[var] = low + dtype(i)
                    body()
                return
            for i in range(int(count[machine.active()].max(initial=0))):
                values[var] = low + dtype(i)
                machine.under(count > i, body)

        return run

    def _do_while(self, node: Any) -> Run:
        condition, body, machine = self.value(node.condition), self.statement(node.body), self.machine

        def step() -> bool:
            body()
            return True

        def run() -> None:
            before = machine.mask
            while True:
                holds = condition()
                if np.ndim(holds) == 0:
                    if not holds:
                        break
                    body()
                elif not machine.under(holds, step):
                    break
                else:
                    machine.mask = holds if machine.mask is None else holds & machine.mask
            machine.mask = before

        return run

    # Expressions -----------------------------------------------------------------------------------------------------

    def value(self, node: Any) -> Callable[[], Value]:
        """The closure of an expression: one for all places of a node."""
        key = _key(node)
        if key not in self.made:
            self.made[key] = self._made(node)
        return self.made[key]

    def _made(self, node: Any) -> Callable[[], Value]:
        kind = type(node).__name__
        if kind in _BINARY:
            return self._binary(_BINARY[kind], node)
        handler = getattr(self, f"_get_{kind.lower()}", None)
        if handler is None:
            raise NotImplementedError(f"expression {kind} is not interpreted: {node}")
        return handler(node)

    def _get_intimm(self, node: Any) -> Callable[[], Value]:
        return self._constant(np.array(int(node.value)).astype(_dtype(node.ty))[()])

    def _get_floatimm(self, node: Any) -> Callable[[], Value]:
        return self._constant(_dtype(node.ty).type(float(node.value)))

    def _constant(self, value: Value) -> Callable[[], Value]:
        def run() -> Value:
            return value

        self.read[run] = ()
        return run

    def _get_var(self, node: Any) -> Callable[[], Value]:
        values, var = self.values, _key(node)

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
        values = self.values
        before: list[Value] = [None] * len(read)  # a value is bound by replacing it
        kept: Value = None

        def run() -> Value:
            nonlocal kept
            for i, var in enumerate(read):
                if values[var] is not before[i]:
                    before[:] = [values[var] for var in read]
                    kept = make()
                    break
            return kept

        self.read[run] = read
        return run

    def _binary(self, make: Callable[[np.dtype], Callable[[Value, Value], Value]], node: Any) -> Callable[[], Value]:
        function, a, b = make(_dtype(node.a.ty)), self.value(node.a), self.value(node.b)
        return self._kept(lambda: function(a(), b()), a, b)

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
        value, dtype = self.value(node.value), _dtype(node.ty)
        return self._kept(lambda: value().astype(dtype), value)

    def _get_ramp(self, node: Any) -> Callable[[], Value]:
        """Elements of vectors are the first axis: (vector, lanes or 1)."""
        base, stride, count = self.value(node.base), self.value(node.stride), int(node.lanes)
        steps = np.arange(count)[:, None]
        return lambda: np.atleast_1d(base())[None] + (steps * stride()).astype(_dtype(node.ty))

    def _get_broadcast(self, node: Any) -> Callable[[], Value]:
        return self.value(node.value)

    def _get_tensorload(self, node: Any) -> Callable[[], Value]:
        memory, dtype, shape = self.memories[_key(node.source)]
        index = self._index(node.indices, shape)
        if isinstance(memory, Local):
            return _by_row(memory.load, index)
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
        value, dtype = self.value(node.args[0]), _dtype(node.ty)

        def run() -> Value:
            bits = value()
            return np.ascontiguousarray(bits).view(dtype) if np.ndim(bits) else np.asarray(bits).view(dtype)[()]

        return run

    def _address_of(self, load: Any) -> Callable[[], Pointer]:
        memory, dtype, shape = self.memories[_key(load.source)]
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

    def _place(self, buffer: Any, indices: Sequence[Any]) -> Callable[[Value], None]:
        memory, dtype, shape = self.memories[_key(buffer)]
        index, machine = self._index(indices, shape), self.machine

        def one(at: Value, value: Value) -> None:
            if isinstance(memory, Local):
                memory.store(at, value)
            else:
                data = np.ascontiguousarray(machine.spread(value)).view(f"u{dtype.itemsize}")[:, None]
                memory.write(np.asarray(at, np.int64) * dtype.itemsize, data, dtype.itemsize)

        def store(value: Value) -> None:
            if value.dtype != dtype:
                value = np.ascontiguousarray(value).view(dtype) if np.ndim(value) else np.asarray(value).view(dtype)[()]
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
        return self.memories[_key(buffer)][0]

    def place(self, node: Any) -> Callable[[Value], None]:
        """Stores into a register that an instruction names as its destination (the same bits, if types differ)."""
        return self._place(node.source, node.indices)


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

_CALLS: dict[str, Callable[[_Compiler, Any], Callable[[], Any]]] = {
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
