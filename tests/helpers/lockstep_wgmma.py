"""Products of warpgroups in the lockstep interpreter: wgmma and the proxy fence that it needs, PTX ISA chapter 9.7.16.

A product is computed when it is issued, and until it has been waited for, what it works on is out of bounds: its
accumulators for any access, the registers of A and the shared memory that it reads for writes. wgmma reads shared
memory by another way (the async proxy) than threads write it: each thread that wrote has to issue fence.proxy.async
behind its write (behind the wait, where the write is a copy in the background), and a barrier has to follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from lockstep_memory import Arena, Local, LockstepError, halves_of, views_of

GROUP = 128  # threads of a warpgroup
Run = Callable[[], Any]


class Watch:
    """What products do with the registers of an array: [element][lane]."""

    def __init__(self, memory: Local) -> None:
        self.memory = memory
        self.reset()

    def reset(self) -> None:
        shape = self.memory.elements, self.memory.machine.lanes
        self.touched = np.zeros(shape, bool)  # by the thread, since its last wgmma.fence
        self.summed, self.read = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # by which group of products

    def _check(self, under_way: np.ndarray, index: Any, what: str) -> None:
        memory = self.memory
        under_way = under_way[index] if np.ndim(index) == 0 else under_way[index, memory.machine.lane]
        memory.machine.fail_where(under_way != 0, index, lambda i: f"{memory.name}[{i}] {what}")

    def load(self, index: Any) -> None:
        """A thread reads the element."""
        self._check(self.summed, index, "read before its wgmma has been waited for")

    def store(self, index: Any) -> None:
        """A thread writes the element."""
        self._check(np.maximum(self.summed, self.read), index, "written before its wgmma has been waited for")
        lane = self.memory.machine.active()
        self.touched[index if np.ndim(index) == 0 else index[lane], lane] = True


@dataclasses.dataclass(frozen=True)
class _Read:
    """Shared memory that a product of the warpgroup of `lane` reads: 2-byte units, and the group it belongs to."""

    halves: np.ndarray
    lane: int
    group: int


class AsyncProxy:
    """Shared memory as wgmma sees it. For each 2 bytes: 0 can be read, t + 1 thread t wrote without a fence since,
    FENCED no barrier since that fence; and how many products under way read it."""

    FENCED = 0x8000

    def __init__(self, arena: Arena) -> None:
        self.arena, self.machine = arena, arena.machine
        self.watches: list[Watch] = []

    @staticmethod
    def of(arena: Arena) -> AsyncProxy:
        """That of an arena, whose writes are watched from now on."""
        arena.proxy = arena.proxy or AsyncProxy(arena)
        return arena.proxy

    def watch(self, memory: Local) -> None:
        if memory.watch is None:
            memory.watch = Watch(memory)
            self.watches.append(memory.watch)

    def reset(self) -> None:
        size = self.arena.stride * self.machine.group
        self.state = views_of(np.zeros(size, np.uint8))[2]
        self.readers = np.zeros(size // 2, np.int32)
        self.reads: list[_Read] = []
        self.committed = np.zeros(self.machine.lanes, np.int64)
        self.ordered = np.zeros(self.machine.lanes, bool)  # whether there was a wgmma.fence

    # Threads ---------------------------------------------------------------------------------------------------------

    def note_write(self, index: np.ndarray, unit: int, lane: np.ndarray) -> None:
        halves = halves_of(index, unit) if unit > 1 else index // 2
        if self.reads and self.readers[halves].any():
            self._fail("written while a wgmma that was not waited for reads it", halves[self.readers[halves] > 0])
        self.state[halves] = (self.machine.thread[lane, None] + 1).astype(np.uint16)

    def fence(self) -> None:
        """fence.proxy.async of the active lanes."""
        written = np.flatnonzero((self.state > 0) & (self.state < self.FENCED))
        block = written * 2 // self.arena.stride
        lane = block * self.machine.threads + self.state[written] - 1
        own = np.zeros(self.machine.lanes, bool)
        own[self.machine.active()] = True
        self.state[written[own[lane]]] = self.FENCED

    def barrier(self) -> None:
        rows = self.state.reshape(self.machine.group, -1)
        blocks = slice(None) if self.machine.mask is None else self.machine.mask[:: self.machine.threads]
        rows[blocks] = np.where(rows[blocks] == self.FENCED, 0, rows[blocks])

    def _fail(self, what: str, halves: np.ndarray) -> None:
        address = int(halves.reshape(-1)[0]) * 2 % self.arena.stride
        raise LockstepError(f"{self.arena.name_of(address)}: {what}")

    # Products --------------------------------------------------------------------------------------------------------

    def order(self) -> None:
        """wgmma.fence"""
        self.machine.whole(GROUP, "wgmma.fence")
        lane = self.machine.active()
        self.ordered[lane] = True
        for watch in self.watches:
            watch.touched[:, lane] = False

    def commit(self) -> None:
        self.machine.whole(GROUP, "wgmma.commit_group")
        self.committed[self.machine.active()] += 1

    def wait(self, left: int) -> None:
        self.machine.whole(GROUP, "wgmma.wait_group")
        lane = self.machine.active()
        done = self.committed[lane] - left  # groups are counted from 1
        for watch in self.watches:
            for table in (watch.summed, watch.read):
                table[:, lane] = np.where(table[:, lane] <= done, 0, table[:, lane])
        waiting, ended = np.zeros(self.machine.lanes, bool), np.zeros(self.machine.lanes, np.int64)
        waiting[lane], ended[lane] = True, done
        finished = [read for read in self.reads if waiting[read.lane] and read.group <= ended[read.lane]]
        self.reads = [read for read in self.reads if not (waiting[read.lane] and read.group <= ended[read.lane])]
        for read in finished:
            self.readers[read.halves] -= 1
            self.arena.note_foreign_read(read.halves)

    def fetch(self, addresses: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """The 16-bit units at addresses (groups, any shape), of the warpgroups whose first lanes are `groups`."""
        low, high = int(addresses.min()), int(addresses.max()) + 2
        if low < self.arena.start or high > self.arena.end:
            place = self.arena.name_of(low if low < self.arena.start else high - 2)
            raise LockstepError(f"{place}: a matrix of wgmma out of bounds")
        base = self.arena.base[groups].reshape(-1, *[1] * (addresses.ndim - 1))
        halves = (addresses + base) // 2
        if (self.arena.written[2][halves] != 0xFFFF).any():
            bad = halves[self.arena.written[2][halves] != 0xFFFF]
            self._fail("read by wgmma before it is written (or before its copy was waited for)", bad)
        state = self.state[halves]
        if state.any():
            bad, found = halves[state != 0], int(state[state != 0][0])
            missing = "barrier since the" if found == self.FENCED else f"fence of thread {found - 1}: no"
            self._fail(f"read by wgmma without a {missing} fence.proxy.async", bad)
        for lane, own in zip(groups, halves, strict=True):
            unique = np.unique(own)
            self.readers[unique] += 1
            self.reads.append(_Read(unique, int(lane), int(self.committed[lane]) + 1))
        return self.arena.words[2][halves]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """An operand behind a descriptor: `rows` along M or N, `depth` along K, of elements of `size` bytes.

    Of K-major ones a row's elements along K are neighbours, of others (MN-major) those along the rows. Swizzled atoms
    have 8 lines of 128, 64 or 32 bytes. K-major: a line is a row, groups of 8 rows are `stride` apart, and the depth
    fits into a line. MN-major: a line is a k, groups of 8 of them are `stride` apart, and where rows do not fit into a
    line, the next ones are `leading` bytes away.
    """

    rows: int
    depth: int
    size: int
    k_major: bool

    def addresses(self, descriptors: np.ndarray) -> np.ndarray:
        """Of the elements [descriptor][row][k]."""
        line = self._line(descriptors)
        start, leading, stride = (
            ((descriptors >> np.uint64(at)) & np.uint64(0x3FFF)).astype(np.int64)[:, None, None] * 16
            for at in (0, 16, 32)
        )
        row, k = np.arange(self.rows)[None, :, None], np.arange(self.depth)[None, None, :]
        across, along = (k, row) if self.k_major else (row, k)
        offset = across * self.size
        if self.k_major and self.depth * self.size > line:
            raise LockstepError(f"wgmma: {self.depth} elements do not fit into a line of {line} bytes")
        place = start + along // 8 * stride + along % 8 * line + offset % line + offset // line * leading
        return place ^ (place >> 7 & line // 16 - 1) << 4

    @staticmethod
    def _line(descriptors: np.ndarray) -> int:
        layout = np.unique(descriptors >> np.uint64(62))
        if len(layout) != 1 or layout[0] == 0 or (descriptors >> np.uint64(49) & np.uint64(7)).any():
            raise NotImplementedError("descriptors of wgmma without a swizzle, or with a base offset")
        return {1: 128, 2: 64, 3: 32}[int(layout[0])]


def _register(compiler: Any, node: Any) -> tuple[Local, Callable[[], int]]:
    """The array of a register that an instruction names, and its index there."""
    memory = compiler.memory_of(node.source)
    index = compiler.value(node.indices[0])
    AsyncProxy.of(compiler.arena).watch(memory)
    return memory, lambda: int(index())


def multiply(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    """wgmma.mma_async d, a or its descriptor, b's, scale-d, imm-scale-a, imm-scale-b{, trans-a}{, trans-b}

    D (64 x N, in float32) = A (64 x K) B (K x N) + scale-d D; warp w of the group has rows 16 w to 16 w + 15 of D and
    A in the fragments of `mma.m16n8`.
    """
    shape = next(t for t in tokens if t.startswith("m64n"))
    n, depth = (int(part) for part in shape.removeprefix("m64n").split("k"))
    formats = {"bf16": (np.uint16, ml_dtypes.bfloat16), "f16": (np.uint16, np.float16), "tf32": (np.uint32, np.float32)}
    raw, dtype = (np.dtype(t) for t in formats[tokens[-2]])
    if depth * raw.itemsize != 32:
        raise LockstepError(f"wgmma has no shape {shape} of {tokens[-2]}")
    narrow = raw.itemsize == 2
    own, rest = operands[: n // 2], list(operands[n // 2 :])
    from_registers = len(rest) == (9 if narrow else 8)
    sums = [_register(compiler, node) for node in own]
    left = [_register(compiler, rest.pop(0)) for _ in range(4)] if from_registers else []
    left_descriptor = None if from_registers else compiler.value(rest.pop(0))
    right_descriptor, keeps = compiler.value(rest[0]), compiler.value(rest[1])
    flags = [int(node) for node in rest[2:]]
    if flags[:2] != [1, 1]:
        raise NotImplementedError("wgmma with signs is not interpreted")
    transposed = flags[2:] if narrow else [0, 0]
    a = Matrix(64, depth, raw.itemsize, not transposed[0] if not from_registers else True)
    b = Matrix(n, depth, raw.itemsize, not transposed[-1])
    machine, proxy = compiler.machine, AsyncProxy.of(compiler.arena)

    def descriptors(value: Any, groups: np.ndarray) -> np.ndarray:
        given = machine.spread(value).reshape(-1, GROUP)[groups // GROUP]
        if (given != given[:, :1]).any():
            raise LockstepError("wgmma: threads of a warpgroup give different descriptors")
        return given[:, 0].astype(np.uint64)

    def matrix(kind: Matrix, value: Any, groups: np.ndarray) -> np.ndarray:
        where = kind.addresses(descriptors(value, groups))
        if narrow:
            return proxy.fetch(where, groups).view(dtype).astype(np.float32)
        halves = proxy.fetch(np.stack([where, where + 2], -1), groups)
        return _cut(np.ascontiguousarray(halves).view(np.uint32)[..., 0])

    def check(memory: Local, index: int, lane: np.ndarray, table: str) -> None:
        """The thread's own accesses are ordered, and A's registers are written."""
        assert memory.watch is not None
        if memory.watch.touched[index, lane].any() or not proxy.ordered[lane].all():
            raise LockstepError(f"{memory.name}[{index}]: used by wgmma without a wgmma.fence since its last access")
        getattr(memory.watch, table)[index, lane] = proxy.committed[lane] + 1

    def registers(places: Sequence[tuple[Local, Callable[[], int]]], lane: np.ndarray) -> np.ndarray:
        """What they hold: (registers, lanes)."""
        found = []
        for memory, at in places:
            index = at()
            if not memory.written[index, lane].all():
                raise LockstepError(f"{memory.name}[{index}] read by wgmma before it is written")
            found.append(memory.data[index, lane])
        return np.stack(found)

    def run() -> None:
        machine.whole(GROUP, "wgmma")
        lane = machine.active()
        groups = lane[::GROUP]
        count = len(groups)
        right = matrix(b, right_descriptor(), groups)
        if from_registers:
            words = registers(left, lane).astype(np.uint32)
            for memory, at in left:
                check(memory, at(), lane, "read")
            # axes: k's upper half, row's upper half, warpgroup, warp, row, column, part of a word
            parts = words.view(dtype).astype(np.float32) if narrow else _cut(words)
            parts = parts.reshape(2, 2, count, 4, 8, 4, 2 if narrow else 1)
            first = parts.transpose(2, 3, 1, 4, 0, 5, 6).reshape(count, 64, depth)
        else:
            first = matrix(a, left_descriptor(), groups)  # type: ignore[misc]
        product = np.matmul(first, right.transpose(0, 2, 1))
        # [group][warp][upper half][row][eight][column][part] -> [eight][upper half][part][lane]
        made = product.reshape(count, 4, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, -1)
        keep = np.unique(machine.spread(keeps())[lane])
        if len(keep) != 1:
            raise LockstepError("wgmma: threads of a warpgroup disagree about scale-d")
        if keep[0]:
            made = made + registers(sums, lane)
        for (memory, at), value in zip(sums, made, strict=True):
            index = at()
            check(memory, index, lane, "summed")
            memory.data[index, lane] = value
            memory.written[index, lane] = True

    return run


def _cut(words: np.ndarray) -> np.ndarray:
    """float32 as TF32 products take it: what it has no bits for is cut off."""
    return (words & np.uint32(0xFFFFE000)).view(np.float32)


def _proxy_fence(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    if tokens[1] != "async":
        raise NotImplementedError(f"fence {tokens} is not interpreted")
    return AsyncProxy.of(compiler.arena).fence


def _wait_group(compiler: Any, operands: Sequence[Any], tokens: Sequence[str]) -> Run:
    proxy, left = AsyncProxy.of(compiler.arena), compiler.value(operands[0])
    return lambda: proxy.wait(int(left()))


INSTRUCTIONS: dict[str, Callable[[Any, Sequence[Any], Sequence[str]], Run]] = {
    "fence_proxy": _proxy_fence,
    "wgmma_fence": lambda compiler, operands, tokens: AsyncProxy.of(compiler.arena).order,
    "wgmma_commit_group": lambda compiler, operands, tokens: AsyncProxy.of(compiler.arena).commit,
    "wgmma_wait_group": _wait_group,
    **{f"wgmma_{kind}_{form}": multiply for kind in ("bf16", "f16", "tf32") for form in ("ss", "rs")},
}
