"""Two products with a Tanh between them: a network whose steps are quickly interpreted."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as h

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite


def graph_of(loss: str) -> TrainingGraph:
    """Two outputs of a layer."""
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.uniform(-1, 1, shape).astype(np.float32), name)
        for name, shape in (("w", (5, 4)), ("u", (4, 3)))
    ]
    nodes = [
        h.make_node("Gemm", ["x", "w"], ["h"], "layer"),
        h.make_node("Tanh", ["h"], ["b"], "tanh"),
        h.make_node("Gemm", ["b", "u"], ["a"], "head"),
    ]
    outputs = [h.make_tensor_value_info(name, 1, [6, size]) for name, size in (("a", 3), ("b", 4))]
    graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("x", 1, [6, 5])], outputs, weights)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=8)
    return open_graph(rewrite(open_graph(build_training_graph(model, loss=loss)).model))
