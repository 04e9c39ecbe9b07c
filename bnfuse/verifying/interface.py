"""Whether two graphs can be compared: the same inputs, outputs and random draws."""

from __future__ import annotations

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.drawing import separated
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.graph.values import declared_shape
from bnfuse.verifying.runners import compared


def check_same_interface(before: TrainingGraph, after: TrainingGraph) -> None:
    """Check that both have the same inputs by name and shape, and `after` the outputs of `before`."""
    ours = {value.name: declared_shape(value) for value in before.model.graph.inputs}
    theirs = {value.name: declared_shape(value) for value in after.model.graph.inputs}
    for name in ours:
        if name not in theirs:
            raise missing_input(after, before, name)
        if ours[name] != theirs[name]:
            raise BnfuseError(
                f"{after.name}: input '{name}' is {theirs[name]}, in {before.name} {ours[name]}: it is another network"
            )
    for name in theirs:
        if name not in ours:
            raise missing_input(before, after, name)
    outputs = set(compared(after.signature))
    for name in compared(before.signature):
        if name not in outputs:
            raise BnfuseError(f"{after.name}: has no output '{name}', which {before.name} has: rewrite it again")
    check_same_draws(before, after)


def check_same_draws(before: TrainingGraph, after: TrainingGraph) -> None:
    """Check that what one graph draws at random the other draws too: both are fed with the same values, by name."""
    ours, theirs = (separated(graph.model, graph.name)[1] for graph in (before, after))
    for one, other, left, right in ((before, after, ours, theirs), (after, before, theirs, ours)):
        for name, random in left.items():
            if name not in right:
                raise BnfuseError(
                    f"{one.name}: draws '{name}' at random, which {other.name} does not: it is another network"
                )
            if right[name] != random:
                raise BnfuseError(
                    f"{one.name}: draws '{name}' from {random}, {other.name} from {right[name]}: it is another network"
                )


def missing_input(one: TrainingGraph, other: TrainingGraph, name: str | None) -> BnfuseError:
    """Make the error of an input that only the other graph has."""
    if name in (*other.signature.offsets, *other.signature.virtual):
        return BnfuseError(
            f"{one.name}: has no input '{name}', which {other.name} draws: rewrite both with one --sample"
        )
    return BnfuseError(f"{one.name}: has no input '{name}', which {other.name} has: it is another network")
