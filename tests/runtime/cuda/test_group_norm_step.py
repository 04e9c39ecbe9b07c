"""A step with GroupNorms and InstanceNorms for a GPU, its kernels interpreted, beside the CPU's."""

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

NETWORK = """<ir_version: 8, opset_import: ["": 18]> g (float[3,3,4,5] image) => (float[3,5] logits) {
    c1 = Conv(image, w1)
    n1 = GroupNormalization<num_groups = 2>(c1, g1, b1)
    r1 = Relu(n1)
    u1 = ConvTranspose<kernel_shape = [2, 1], strides = [2, 1], group = 8>(r1, w6)
    n4 = InstanceNormalization(u1, g4, b4)
    r4 = Relu(n4)
    c2 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(r4, w2)
    n2 = InstanceNormalization(c2, g2, b2)
    t = Add(n2, r4)
    r2 = Relu(t)
    c3 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 8>(r2, w3)
    n3 = GroupNormalization<num_groups = 1>(c3, g3, b3)
    r3 = LeakyRelu<alpha = 0.1>(n3)
    k = Concat<axis = 1>(r3, r2)
    c4 = Conv(k, w4)
    e = GlobalAveragePool(c4)
    f = Flatten(e)
    logits = Gemm<transB = 1>(f, w5, b5)
}"""
SHAPES = {
    "w1": (8, 3, 1, 1),
    "w2": (8, 8, 3, 3),
    "w3": (8, 1, 3, 3),
    "w4": (12, 16, 1, 1),
    "w5": (5, 12),
    "w6": (8, 1, 2, 1),
}
GROUPS = {1: 2, 2: 8, 3: 1, 4: 8}  # parameters of each GroupNorm, in this opset one a group


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(NETWORK)
    arrays = {name: rng.standard_normal(size) / np.sqrt(np.prod(size[1:])) for name, size in SHAPES.items()}
    arrays |= {"b5": np.zeros(5)}
    for index, count in GROUPS.items():
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, count), f"b{index}": rng.standard_normal(count) / 4}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    result = rewrite(ir.from_proto(build_training_graph(model, train=["*"])), level="icf")
    kinds = {node.op_type for node in result.model.graph}
    assert {"ConvImageStatistics", "NormalizeReluConvTransposeImageStatistics"} <= kinds
    assert result.report.group_norms == 4
    return open_graph(result.model)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.15)])
def test_a_step_of_both_targets_is_the_same(graph, precision, tolerance, monkeypatch):
    check_both_targets(graph, (3, 3, 4, 5), precision, tolerance, monkeypatch)
