"""Hopper's products of a warpgroup: four warps multiply together, the right operand straight from shared memory.

    wgmma.fence -> products -> commit -> ... -> wait       products run behind the warpgroup's back in between

A product adds A (64 by 16) times B (16 by `outputs`) to float32 accumulators. Of A and of the result each warp has 16
rows, in registers as those of device.mma: four words of A, and accumulators [outputs / 8][4]. Any 16 rows will do. An
operand in shared memory is given by a *descriptor*, of rows of 128 bytes whose chunks of 16 bytes are swizzled as in
operand.py (`swizzled` of eight chunks): the row's place must be counted from a multiple of 1024 bytes. What threads
have written there, and what they have copied, products see behind `publish` and a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda.device import WARP, Buffer, Expr

GROUP = 4 * WARP  # threads
ROWS = 64  # of a product
DEPTH = 16  # elements of 16 bits along the axis that is summed over
ROW_BYTES = 128  # of an operand in shared memory
ALIGN = 1024  # of its place: eight rows, after which the swizzle begins anew
TYPES = {"bf16": "bf16", "fp16": "f16"}

_SWIZZLE_128 = 1 << 62
_EIGHT_ROWS = (8 * ROW_BYTES >> 4) << 32  # from eight rows to the next
STEP = DEPTH * 2 >> 4  # what a descriptor moves by for the next product along a row


def along_rows(address: Expr) -> Expr:
    """Describe an operand whose rows run along the axis that is summed over; `address` is uint32, of the first row.

    The next product's is `STEP` more, for the same rows.
    """
    return _described(address, 1)


def across_rows(address: Expr, apart: int) -> Expr:
    """Describe an operand whose rows are steps of the axis that is summed over, of 64 elements each.

    Further elements lie in further tiles, `apart` bytes from one to the next. The next product's is DEPTH rows on.
    """
    return _described(address, apart >> 4)


def _described(address: Expr, leading: int) -> Expr:
    fixed = T.uint64(_SWIZZLE_128 | _EIGHT_ROWS | leading << 16)
    return fixed + tirx.Cast("uint64", address >> T.uint32(4))


def multiply(
    precision: str,
    acc: Buffer,
    at: Expr,
    outputs: int,
    a: Sequence[Expr] | Expr,
    b: Expr,
    *,
    across: tuple[bool, bool] = (False, False),
) -> None:
    """Begin a product: acc[at : at + outputs/2] += A x B.

    A is four words, or a descriptor as B is; `across` says of A and B whether they are described by `across_rows`.
    `outputs` is a multiple of 8 up to 256.
    """
    kind = TYPES[precision]
    name = f"wgmma.mma_async.sync.aligned.m64n{outputs}k16.f32.{kind}.{kind}"
    in_words = isinstance(a, Sequence)
    operands = [*a, b] if in_words else [a, b]
    turned = [int(turn) for turn in (across[1:] if in_words else across)]
    held = [acc[at + i] for i in range(outputs // 2)]
    T.evaluate(T.ptx[name](*held, *operands, tirx.const(1, "bool"), 1, 1, *turned))


def fence() -> None:
    """Order what the warpgroup's threads did to registers before the products that follow."""
    T.evaluate(T.ptx["wgmma.fence.sync.aligned"]())


def commit() -> None:
    """Close a group of products, to be waited for."""
    T.evaluate(T.ptx["wgmma.commit_group.sync.aligned"]())


def wait(pending: int = 0) -> None:
    """Wait until no more than `pending` of the warpgroup's latest groups of products are under way."""
    T.evaluate(T.ptx["wgmma.wait_group.sync.aligned"](pending))


def publish() -> None:
    """Let products behind the next barrier see what this thread has written to shared memory."""
    T.evaluate(T.ptx["fence.proxy.async.shared::cta"]())
