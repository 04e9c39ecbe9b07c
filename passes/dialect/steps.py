"""Small questions about operators that several passes ask."""

from __future__ import annotations

from bnfuse.opset.spec import ACTIVATION_GRADS, OpSpec

REDUCTIONS = ("Reduce", "ReduceOther")
ACCUMULATIONS = ("Scale", "Accumulate")


def try_spec(prologue: tuple[str, ...], core: str, epilogue: tuple[str, ...]) -> OpSpec | None:
    """Make the operator of these steps; None where the grammar has no room for them."""
    try:
        return OpSpec(prologue, core, epilogue)
    except ValueError:
        return None


def has_room_after(spec: OpSpec, step: str) -> bool:
    """Tell whether a step may still be appended to a gradient operator: nothing that comes after it is there yet.

    Of the steps only ReduceOther may occur more than once.
    """
    order = ("BiasGrad", "AddGradient", "Where", *ACTIVATION_GRADS, *REDUCTIONS, *ACCUMULATIONS)
    later = {*order[order.index(step) + (step == "ReduceOther") :]}
    if step in ACTIVATION_GRADS:
        later |= {*ACTIVATION_GRADS}
    return not later & {*spec.epilogue}
