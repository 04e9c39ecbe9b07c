"""A step whose BatchNorms cross Splits and Concats for a GPU, its kernels interpreted, beside the CPU's."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from gpu_step import check_both_targets

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite

NETWORK = """<ir_version: 8, opset_import: ["": 17]> g (float[4,3,4,5] image) => (float[4,5] logits) {
    c1 = Conv(image, w1)
    n1, m1n, v1n = BatchNormalization<training_mode = 1>(c1, g1, b1, m1, v1)
    r1 = LeakyRelu<alpha = 0.1>(n1)
    left, right = Split<axis = 1>(r1, halves)
    c2 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(right, w2)
    n2, m2n, v2n = BatchNormalization<training_mode = 1>(c2, g2, b2, m2, v2)
    r2 = LeakyRelu<alpha = 0.1>(n2)
    c3 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(r2, w3)
    n3, m3n, v3n = BatchNormalization<training_mode = 1>(c3, g3, b3, m3, v3)
    r3 = LeakyRelu<alpha = 0.1>(n3)
    p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(left)
    t = Concat<axis = 1>(left, r2, r3, p)
    c4 = Conv(t, w4)
    n4, m4n, v4n = BatchNormalization<training_mode = 1>(c4, g4, b4, m4, v4)
    r4 = LeakyRelu<alpha = 0.1>(n4)
    e = GlobalAveragePool(r4)
    f = Flatten(e)
    logits = Gemm<transB = 1>(f, w5, b5)
}"""
SHAPES = {"w1": (16, 3, 1, 1), "w2": (8, 8, 3, 3), "w3": (3, 8, 3, 3), "w4": (12, 27, 1, 1), "w5": (5, 12)}


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(NETWORK)
    arrays = {name: rng.standard_normal(size) / np.sqrt(np.prod(size[1:])) for name, size in SHAPES.items()}
    arrays |= {"b5": np.zeros(5)}
    for index, c in ((1, 16), (2, 8), (3, 3), (4, 12)):
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, c), f"b{index}": rng.standard_normal(c) / 4}
        arrays |= {f"m{index}": np.zeros(c), f"v{index}": np.ones(c)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays |= {"halves": np.array([8, 8])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    result = rewrite(ir.from_proto(build_training_graph(model, train=["*"])), level="icf")
    assert result.report.unfused == ()
    kinds = {node.op_type for node in result.model.graph}
    assert {"NormalizeWhereLeakyReluConvStatistics"} <= kinds
    assert any("GradWhereLeakyReluGradReduce" in kind for kind in kinds)
    return open_graph(result.model)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.15)])  # as before any pass
def test_a_step_of_both_targets_is_the_same(graph, precision, tolerance, monkeypatch):
    check_both_targets(graph, (4, 3, 4, 5), precision, tolerance, monkeypatch)
