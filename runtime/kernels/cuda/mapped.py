"""An exchange between GPUs that reach each other's memory, inside a kernel: a few words a channel, a thread each.

    inbox of a rank     [2, ranks, sent, channels] packets, uint64: the number of the turn << 32 | the bits of a float32
                        [channels]                 how many turns there were, of each channel
    rank r, channel c   writes its packets into row r of every rank's inbox, and reads the rows of its own until all of
                        them are of this turn

A packet is one access of 64 bits, so whoever sees the turn sees the value: no fence, no flag, and no thread waits for
another one of its GPU. Halves of the box are used in turns: a rank that writes turn t + 2 has read turn t + 1 of all,
who have then read turn t. Nothing is summed on the way, so the order is the reader's, the same on all ranks.

A rank may be gone: the header's second word, which the host writes where it gives up, ends the waiting.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.coefficients import Loop
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, bits, from_bits, put, registers
from bnfuse.runtime.program.program import STOP

LOAD, STORE = "ld.relaxed.sys.global.u64", "st.relaxed.sys.global.u64"
RANK = 0  # word of the header


@dataclasses.dataclass(frozen=True)
class Turn:
    """The turn that a channel is in: its number, and where this half's packets, and those of this rank, begin."""

    number: Expr
    first: Expr
    mine: Expr


def turn_of(block: Block, loop: Loop, names: Mapping[str, str], channel: Expr) -> Turn:
    """Emit what can be known before there is anything to send; `names` are the kernel's names of parameters."""
    words = len(loop.sent) * loop.channels
    rank = tirx.Cast("int32", block[names["header"]][RANK])
    number = T.bind(tirx.Cast("uint32", block[names["inbox"]][2 * loop.ranks * words + channel]) + T.uint32(1))
    first = tirx.Cast("int32", tirx.bitwise_and(number, T.uint32(1))) * (loop.ranks * words) + channel
    return Turn(number, T.bind(first), T.bind(first + rank * words))


def exchanged(
    block: Block, loop: Loop, names: Mapping[str, str], channel: Expr, own: Callable[[str], Expr], turn: Turn
) -> dict[tuple[str, int], Expr]:
    """Emit the exchange of one channel of a loop; `own` gives this rank's values. Gives each rank's, by name and
    rank."""
    header, inbox = block[names["header"]], block[names["inbox"]]
    number = tirx.Cast("uint64", turn.number)
    packets = [
        T.bind(tirx.bitwise_or(number << T.uint64(32), tirx.Cast("uint64", bits(own(name))))) for name in loop.sent
    ]
    for word, packet in enumerate(packets):
        for rank in range(loop.ranks):
            place = turn.mine + word * loop.channels
            T.evaluate(T.ptx[STORE](block[names[f"outbox{rank}"]].ptr_to([place]), packet))
    rows = [(name, rank) for rank in range(loop.ranks) for name in loop.sent]
    places = [turn.first + row * loop.channels for row in range(len(rows))]
    values = received(header, inbox, places, turn.number)
    put(inbox, 2 * len(rows) * loop.channels + channel, number)
    return dict(zip(rows, values, strict=True))


def received(header: Buffer, inbox: Buffer, places: Sequence[Expr], turn: Expr) -> list[Expr]:
    """Emit the wait for packets of this turn, all of them asked for at once; gives their values."""
    packets, stop = registers(len(places), "uint64"), registers(1, "uint64")
    for index in range(len(places)):
        put(packets, index, T.uint64(0))  # of no turn
    put(stop, 0, T.uint64(0))
    old = [tirx.Cast("uint32", packets[index] >> T.uint64(32)) != turn for index in range(len(places))]
    with T.While(tirx.And(functools.reduce(tirx.Or, old), stop[0] == T.uint64(0))):
        for index, place in enumerate(places):
            T.evaluate(T.ptx[LOAD](packets[index], inbox.ptr_to([place])))
        T.evaluate(T.ptx[LOAD](stop[0], header.ptr_to([STOP])))
    values = registers(len(places))
    for index in range(len(places)):
        put(values, index, from_bits(tirx.Cast("uint32", packets[index])))
    return [values[index] for index in range(len(places))]
