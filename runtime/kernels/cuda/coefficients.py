"""What a BatchNorm computes per channel, on a GPU: the formulas of kernels/common/coefficients.py, a thread a channel.

These launches are tiny and there are hundreds of them in a step, so what counts is how few they are and how little each
waits. Operators of a group form *waves*: those of a wave read nothing that another one of it may have written.

    one wave:                      a block has 128 channels of one operator
    several, of few channels:      one block does all of them, with a barrier between waves
    several, of many channels:     a stage for each wave
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.runtime.kernels.common.coefficients import LOOPS, Loop, Member, param_name
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.tails import tail_name
from bnfuse.runtime.kernels.cuda.device import Block, Expr, Stage, all_of, below, put, stage, sync, when
from bnfuse.runtime.kernels.cuda.mapped import Turn, exchanged, turn_of
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

CHANNELS = 128  # of a block that has one operator: chosen by hand
ONE_BLOCK = 1024  # threads of the block that has a whole group: the most that a block can have
ROUNDS = 4  # of channels that it may take in a wave: chosen by hand

# results, and the operands that may be the same buffers
READERS: dict[str, tuple[str, ...]] = {
    "beta_term": ("beta_term", "beta_acc"),
    "gamma_term": ("gamma_term", "gamma_acc"),
    "new_running_mean": ("running_mean",),
    "new_running_variance": ("running_variance",),
    "mixed_mean": ("mean",),
    "mixed_variance": ("variance",),
    "all_mean": ("mean",),
    "all_variance": ("variance",),
    "all_beta_term": ("beta_term",),
    "all_gamma_term": ("gamma_term",),
}


@dataclasses.dataclass(frozen=True)
class CoefficientsProblem:
    """The operators of a launch and their arguments: unlike a CPU's, a GPU's launch has its channel counts built in."""

    op: str
    members: tuple[Member, ...]


def coefficients(members: tuple[Member, ...], target: CudaTarget) -> Kernel:
    """Make the kernel of some operators, one after the other. With several, parameter x of member i is x_i."""
    loops = [LOOPS[name](*arguments) for name, arguments in members]
    params = [dataclasses.replace(p, name=param_name(p.name, i, loops)) for i, o in enumerate(loops) for p in o.params]
    problem = CoefficientsProblem("_".join(loop.problem.op for loop in loops), members)
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, tuple(params), lambda: _stages(name, params, loops))


def waves_of(loops: Sequence[Loop]) -> list[list[int]]:
    """Sort operators into waves: indices, wave by wave."""
    level: list[int] = []
    for i, loop in enumerate(loops):
        level.append(max((level[j] + 1 for j in range(i) if _may_read(loop, loops[j])), default=0))
    return [[i for i, at in enumerate(level) if at == wave] for wave in range(max(level) + 1)]


def _may_read(later: Loop, earlier: Loop) -> bool:
    results = PLAIN_OPS[earlier.problem.op].results
    readers = {reader for result in results for reader in READERS.get(result, (result,))}
    return bool(readers & set(PLAIN_OPS[later.problem.op].operands))


def _stages(name: str, params: Sequence[Param], loops: Sequence[Loop]) -> tuple[Stage, ...]:
    waves = waves_of(loops)
    most = max(sum(loops[i].channels for i in wave) for wave in waves)
    if len(waves) > 1 and most <= ROUNDS * ONE_BLOCK:
        return (_one_block(name, params, loops, waves, most),)
    return tuple(_spread(f"{name}_{w}" if w else name, params, loops, wave) for w, wave in enumerate(waves))


def _one_block(name: str, params: Sequence[Param], loops: Sequence[Loop], waves: list[list[int]], most: int) -> Stage:
    threads = min(ONE_BLOCK, -(-most // 32) * 32)
    with stage(name, params, grid=(1, 1, 1), threads=threads, may_alias=True) as block:
        for w, wave in enumerate(waves):
            if w:
                sync()
            first = 0
            for i in wave:
                for channel, known in _rounds(loops[i].channels, threads, first, block.tid):
                    _channel(block, loops, i, channel, known)
                first += loops[i].channels
    return block.stage


def _rounds(channels: int, threads: int, first: int, tid: Expr) -> list[tuple[Expr, bool]]:
    """List the channels of a thread, and whether it is known that they exist.

    The operators of a wave lie behind one another, so the second one starts with threads that the first left idle.
    """
    start = first % threads
    found = []
    for base in range(-start, channels, threads):
        found.append((tid + base, base >= 0 and base + threads <= channels))
    return found


def _spread(name: str, params: Sequence[Param], loops: Sequence[Loop], wave: list[int]) -> Stage:
    blocks = -(-max(loops[i].channels for i in wave) // CHANNELS)
    with stage(name, params, grid=(blocks, len(wave), 1), threads=CHANNELS, may_alias=True) as block:
        channel = T.bind(block.x * CHANNELS + block.tid)

        def member(i: int) -> None:
            known = len(wave) == 1 and loops[i].channels == blocks * CHANNELS
            _channel(block, loops, i, channel, known)

        for y, i in enumerate(wave):
            when(True if len(wave) == 1 else block.y == y, functools.partial(member, i))
    return block.stage


def emit_tail(block: Block, tail: Sequence[Member], channel: Expr, turns: Mapping[int, Turn]) -> None:
    """Emit one channel of the operators behind an operator's sums, which have been stored by the same thread.

    Parameters are named by `tail_name`, and may be the same buffers as others: the stage is one that `may_alias`.
    `turns` is what `turns_of_tail` has emitted before there were sums.
    """
    for i, (loop, names) in enumerate(_of_tail(tail)):
        _emit_channel(block, loop, names, channel, turns.get(i))


def turns_of_tail(block: Block, tail: Sequence[Member], channel: Expr) -> dict[int, Turn]:
    """Emit what exchanges of a tail can know before there are sums, of a channel that exists."""
    return {i: turn_of(block, loop, names, channel) for i, (loop, names) in enumerate(_of_tail(tail)) if loop.sent}


def _of_tail(tail: Sequence[Member]) -> list[tuple[Loop, dict[str, str]]]:
    loops = [LOOPS[name](*arguments) for name, arguments in tail]
    return [(loop, {p.name: tail_name(i, p.name) for p in loop.params}) for i, loop in enumerate(loops)]


def _channel(block: Block, loops: Sequence[Loop], member: int, channel: Expr, known: bool) -> None:
    """Emit one channel of a member, if it has it. `known`: it does."""
    loop = loops[member]
    names = {p.name: param_name(p.name, member, loops) for p in loop.params}
    exists = True if known else all_of(channel >= 0, below(channel, loop.channels, False))
    when(exists, lambda: _emit_channel(block, loop, names, channel))


def _emit_channel(block: Block, loop: Loop, names: Mapping[str, str], channel: Expr, turn: Turn | None = None) -> None:

    def place(param: str, row: int) -> Expr:
        at = channel + row * (loop.pitch or loop.channels) if row else channel
        offset = block.offsets.get(names[param])
        return at if offset is None else offset + at

    def get(param: str, row: int = 0) -> Any:
        return block[names[param]][place(param, row)]

    def store(param: str, value: Expr, row: int = 0) -> None:
        put(block[names[param]], place(param, row), value)

    of_all: dict[tuple[str, int], Expr] = {}
    if loop.sent:
        of_all = exchanged(block, loop, names, channel, get, turn or turn_of(block, loop, names, channel))
    loop.emit(lambda param, row=0: of_all[param, row] if param in loop.sent else get(param, row), store)
