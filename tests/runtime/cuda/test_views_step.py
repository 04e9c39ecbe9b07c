"""A step over shuffles, Resizes, reflected borders and rows for a GPU, its kernels interpreted, beside the CPU's."""

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
    r1 = Relu(n1)
    wide = Reshape(r1, groups)
    turned = Transpose<perm = [0, 2, 1, 3, 4]>(wide)
    s = Reshape(turned, whole)
    c2 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(s, w2)
    n2, m2n, v2n = BatchNormalization<training_mode = 1>(c2, g2, b2, m2, v2)
    r2 = Relu(n2)
    u = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(r2, , twice)
    c3 = Conv(u, w3)
    n3, m3n, v3n = BatchNormalization<training_mode = 1>(c3, g3, b3, m3, v3)
    e3 = Elu(n3)
    b = Resize<mode = "linear">(e3, , twice)
    p = Pad<mode = "reflect">(b, border)
    c4 = Conv<kernel_shape = [3, 3], strides = [2, 2]>(p, w4)
    e = GlobalAveragePool(c4)
    f = Flatten(e)
    h = Gemm<transB = 1>(f, w5, b5)
    n6, m6n, v6n = BatchNormalization<training_mode = 1>(h, g6, b6, m6, v6)
    r6 = Relu(n6)
    logits = Gemm<transB = 1>(r6, w7, b7)
}"""
SHAPES = {"w1": (8, 3, 1, 1), "w2": (8, 8, 3, 3), "w3": (6, 8, 1, 1), "w4": (8, 6, 3, 3), "w5": (12, 8), "w7": (5, 12)}


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(NETWORK)
    arrays = {name: rng.standard_normal(size) / np.sqrt(np.prod(size[1:])) for name, size in SHAPES.items()}
    arrays |= {"b5": np.zeros(12), "b7": np.zeros(5), "twice": np.array([1, 1, 2, 2.0])}
    for index, c in ((1, 8), (2, 8), (3, 6), (6, 12)):
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, c), f"b{index}": rng.standard_normal(c) / 4}
        arrays |= {f"m{index}": np.zeros(c), f"v{index}": np.ones(c)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays |= {"groups": np.array([4, 2, 4, 4, 5]), "whole": np.array([4, 8, 4, 5])}
    arrays |= {"border": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    result = rewrite(ir.from_proto(build_training_graph(model, train=["*"])), level="icf")
    assert result.report.unfused == ()
    return open_graph(result.model)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_a_step_of_both_targets_is_the_same(graph, precision, tolerance, monkeypatch):
    check_both_targets(graph, (4, 3, 4, 5), precision, tolerance, monkeypatch)
