"""A random batch for a training graph."""

from __future__ import annotations

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import sampling_of
from bnfuse.graph.training_graph import TrainingGraph

Arrays = dict[str, np.ndarray]


def draw_feeds(graph: TrainingGraph, rng: np.random.Generator) -> Arrays:
    """Draw standard normal data, virtual samples and gradients of outputs, labels over all classes, and offsets within
    their bounds."""
    feeds: Arrays = {}
    drawn = sampling_of(graph.model)
    roles = graph.signature
    for name in (*roles.data, *roles.virtual, *roles.labels, *roles.output_gradients.values(), *roles.offsets):
        dims, dtype = graph.shape_of(name), graph.dtype_of(name)
        if name in graph.signature.offsets:
            if name not in drawn.places:
                raise BnfuseError(f"{graph.name}: where input '{name}' may lie is not said: rewrite the graph anew")
            feeds[name] = drawn.places[name].draw(rng)
            if feeds[name].shape != tuple(dims):
                raise BnfuseError(f"{graph.name}: input '{name}' is {list(dims)}, not what is drawn: rewrite it anew")
        elif np.issubdtype(dtype, np.floating):
            feeds[name] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[name] = rng.integers(0, drawn_classes(graph, name), dims).astype(dtype)
    return feeds


def drawn_classes(graph: TrainingGraph, label: str) -> int:
    """Tell over how many classes labels are drawn; 2 where nothing in the graph says how many there are."""
    try:
        return graph.classes(label)
    except BnfuseError:
        return 2
