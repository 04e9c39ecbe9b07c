"""Memories of the lockstep interpreter: every access is checked lane by lane.

A *lane* is one CUDA thread; lane = block * threads + thread. Offsets and values are scalars (the same for all lanes) or
arrays (lanes,). Memory is read and written as unsigned words of 1, 2, 4 or 8 bytes, so that vector accesses are few
numpy calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

Value = Any  # a numpy scalar, an array (lanes,), or, for vectors, an array (vector, lanes or 1)
WORDS: dict[int, Any] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
ARENA_START = 1024  # shared addresses begin here, so that a forgotten base is out of bounds
POISON = 0xCD


class LockstepError(AssertionError):
    """What a kernel does wrong: out of bounds, misaligned, uninitialised, a race, a divergent barrier."""

    def at(self, node: Any) -> LockstepError:
        """The error with the statement it comes from: the innermost one is kept."""
        if not hasattr(self, "statement"):
            self.statement = str(node).strip().splitlines()[-1]
            self.args = (f"{self.args[0]} in `{self.statement}`",)
        return self


class Machine:
    """Which blocks run now (`group` of them at a time) and which lanes are active (`mask`; None is all)."""

    def __init__(self, threads: int, group: int) -> None:
        self.threads, self.group, self.lanes = threads, group, threads * group
        self.lane = np.arange(self.lanes)
        self.block, self.thread = self.lane // threads, self.lane % threads
        self.mask: np.ndarray | None = None
        self.first = 0  # linear index of the first block of the group

    def spread(self, value: Value) -> np.ndarray:
        """A value as an array (lanes,)."""
        if isinstance(value, np.ndarray) and value.ndim:
            return value if value.shape[-1] == self.lanes else np.broadcast_to(value, (self.lanes,))
        return np.full(self.lanes, value)

    def active(self) -> np.ndarray:
        return self.lane if self.mask is None else np.flatnonzero(self.mask)

    def under(self, condition: Value, body: Callable[[], Any]) -> Any:
        """Run `body` for the active lanes where the condition, an array, holds; None where it holds for no lane."""
        before = self.mask
        mask = condition if before is None else condition & before
        if not mask.any():
            return None
        self.mask = None if mask.all() else mask
        try:
            return body()
        finally:
            self.mask = before

    def whole(self, width: int, what: str) -> None:
        """Fail unless the lanes of every warp (width 32) or block are active together."""
        if self.mask is not None:
            count = self.mask.reshape(-1, width).sum(1) if self.lanes % width == 0 else np.zeros(1)
            odd = (count != 0) & (count != width)
            if odd.any():
                raise LockstepError(f"{what}: only some of {width} lanes reach it (lane {odd.argmax() * width} on)")

    def who(self, lane: int) -> str:
        return f"block {self.first + lane // self.threads}, thread {lane % self.threads}"

    def fail_where(self, bad: Value, offset: Value, text: Callable[[int], str]) -> None:
        """Raise for the first active lane where `bad` holds; text of the lane's offset."""
        if not isinstance(bad, np.ndarray):
            if bad:
                raise LockstepError(f"{text(int(offset))}, {self.who(int(self.active()[0]))}")
            return
        if self.mask is not None:
            bad = bad & self.mask
        if bad.any():
            lane = int(bad.argmax())
            raise LockstepError(f"{text(int(np.broadcast_to(offset, bad.shape)[lane]))}, {self.who(lane)}")


def split(nbytes: int) -> tuple[int, int]:
    """(bytes of a word, words) of an access."""
    unit = min(nbytes, 8)
    return unit, nbytes // unit


class Local:
    """Registers: `elements` a lane, with a record of which were written."""

    def __init__(self, machine: Machine, name: str, elements: int, dtype: np.dtype) -> None:
        self.machine, self.name, self.elements, self.dtype = machine, name, elements, dtype
        self.watch: Any = None  # of registers that a wgmma works on (lockstep_wgmma.py)
        self.reset()

    def reset(self) -> None:
        shape = (self.elements, self.machine.lanes)
        self.data = np.full(shape, POISON, np.uint8).astype(self.dtype)
        self.written = np.zeros(shape, bool)
        self.full = [False] * self.elements
        if self.watch:
            self.watch.reset()

    def _bounds(self, index: Value) -> None:
        bad = (index < 0) | (index >= self.elements)
        self.machine.fail_where(bad, index, lambda i: f"{self.name}[{i}] out of bounds ({self.elements} elements)")

    def load(self, index: Value) -> Value:
        machine = self.machine
        self._bounds(index)
        if np.ndim(index) == 0:
            return self.load_register(index)
        if self.watch:
            self.watch.load(index)
        index = index if machine.mask is None else np.where(machine.mask, index, 0)
        unwritten = ~self.written[index, machine.lane]
        machine.fail_where(unwritten, index, lambda i: f"{self.name}[{i}] read before it is written")
        return self.data[index, machine.lane]

    def load_register(self, index: int) -> Value:
        """That of all lanes; the index is inside."""
        if self.watch:
            self.watch.load(index)
        if not self.full[index]:
            text = f"{self.name}[{index}] read before it is written"
            self.machine.fail_where(~self.written[index], index, lambda i: text)
        return self.data[index]

    def store(self, index: Value, value: Value) -> None:
        self._bounds(index)
        if np.ndim(index) == 0:
            self.store_register(index, value)
            return
        if self.watch:
            self.watch.store(index)
        lane = self.machine.active()
        where = index[lane], lane
        self.data[where] = self.machine.spread(value)[lane]
        self.written[where] = True

    def store_register(self, index: int, value: Value) -> None:
        mask = self.machine.mask
        if self.watch:
            self.watch.store(index)
        if mask is None:
            self.data[index] = value
            if not self.full[index]:
                self.full[index] = True
                self.written[index] = True
        else:
            np.copyto(self.data[index], value, where=mask)
            if not self.full[index]:
                self.written[index] |= mask


class Global:
    """An array of the caller."""

    def __init__(self, machine: Machine, name: str, array: np.ndarray) -> None:
        self.machine, self.name = machine, name
        self.bind(array)

    def bind(self, array: np.ndarray) -> None:
        """Be the memory of this array."""
        self.nbytes = array.nbytes
        flat = array.reshape(-1).view(np.uint8)
        if not np.shares_memory(flat, array) and array.size:
            raise ValueError(f"{self.name}: the array must be contiguous, as it is changed in place")
        self.words = {unit: flat[: self.nbytes // unit * unit].view(word) for unit, word in WORDS.items()}

    def reset(self) -> None:
        """The caller's data stay."""

    def _check(self, offset: Value, nbytes: int, size: int) -> None:
        bad = (offset < 0) | (offset + nbytes > self.nbytes)
        self.machine.fail_where(
            bad, offset, lambda o: f"{self.name}[{o / size:g}] out of bounds ({self.nbytes // size} elements)"
        )
        if nbytes > size:
            text = f"misaligned access of {nbytes} bytes"
            self.machine.fail_where(offset % nbytes != 0, offset, lambda o: f"{self.name}[{o / size:g}]: {text}")

    def read(self, offset: Value, nbytes: int, size: int) -> np.ndarray:
        """`nbytes` at a byte offset, as words (lanes or nothing, words). `size` bytes make an element, for messages."""
        self._check(offset, nbytes, size)
        unit, count = split(nbytes)
        if np.ndim(offset) and self.machine.mask is not None:
            offset = np.where(self.machine.mask, offset, 0)
        index = np.asarray(offset // unit)[..., None] + np.arange(count)
        return self.words[unit][index]

    def write(self, offset: Value, data: np.ndarray, size: int) -> None:
        """Store words (lanes, words)."""
        unit, count = data.dtype.itemsize, data.shape[-1]
        self._check(offset, unit * count, size)
        lane = self.machine.active()
        index = self.machine.spread(offset)[lane, None] // unit + np.arange(count)
        self.words[unit][index] = data[lane]


class Arena:
    """All shared memory of a group of blocks, with the bytes written and who touched what since the last barrier.

    For each 2 bytes there is a stamp of the thread that wrote them and of those that read them: 0 none, t + 1 thread t,
    SEVERAL + w + 1 threads of warp w, SYNCED + w + 1 the same with a warp barrier since, MANY threads of several warps.
    An array of stamps has the layout of the data: a word of any size meets the stamps of all its bytes as one number.
    """

    SEVERAL, SYNCED, MANY = 0x4000, 0x8000, 0xFFFF
    REPEAT: ClassVar = {2: 1, 4: 0x10001, 8: 0x1000100010001}

    def __init__(self, machine: Machine, races: bool) -> None:
        self.machine, self.races, self.start, self.end = machine, races, ARENA_START, ARENA_START
        self.proxy: Any = None  # where there is a wgmma (lockstep_wgmma.py)
        self.buffers: list[Shared] = []

    def allocate(self, name: str, nbytes: int, align: int) -> Shared:
        align = max(align, 16)
        self.end = -(-self.end // align) * align
        self.buffers.append(Shared(self, name, self.end, nbytes))
        self.end += nbytes
        return self.buffers[-1]

    def reset(self) -> None:
        machine = self.machine
        self.stride = -(-self.end // 128) * 128
        size = self.stride * machine.group
        self.words = views_of(np.full(size, POISON, np.uint8))
        self.written = views_of(np.zeros(size, np.uint8))
        self.writer, self.reader = views_of(np.zeros(size, np.uint8)), views_of(np.zeros(size, np.uint8))
        self.base = machine.block * self.stride
        self.dirty = False
        if self.proxy:
            self.proxy.reset()
        self.pending: list[_Copy] = []
        self.committed = np.zeros(machine.lanes, np.int64)
        stamps = (machine.thread + 1).astype(np.uint64)
        self.own = {u: (stamps * np.uint64(r)).astype(WORDS[u]) for u, r in self.REPEAT.items()}
        synced = (machine.thread // 32 + 1 + self.SYNCED).astype(np.uint64)
        self.synced = {u: (synced * np.uint64(r)).astype(WORDS[u]) for u, r in self.REPEAT.items()}

    def name_of(self, address: int) -> str:
        for buffer in self.buffers:
            if buffer.start <= address < buffer.start + buffer.nbytes:
                return f"{buffer.name} byte {address - buffer.start}"
        return f"shared address {address - ARENA_START} (memory of {self.end - ARENA_START} bytes)"

    def _index(self, address: Value, nbytes: int, unit: int, lane: np.ndarray) -> np.ndarray:
        """Words of the access of the given lanes: (lanes, words)."""
        address = self.machine.spread(address).astype(np.int64)
        bad = (address < ARENA_START) | (address + nbytes > self.end)
        self.machine.fail_where(bad, address, lambda a: f"{self.name_of(a)}: out of bounds")
        self.machine.fail_where(
            address % nbytes != 0, address, lambda a: f"{self.name_of(a)}: misaligned access of {nbytes} bytes"
        )
        first = (
            (address + self.base) // unit if len(lane) == self.machine.lanes else (address + self.base)[lane] // unit
        )
        return first[:, None] + np.arange(nbytes // unit)

    def read(self, address: Value, nbytes: int) -> np.ndarray:
        """Words (lanes, words) at an address; rows of inactive lanes are zero."""
        lane = self.machine.active()
        unit, _ = split(nbytes)
        index = self._index(address, nbytes, unit, lane)
        unwritten = self.written[unit][index] != np.iinfo(WORDS[unit]).max
        if unwritten.any():
            self._fail("read before it is written (or before its copy was waited for)", index, unit, unwritten, lane)
        if self.races:
            self._note_read(index, unit, lane)
        data = self.words[unit][index]
        if len(lane) == self.machine.lanes:
            return data
        spread = np.zeros((self.machine.lanes, index.shape[1]), WORDS[unit])
        spread[lane] = data
        return spread

    def write(self, address: Value, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store words (lanes, words). Returns the words' indices and the lanes, for copies that end later."""
        lane = self.machine.active()
        unit = data.dtype.itemsize
        index = self._index(address, unit * data.shape[-1], unit, lane)
        if self.races:
            self._note_write(index, unit, lane)
        if self.proxy:
            self.proxy.note_write(index, unit, lane)
        self.words[unit][index] = data[lane]
        self.written[unit][index] = np.iinfo(WORDS[unit]).max
        return index, lane

    def _fail(
        self, what: str, index: np.ndarray, unit: int, bad: np.ndarray, lane: np.ndarray, other: Any = None
    ) -> None:
        row, column = np.argwhere(bad)[0]
        address = int(index[row, column]) * unit % self.stride
        raise LockstepError(f"{self.name_of(address)}: {what}{other or ''}, {self.machine.who(int(lane[row]))}")

    # Races ---------------------------------------------------------------------------------------------------------

    def _of(self, table: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """A column of a value of each of the lanes."""
        return table[:, None] if len(lane) == self.machine.lanes else table[lane, None]

    def _foreign(self, stamps: np.ndarray, unit: int, lane: np.ndarray) -> np.ndarray:
        own, synced = self._of(self.own[unit], lane), self._of(self.synced[unit], lane)
        return (stamps != 0) & (stamps != own) & (stamps != synced)

    def _conflict(
        self, table: dict[int, np.ndarray], what: str, index: np.ndarray, unit: int, lane: np.ndarray
    ) -> None:
        if self._foreign(table[unit][index], unit, lane).any():
            halves = halves_of(index, unit)
            foreign = self._foreign(table[2][halves], 2, lane)
            if foreign.any():
                row, column = np.argwhere(foreign)[0]
                other = _stamp_text(int(table[2][halves[row, column]]))
                self._fail(f"race: {what} ", halves, 2, foreign, lane, other)

    def _note_read(self, index: np.ndarray, unit: int, lane: np.ndarray) -> None:
        index, unit = (index // 2, 2) if unit == 1 else (index, unit)
        self.dirty = True
        self._conflict(self.writer, "read in the same interval between barriers after the write of", index, unit, lane)
        table, own = self.reader[unit], np.broadcast_to(self._of(self.own[unit], lane), index.shape)
        before = table[index]
        if ((before == 0) | (before == own)).all():
            table[index] = own
            if (table[index] == own).all():
                return
        self._merge_readers(halves_of(index, unit), before, unit, lane)

    def _merge_readers(self, halves: np.ndarray, before: np.ndarray, unit: int, lane: np.ndarray) -> None:
        """The general case of a read: several threads read the same bytes."""
        table = self.reader[2]
        before = before.reshape(-1).view(np.uint16).reshape(halves.shape)
        own = np.broadcast_to(self._of(self.own[2], lane), halves.shape)
        warp = np.broadcast_to(self._of(self.machine.thread, lane) // 32, halves.shape)
        table[halves] = own
        after = table[halves]
        several, many = np.zeros(halves.shape, bool), np.zeros(halves.shape, bool)
        for stamps in (before, after):
            other = self._foreign(stamps, 2, lane)
            same = _stamp_warp(stamps) == warp
            several |= other & same
            many |= other & ~same
        table[halves[several]] = (warp[several] + self.SEVERAL + 1).astype(np.uint16)
        table[halves[many]] = self.MANY

    def _note_write(self, index: np.ndarray, unit: int, lane: np.ndarray) -> None:
        if unit == 1:  # neighbouring bytes share a stamp: bytes are not watched
            return
        self.dirty = True
        self._conflict(self.writer, "write in the same interval between barriers as the write of", index, unit, lane)
        self._conflict(self.reader, "write in the same interval between barriers as the read of", index, unit, lane)
        own = np.broadcast_to(self._of(self.own[unit], lane), index.shape)
        self.writer[unit][index] = own
        twice = self.writer[unit][index] != own
        if twice.any():
            self._fail("race: two threads write it at once", index, unit, twice, lane)

    def note_foreign_read(self, halves: np.ndarray) -> None:
        """Note that others than a thread's own accesses have read 2-byte units: wgmma, for all threads of its group."""
        if self.races:
            self.dirty = True
            self.reader[2][halves] = self.MANY

    def barrier(self) -> None:
        """__syncthreads of the active blocks."""
        self.machine.whole(self.machine.threads, "barrier of a block")
        if self.proxy:
            self.proxy.barrier()
        if self.dirty and self.races:
            for table in (self.writer[1], self.reader[1]):
                rows = table.reshape(self.machine.group, self.stride)
                if self.machine.mask is None:
                    rows[:] = 0
                else:
                    rows[self.machine.mask[:: self.machine.threads]] = 0
            self.dirty = self.machine.mask is not None

    def warp_barrier(self) -> None:
        """__syncwarp: what threads of a warp did is ordered for this warp."""
        self.machine.whole(min(32, self.machine.threads), "barrier of a warp")
        lanes = self.machine.active()
        warps = np.zeros((self.machine.group, 33), bool)
        warps[self.machine.block[lanes], self.machine.thread[lanes] // 32] = True
        for table in (self.writer[2], self.reader[2]):
            where = np.flatnonzero((table != 0) & (table != self.MANY))
            warp = _stamp_warp(table[where])
            kept = warps[where * 2 // self.stride, warp]
            table[where[kept]] = (warp[kept] + self.SYNCED + 1).astype(np.uint16)

    # Asynchronous copies -------------------------------------------------------------------------------------------

    def copy(self, address: Value, data: np.ndarray) -> None:
        """cp.async: the bytes arrive at once but cannot be read before they are waited for."""
        index, lane = self.write(address, data)
        unit = data.dtype.itemsize
        self.written[unit][index] = 0
        self.pending.append(_Copy(index, unit, lane, self.committed[lane]))

    def commit(self) -> None:
        self.committed[self.machine.active()] += 1

    def wait(self, left: int) -> None:
        """The active lanes wait until at most `left` of their groups are on the way (-1: for all, also uncommitted)."""
        rest = []
        for copy in self.pending:
            done = copy.group < self.committed[copy.lane] - left
            if self.machine.mask is not None:
                done &= self.machine.mask[copy.lane]
            index, lane = copy.index[done], copy.lane[done]
            if len(lane):
                self.written[copy.unit][index] = np.iinfo(WORDS[copy.unit]).max
                if self.races:
                    self._note_write(index, copy.unit, lane)
                if self.proxy:
                    self.proxy.note_write(index, copy.unit, lane)
            if not done.all():
                rest.append(_Copy(copy.index[~done], copy.unit, copy.lane[~done], copy.group[~done]))
        self.pending = rest


@dataclasses.dataclass(frozen=True)
class _Copy:
    """An asynchronous copy on the way: words (lanes, words) of `unit` bytes, the lanes, the group each belongs to."""

    index: np.ndarray
    unit: int
    lane: np.ndarray
    group: np.ndarray


class Shared:
    """One allocation of shared memory: the interface of Global over an Arena."""

    def __init__(self, arena: Arena, name: str, start: int, nbytes: int) -> None:
        self.arena, self.name, self.start, self.nbytes = arena, name, start, nbytes

    def reset(self) -> None:
        """The arena resets all."""

    def _check(self, offset: Value, nbytes: int, size: int) -> None:
        bad = (offset < 0) | (offset + nbytes > self.nbytes)
        self.arena.machine.fail_where(
            bad, offset, lambda o: f"{self.name}[{o / size:g}] out of bounds ({self.nbytes // size} elements)"
        )

    def read(self, offset: Value, nbytes: int, size: int) -> np.ndarray:
        self._check(offset, nbytes, size)
        return self.arena.read(offset + self.start, nbytes)

    def write(self, offset: Value, data: np.ndarray, size: int) -> None:
        self._check(offset, data.dtype.itemsize * data.shape[-1], size)
        self.arena.write(offset + self.start, data)


@dataclasses.dataclass(frozen=True)
class Pointer:
    """An address: bytes from the start of a memory, whose elements are `size` bytes."""

    memory: Any
    offset: Value
    size: int


def views_of(flat: np.ndarray) -> dict[int, np.ndarray]:
    return {unit: flat.view(word) for unit, word in WORDS.items()}


def halves_of(index: np.ndarray, unit: int) -> np.ndarray:
    """Indices of words as indices of 2-byte units: (lanes, words) to (lanes, words * unit / 2)."""
    count = unit // 2
    return (index[..., None] * count + np.arange(count)).reshape(len(index), -1)


def _stamp_warp(stamps: np.ndarray) -> np.ndarray:
    """The warp of each stamp; 32, which no block has, for none or many."""
    value = stamps.astype(np.int64)
    warp = np.where(value < Arena.SEVERAL, (value - 1) // 32, (value & (Arena.SEVERAL - 1)) - 1)
    return np.where((value == 0) | (value == Arena.MANY), 32, warp)


def _stamp_text(stamp: int) -> str:
    if stamp == Arena.MANY:
        return "several warps"
    return f"thread {stamp - 1}" if stamp < Arena.SEVERAL else f"warp {(stamp & (Arena.SEVERAL - 1)) - 1}"
