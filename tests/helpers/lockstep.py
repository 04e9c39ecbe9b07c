"""Runs the TIR of a CUDA kernel on the CPU: all threads of several blocks in lockstep, as lanes of numpy arrays.

The un-lowered PrimFunc is turned into closures once. An expression that is the same for all threads stays a numpy
scalar, any other is an array (lanes,). Control flow that depends on the thread narrows the mask of active lanes.
Accesses are checked (bounds, alignment, use before writing, races): see lockstep_memory. Expressions are in
lockstep_values, what calls mean in lockstep_ops, products of warpgroups in lockstep_wgmma.

Lockstep is one legal schedule, not all of them: a race that the records of shared memory miss stays unseen, and global
memory is watched for bounds only. float32 is rounded after every operation, where nvcc contracts a * b + c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from lockstep_memory import Arena, Global, Local, LockstepError, Machine
from lockstep_ops import Run
from lockstep_values import Values, dtype_of, key_of

__all__ = ["LockstepError", "prepared", "run"]


def run(function: Any, arguments: Mapping[str, Any], *, lanes: int = 1 << 13, races: bool = True) -> None:
    """Run a kernel over its whole grid. Arrays, flat or not, are by parameter name and changed in place.

    16-bit floats come as their bits (uint16) or as ml_dtypes/float16 arrays: only the number of bytes is compared with
    the parameter's.
    Blocks run in groups of at most `lanes` threads, in the order of their linear index.
    """
    prepared(function, lanes=lanes, races=races)(arguments)


def prepared(function: Any, *, lanes: int = 1 << 13, races: bool = True) -> Callable[[Mapping[str, Any]], None]:
    """`run` of a kernel as a function of its arguments: its closures are made in the first call alone."""
    compiler: _Compiler | None = None

    def call(arguments: Mapping[str, Any]) -> None:
        nonlocal compiler
        with np.errstate(all="ignore"):
            if compiler is None:
                compiler = _Compiler(function, arguments, lanes, races)
            else:
                compiler.bind(arguments)
            compiler.run()

    return call


def _grid(body: Any) -> dict[str, tuple[Any, int]]:
    """Thread index -> (variable, extent), of the launch_thread attributes that begin a kernel."""
    found = {}
    while type(body).__name__ == "AttrStmt":
        if body.attr_key == "thread_extent":
            found[body.node.thread_tag] = body.node.var, int(body.value)
        body = body.body
    return found


class _Compiler(Values):
    """Closures of one function's statements, and its run."""

    def __init__(self, function: Any, arguments: Mapping[str, Any], lanes: int, races: bool) -> None:
        self.function = function  # keeps the nodes alive, whose handles are keys
        self.grid = _grid(function.body)
        self.extent = {tag: extent for tag, (_, extent) in self.grid.items()}
        threads = math.prod(e for tag, e in self.extent.items() if tag.startswith("threadIdx"))
        self.blocks = math.prod(e for tag, e in self.extent.items() if tag.startswith("blockIdx"))
        machine = Machine(threads, max(1, min(self.blocks, lanes // threads)))
        super().__init__(machine, Arena(machine, races))
        self.bind(arguments)
        self.body = self.statement(function.body)

    def bind(self, arguments: Mapping[str, Any]) -> None:
        """Take other arrays and numbers for the parameters."""
        names = [param.name for param in self.function.params]
        if set(names) != set(arguments):
            raise ValueError(f"the kernel's parameters are {names}, the arguments {sorted(arguments)}")
        for param in self.function.params:
            given = arguments[param.name]
            if type(param.ty).__name__ == "BufferType":
                self._bind_array(param, given)
            else:
                self.values[key_of(param)] = dtype_of(param.ty).type(given)

    def _bind_array(self, param: Any, array: np.ndarray) -> None:
        dtype, shape = dtype_of(param), [int(extent) for extent in param.shape]
        if array.nbytes != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{param.name}: {array.nbytes} bytes given, the parameter is {dtype}{shape}")
        if key_of(param) in self.memories:
            self.memories[key_of(param)][0].bind(array)
        else:
            self.memories[key_of(param)] = Global(self.machine, param.name, array), dtype, shape

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
                    self.values[key_of(self.grid[tag][0])] = index[0] if uniform else index

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
        value, var, values = self.value(node.value), key_of(node.var), self.values

        def run() -> None:
            result = value()
            # a register's row is a view that a later store would change
            values[var] = result.copy() if isinstance(result, np.ndarray) and result.base is not None else result

        return self._located(run, node)

    def _do_allocbuffer(self, node: Any) -> Run:
        buffer = node.buffer
        dtype, shape, scope = dtype_of(buffer), [int(extent) for extent in buffer.shape], buffer.scope()
        count = math.prod(shape)
        if scope == "local":
            memory: Any = Local(self.machine, buffer.name, count, dtype)
        elif scope in ("shared", "shared.dyn"):
            memory = self.arena.allocate(buffer.name, count * dtype.itemsize, int(buffer.data_alignment))
        else:
            raise NotImplementedError(f"memory scope {scope} of {buffer.name} is not interpreted")
        self.memories[key_of(buffer)] = memory, dtype, shape
        return lambda: None

    def _do_declbuffer(self, node: Any) -> Run:
        buffer = node.buffer
        memory, dtype, _ = self.memories[key_of(node.data.args[0])]
        if isinstance(memory, Local) and dtype_of(buffer) != dtype:
            raise NotImplementedError(f"view {buffer.name} of registers with another type is not interpreted")
        self.memories[key_of(buffer)] = memory, dtype_of(buffer), [int(extent) for extent in buffer.shape]
        return lambda: None

    def _do_bufferstore(self, node: Any) -> Run:
        value, place = self.value(node.value), self._place(node.buffer, node.indices)

        def run() -> None:
            try:
                place(value())
            except LockstepError as error:
                raise error.at(node) from None

        return run

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
        var, values, machine = key_of(node.loop_var), self.values, self.machine
        dtype = dtype_of(node.loop_var.ty).type

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
