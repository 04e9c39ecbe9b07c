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

import functools
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.coefficients import Loop
from bnfuse.runtime.kernels.cuda.device import Block, Buffer, Expr, bits, from_bits, put, registers

LOAD, STORE = "ld.relaxed.sys.global.u64", "st.relaxed.sys.global.u64"
RANK, STOP = 0, 1  # words of the header


def exchanged(
    block: Block, loop: Loop, names: Mapping[str, str], channel: Expr, own: Callable[[str], Expr]
) -> dict[tuple[str, int], Expr]:
    """Emit the exchange of one channel of a loop; `names` are the kernel's names of its parameters, `own` gives this
    rank's values. Gives each rank's, by name and rank."""
    header, inbox = block[names["header"]], block[names["inbox"]]
    sent, channels = len(loop.sent), loop.channels
    count = 2 * loop.ranks * sent * channels + channel
    turn = T.bind(tirx.Cast("uint32", inbox[count]) + T.uint32(1))
    put(inbox, count, tirx.Cast("uint64", turn))
    half = tirx.Cast("int32", tirx.bitwise_and(turn, T.uint32(1))) * (loop.ranks * sent * channels)
    first = T.bind(half + channel)
    mine = T.bind(first + tirx.Cast("int32", header[RANK]) * (sent * channels))
    for word, name in enumerate(loop.sent):
        value = tirx.Cast("uint64", bits(own(name)))
        packet = T.bind(tirx.bitwise_or(tirx.Cast("uint64", turn) << T.uint64(32), value))
        for rank in range(loop.ranks):
            T.evaluate(T.ptx[STORE](block[names[f"outbox{rank}"]].ptr_to([mine + word * channels]), packet))
    rows = [(name, rank) for rank in range(loop.ranks) for name in loop.sent]
    values = received(header, inbox, [first + row * channels for row in range(len(rows))], turn)
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
