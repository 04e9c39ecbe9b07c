"""BatchNorms of rows, and the products with matrices around them, are those of maps of one pixel."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph

LINEAR = """
    u = Gemm<transB = 1>(x, w1, c1)
    n, m1n, v1n = BatchNormalization<training_mode = 1>(u, g1, b1, m1, v1)
    r = Relu(n)
    logits = Gemm<transB = 1>(r, w5, c5)
"""
TOKENS = """
    t = MatMul(x, w1)
    u = Reshape(t, rows)
    n, m1n, v1n = BatchNormalization<training_mode = 1>(u, g1, b1, m1, v1)
    y = Reshape(n, tokens)
    s = HardSwish(y)
    e = MatMul(s, w2)
    f = Reshape(e, rows)
    o, m2n, v2n = BatchNormalization<training_mode = 1>(f, g2, b2, m2, v2)
    z = Reshape(o, tokens)
    q = Add(t, z)
    a = MatMul(q, w3)
    p = ReduceMean<axes = [1], keepdims = 0>(a)
    logits = Gemm<transB = 1>(p, w5, c5)
"""
PIXELS = """
    c = Conv<kernel_shape = [8, 8]>(x, k1)
    n, m1n, v1n = BatchNormalization<training_mode = 1>(c, g1, b1, m1, v1)
    r = Relu(n)
    f = Flatten(r)
    logits = Gemm<transB = 1>(f, w5, c5)
"""
SHAPES = {
    "w1": (6, 4),
    "c1": (6,),
    "w2": (6, 6),
    "w3": (6, 6),
    "w4": (6, 4),
    "w5": (5, 6),
    "c5": (5,),
    "k1": (6, 3, 8, 8),
}


def build(body: str, shape: list[int], turned: bool = False) -> ir.Model:
    rng = np.random.default_rng(0)
    dims = ",".join(map(str, shape))
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[{dims}] x) => (float[{shape[0]},5] logits) {{{body}}}'
    model = onnx.parser.parse_model(text)
    shapes = {**SHAPES, **({"w1": (4, 6)} if turned else {})}
    arrays = {name: rng.standard_normal(size).astype(np.float32) for name, size in shapes.items()}
    for index in (1, 2):
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, 6), f"b{index}": rng.standard_normal(6)}
        arrays |= {f"m{index}": np.zeros(6), f"v{index}": np.ones(6)}
    arrays |= {"rows": np.array([-1, 6]), "tokens": np.array([shape[0], -1, 6])}
    read = {name for node in model.graph.node for name in node.input}
    for name, array in arrays.items():
        if name in read:
            kind = array.dtype if array.dtype == np.int64 else np.float32
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(kind), name))
    return ir.from_proto(build_training_graph(model, train=["*"]))


def composed(result, names=r"Gemm|MatMul|.*Conv.*|.*Pointwise.*|BatchNorm(Grad)?(Statistics|Reduce)?"):
    return sorted(node.op_type for node in result.model.graph if re.fullmatch(names, node.op_type))


def test_a_perceptron_is_left_with_no_sweep_of_its_own(rewritten):
    result = rewritten(build(LINEAR, [8, 4]))
    assert (result.report.batch_norms, result.report.unfused) == (1, ())
    assert composed(result) == [
        "BatchNormGradConvGradWeight",
        "ConvStatistics",
        "NormalizeReluConvBias",
        "NormalizeReluConvGradBiasGradReluGradReduce",
    ]


def test_products_of_tokens_and_their_residual_sum(rewritten):
    result = rewritten(build(TOKENS, [2, 7, 4], turned=True))
    assert result.report.batch_norms == 2
    assert {entry.half for entry in result.report.unfused} <= {
        "gradient input"
    }  # the sum that reads the product itself
    assert [op for op in composed(result) if "MatMul" in op] == []
    assert "NormalizeHardSwishConvStatistics" in composed(result)
    assert "NormalizeHardSwishConvGradHardSwishGradReduce" in "".join(composed(result))


def test_a_map_of_one_pixel_that_is_flattened_goes_into_the_product(rewritten):
    result = rewritten(build(PIXELS, [4, 3, 8, 8]))
    assert result.report.unfused == ()
    assert "NormalizeReluConvBias" in composed(result)


@pytest.mark.parametrize("level", ["none", "rcf"])
def test_below_mvf_rows_stay(level, rewritten):
    result = rewritten(build(LINEAR, [8, 4]), level)
    assert [op for op in composed(result) if op == "BatchNorm"] == ["BatchNorm"]


def test_what_is_next_to_no_batch_norm_of_rows_stays(rewritten):
    body = "u = Gemm<transB = 1>(x, w1, c1)\nr = Relu(u)\nlogits = Gemm<transB = 1>(r, w5, c5)"
    result = rewritten(build(body, [8, 4]))
    assert composed(result, "Gemm") == ["Gemm"] * 5
    assert not any(entry.changed for entry in result.report.passes if entry.name == "canonical/rows")


def test_two_products_of_the_same_rows_keep_their_own_gradients(rewritten):
    body = """
        a = Gemm<transB = 1>(x, w1)
        u = Gemm<transB = 1>(x, w4)
        s = Add(a, u)
        n, m1n, v1n = BatchNormalization<training_mode = 1>(s, g1, b1, m1, v1)
        o, m2n, v2n = BatchNormalization<training_mode = 1>(u, g2, b2, m2, v2)
        p = Mul(n, o)
        logits = Gemm<transB = 1>(p, w5, c5)
    """
    result = rewritten(build(body, [8, 4]))
    assert composed(result, "Gemm") == ["Gemm"] * 3  # of the classifier, whose rows no BatchNorm gives


def test_a_matrix_that_is_read_twice(rewritten):
    body = """
        u = Gemm<transB = 1>(x, w1)
        n, m1n, v1n = BatchNormalization<training_mode = 1>(u, g1, b1, m1, v1)
        r = Relu(n)
        e = Gemm<transB = 1>(r, w2)
        o, m2n, v2n = BatchNormalization<training_mode = 1>(e, g2, b2, m2, v2)
        t = Relu(o)
        f = Gemm<transB = 1>(t, w2)
        logits = Gemm<transB = 1>(f, w5, c5)
    """
    result = rewritten(build(body, [8, 4]))
    assert result.report.unfused == ()
