"""Weights as the tensor cores read them, made from the file's OIHW once a step, all in one launch.

    forward    [O][taps][I/group, in eights]              a row is an output channel
    backward   [I of all groups][taps][O/group, in eights]   a row is an input channel
    forward of a few channels, such as an image's: [O][window rows][window columns * I/group, in eights]

in the type of the maps (TF32 is rounded here, once), filled up with zeros. Where several groups are multiplied as one
(merging.py) a row has the channels of all of them, zeros but for its own group's. The product runs along the innermost
axis, so a chunk of a row is a run of bytes that goes to shared memory as it is.

A block takes `RUN` vectors of eight elements of one member; a table of integers says which member, and what that looks
like. Threads are dealt so that their reads lie side by side: forward along the row, backward along rows and taps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import TRANSPOSED
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.cuda.device import (
    Block,
    Buffer,
    Expr,
    Stage,
    bits,
    pack,
    put,
    registers,
    stage,
    when,
    within,
    words,
)
from bnfuse.runtime.kernels.cuda.merging import VECTOR
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

FORWARD, BACKWARD = "forward", "backward"
THREADS = 256
RUN = 4 * THREADS  # vectors of a block: chosen by hand
LINE = 64  # elements: where a packed weight may start
NEVER = 1 << 30  # a modulus that is above every element


@dataclasses.dataclass(frozen=True)
class Member:
    """One weight, OIHW, from element `source` of the parameters to element `target` of the packed ones."""

    weight: tuple[int, ...]
    group: int
    form: str
    source: int
    target: int
    merged: int = 1  # groups that are multiplied as one

    @property
    def vectors(self) -> int:
        """Count the vectors of the packed weight."""
        return packed_elements(self.weight, self.group, self.form, self.merged) // VECTOR

    @property
    def blocks(self) -> int:
        """Count the blocks that pack it."""
        return -(-self.vectors // RUN)


@dataclasses.dataclass(frozen=True)
class PackProblem:
    """What the code depends on: the members themselves are in the table."""

    op: str
    members: int
    blocks: int
    source: int  # elements of the buffers
    packed: int


@dataclasses.dataclass(frozen=True)
class Fields:
    """A member in the table. Packed element e of tap t of row r comes from

    source + (r // per)*outer + (r % per)*inner + t*tap_step + (e % modulus)*step + e // modulus, for 0 <= e < valid

    where e is counted from element  (r // per % merged)*valid  of the row, and the vectors are counted along `fast`
    first: the vectors of a row, or (`across`) all taps of all rows.
    """

    first_block: int
    source: int
    target: int
    vectors: int
    fast: int
    across: int
    taps: int
    padded: int
    valid: int
    per: int
    outer: int
    inner: int
    step: int
    tap_step: int = 1
    modulus: int = NEVER
    merged: int = 1


DIVISORS = ("fast", "taps", "per", "modulus", "merged")  # fields that indices are divided by
WIDTH = len(dataclasses.fields(Fields)) + 2 * len(DIVISORS)


def is_packed(weight: Sequence[int], core: str = "Conv", group: int = 1) -> bool:
    """Tell whether a convolution's kernels read a packed weight: all do but those of one input channel a group.

    Of a transposed convolution, and its gradients, those do that have one group.
    """
    return weight[1] != 1 or (core in TRANSPOSED and group == 1)


def is_flat(weight: Sequence[int], merged: int = 1) -> bool:
    """Tell whether the forward kernel takes a row of taps with its channels as one axis.

    It does where most of a chunk were zeros otherwise.
    """
    return merged == 1 < weight[1] < VECTOR and math.prod(weight[2:]) > 1


def packed_elements(weight: Sequence[int], group: int, form: str, merged: int = 1) -> int:
    """Count the elements of a packed OIHW weight, a multiple of eight."""
    outputs, per_group, *window = weight
    if form == FORWARD and is_flat(weight, merged):
        return outputs * window[0] * filled(per_group * window[1])
    rows, inner = (outputs, per_group) if form == FORWARD else (group * per_group, outputs // group)
    return rows * math.prod(window) * filled(merged * inner)


def filled(channels: int) -> int:
    """Fill a number of channels up to a multiple of eight."""
    return -(-channels // VECTOR) * VECTOR


def fields_of(member: Member, first_block: int) -> Fields:
    """Describe a member whose first block is `first_block`, as the table has it."""
    outputs, per_group, *window = member.weight
    taps, per_output = math.prod(window), outputs // member.group
    places = first_block, member.source, member.target, member.vectors
    if member.form == FORWARD and is_flat(member.weight, member.merged):
        row = per_group * window[1]
        shape = filled(row) // VECTOR, 0, window[0], filled(row), row
        return Fields(*places, *shape, 1, per_group * taps, 0, taps, window[1], per_group)
    if member.form == FORWARD:
        valid, per, inner, step, across = per_group, per_output, per_group * taps, taps, 0
    else:
        valid, per, inner, step, across = per_output, per_group, taps, per_group * taps, 1
    padded = filled(member.merged * valid)
    fast = member.group * per_group * taps if across else padded // VECTOR
    outer = per_output * per_group * taps
    return Fields(*places, fast, across, taps, padded, valid, per, outer, inner, step, merged=member.merged)


def reciprocal(divisor: int) -> tuple[int, int]:
    """Give the factor and the shift that divide as `divisor` does: n // divisor == n * factor >> shift for n < 2**31.

    The factor is below 2**32. It is rounded up by less than divisor / 2**shift of itself, which 31 bits do not show.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def table(members: Sequence[Member]) -> np.ndarray:
    """Write the constants that the kernel reads, int32.

    They are the fields of each member, with the reciprocals of its divisors, then the member of each block.
    """
    rows: list[int] = []
    owners: list[int] = []
    for index, member in enumerate(members):
        fields = fields_of(member, len(owners))
        rows += dataclasses.astuple(fields)
        rows += [number for name in DIVISORS for number in reciprocal(getattr(fields, name))]
        owners += [index] * member.blocks
    return np.array(rows + owners, np.uint32).view(np.int32)


def pack_weights(members: tuple[Member, ...], source: int, packed: int, target: CudaTarget) -> Kernel:
    """Make the kernel: `parameters`, `table` -> `packed`.

    Parameters are float32, `source` elements; what is packed are `packed` elements of the maps' type.
    """
    blocks = sum(member.blocks for member in members)
    problem = PackProblem("PackWeights", len(members), blocks, source, packed)
    params = (
        Param("parameters", "in", source),
        Param("table", "in", len(members) * WIDTH + blocks, "int32"),
        Param("packed", "out", packed, target.map_dtype),
    )
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, params, lambda: (_stage(name, params, problem, target),))


def _stage(name: str, params: Sequence[Param], problem: PackProblem, target: CudaTarget) -> Stage:
    with stage(name, params, grid=(problem.blocks, 1, 1), threads=THREADS) as block:
        numbers = block["table"]
        owner = T.bind(numbers[problem.members * WIDTH + block.x])
        names = [field.name for field in dataclasses.fields(Fields)]
        names += [f"{divisor} {part}" for divisor in DIVISORS for part in ("factor", "shift")]
        known = {label: T.bind(numbers[owner * WIDTH + i]) for i, label in enumerate(names)}
        first = T.bind((block.x - known["first_block"]) * RUN + block.tid)
        with T.serial(0, RUN // THREADS) as turn:
            vector = T.bind(first + turn * THREADS)
            when(vector < known["vectors"], lambda: _vector(block, known, vector, target))
    return block.stage


def _vector(block: Block, member: dict[str, Expr], vector: Expr, target: CudaTarget) -> None:
    """Pack eight elements of one tap of one row."""
    slow, fast = _divided(vector, member, "fast")
    place = T.bind(tirx.Select(member["across"] == 1, fast, slow))  # row*taps + tap
    start = T.bind(tirx.Select(member["across"] == 1, slow, fast) * VECTOR)
    row, tap = _divided(place, member, "taps")
    outer, inner = _divided(row, member, "per")
    offset = outer * member["outer"] + inner * member["inner"] + tap * member["tap_step"]
    source = T.bind(member["source"] + offset)
    _, own = _divided(outer, member, "merged")
    first_element = T.bind(start - own * member["valid"])
    values = registers(VECTOR)

    def take(i: int, there: Expr) -> None:
        exists = within(first_element + i, member["valid"])
        put(values, i, tirx.if_then_else(exists, block["parameters"][there], T.float32(0)))

    def plain() -> None:
        first = T.bind(source + first_element * member["step"])
        for i in range(VECTOR):
            take(i, first + i * member["step"])

    def flat() -> None:  # counted on from element to element
        line, column = (registers(1, "int32") for _ in range(2))
        for held, value in zip((line, column), _divided(start, member, "modulus"), strict=True):
            put(held, 0, value)
        for i in range(VECTOR):
            take(i, source + column[0] * member["step"] + line[0])
            wraps = T.bind(column[0] + 1 == member["modulus"])
            put(line, 0, tirx.Select(wraps, line[0] + 1, line[0]))
            put(column, 0, tirx.Select(wraps, T.int32(0), column[0] + 1))

    when(member["modulus"] == NEVER, plain, flat)
    _store(block["packed"], member["target"] + place * member["padded"] + start, values, target)


def _divided(number: Expr, member: dict[str, Expr], divisor: str) -> tuple[Expr, Expr]:
    """Divide, without a division, by what the table says: quotient and remainder."""
    factor = tirx.Cast("uint64", tirx.Cast("uint32", member[f"{divisor} factor"]))
    product = tirx.Cast("uint64", tirx.Cast("uint32", number)) * factor
    quotient = T.bind(tirx.Cast("int32", product >> tirx.Cast("uint64", member[f"{divisor} shift"])))
    return quotient, T.bind(number - quotient * member[divisor])


def _store(packed: Buffer, index: Expr, values: Buffer, target: CudaTarget) -> None:
    """Store eight floats, rounded to what the tensor cores take, as vectors of 16 bytes."""
    dtype = target.map_dtype
    per_word = 2 if dtype != "float32" else 1
    made = registers(VECTOR // per_word, "uint32")
    for i in range(VECTOR // per_word):
        if per_word == 2:
            pack(made, i, values[2 * i], values[2 * i + 1], dtype)
        elif target.precision == "tf32":
            T.evaluate(T.ptx["cvt.rna.tf32.f32"](made[i], values[i]))
        else:
            put(made, i, bits(values[i]))
    raw = words(packed, int(packed.shape[0]), dtype)
    first = tirx.truncdiv(index, per_word)
    for i in range(0, VECTOR // per_word, 4):
        T.buffer_store(raw, made[T.ramp(i, 1, 4)], [T.ramp(first + i, 1, 4)])
