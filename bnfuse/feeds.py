"""A random batch for a training graph."""

from __future__ import annotations

import numpy as np

from bnfuse.training_graph import TrainingGraph

Arrays = dict[str, np.ndarray]


def draw_feeds(graph: TrainingGraph, rng: np.random.Generator) -> Arrays:
    """Standard normal images, labels over all classes, and zeros for sampling offsets."""
    feeds: Arrays = {}
    for name in (*graph.roles.data, *graph.roles.labels, *graph.roles.offsets):
        dims, dtype = graph.shape_of(name), graph.dtype_of(name)
        if name in graph.roles.offsets:
            feeds[name] = np.zeros(dims, dtype)
        elif np.issubdtype(dtype, np.floating):
            feeds[name] = rng.standard_normal(dims).astype(dtype)
        else:
            feeds[name] = rng.integers(0, graph.classes(), dims).astype(dtype)
    return feeds
