"""Small questions about operators that several passes ask."""

from __future__ import annotations

from bnfuse.opset.spec import ACTIVATION_GRADS, IMAGE_REDUCTIONS, SHARED, OpSpec

REDUCTIONS = ("Reduce", *SHARED)
ACCUMULATIONS = ("Scale", "Accumulate")
# steps that add another gradient to dx
ADDITIONS = ("AddGradient", "AddGatedGradient", "AddBatchNormGrad", "AddSkipGradient")
ORDER = (
    *("BiasGrad", "AddGradient", "AddGatedGradient", "AddBatchNormGrad", "Where"),
    *ACTIVATION_GRADS,
    *("AddSkipGradient", "Part", *REDUCTIONS, *ACCUMULATIONS, *IMAGE_REDUCTIONS),
)


def try_spec(prologue: tuple[str, ...], core: str, epilogue: tuple[str, ...]) -> OpSpec | None:
    """Make the operator of these steps; None where the grammar has no room for them."""
    try:
        return OpSpec(prologue, core, epilogue)
    except ValueError:
        return None


def with_step(spec: OpSpec, step: str) -> OpSpec | None:
    """Put one more step into a gradient's epilogue, where the grammar has it; None where that has no room for it.

    What the steps behind it work on changes by that: `has_room_after` tells whether there are any.
    """
    before = tuple(other for other in spec.epilogue if ORDER.index(other) < ORDER.index(step))
    return try_spec(spec.prologue, spec.core, (*before, step, *spec.epilogue[len(before) :]))


def has_room_after(spec: OpSpec, step: str) -> bool:
    """Tell whether a step may still be appended to a gradient operator: nothing that comes after it is there yet.

    Of the steps only the reductions of further BNs may occur more than once.
    """
    later = {*ACCUMULATIONS, *IMAGE_REDUCTIONS} if step in SHARED else {*ORDER[ORDER.index(step) :]}
    if step in ACTIVATION_GRADS:
        later |= {*ACTIVATION_GRADS}
    return not later & {*spec.epilogue}
