"""Products of float32 on tensor cores of TF32: three products of parts, summed where sums are rounded.

    a = high + low, b likewise:     a*b is high*high + high*low + low*high, but for 2^-23 of it or so

Tensor cores cut sums off towards zero: errors of a long chain all have one sign, and grow with its length. So a chain
is of a few products, which begins at zero with the small ones, and is then added to the sums by additions of float32,
which round to the nearest ([Ootomo22]).
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.cuda import device as d
from bnfuse.runtime.kernels.cuda.device import Buffer, Expr

Parts = tuple[Buffer, Buffer]  # words of TF32: high, low


def split_in_place(words: Buffer, low: Buffer, i: Expr) -> None:
    """Split a float32 word into two of TF32, both rounded: what it is nearest to stays, the rest goes to `low`.

    Tensor cores cut off what TF32 has no bits for, always towards zero: errors that add up. Rounding does not.
    """
    d.put(low, i, words[i])
    T.evaluate(T.ptx["cvt.rna.tf32.f32"](words[i], d.from_bits(low[i])))
    d.put(low, i, d.bits(d.from_bits(low[i]) - d.from_bits(words[i])))
    T.evaluate(T.ptx["cvt.rna.tf32.f32"](low[i], d.from_bits(low[i])))


def add_products(acc: Buffer, at: Expr, a: Parts, a_at: Expr, b: Parts, b_at: Expr, steps: int = 1) -> None:
    """Add 16x8 products of float32 A and B: acc[at:at+4] += A x B.

    A has 4 words for each of the `steps` of 8 elements of its rows, from `a_at` on in both parts, B has 2.
    """
    (a_high, a_low), (b_high, b_low) = a, b
    chain = d.registers(4)
    for i in range(4):
        d.put(chain, i, T.float32(0))
    for own_a, own_b in ((a_low, b_high), (a_high, b_low), (a_high, b_high)):
        for step in range(steps):
            d.mma("tf32", chain, 0, own_a, a_at + 4 * step, own_b, b_at + 2 * step)
    for i in range(4):
        d.put(acc, at + i, acc[at + i] + chain[i])
