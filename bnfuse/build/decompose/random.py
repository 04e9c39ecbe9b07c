"""Draws in the form that gradients and kernels know."""

from __future__ import annotations

from bnfuse.graph.drawing import one_number

from .writer import Writer


def bernoulli(write: Writer) -> None:
    """Write Bernoulli of a computed probability as a comparison with what is drawn: a gradient goes through none of it,
    as torch has it."""
    chance = write.node.input[0]
    values = write.known(chance)
    if values is not None and one_number(values) is not None:
        return
    kind = write.given.get("dtype") or write.around.types[chance]
    drawn = write.add("RandomUniformLike", [chance])
    write.add("Cast", [write.add("Less", [drawn, chance])], last=True, to=kind)
