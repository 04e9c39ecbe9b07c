"""What is computed of a stack of maps is computed of each map."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph

BRANCHES = """
    c1 = Conv(x, w1)
    n1, m1n, v1n = BatchNormalization<training_mode = 1>(c1, g1, b1, m1, v1)
    r1 = Relu(n1)
    c2 = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w2)
    n2, m2n, v2n = BatchNormalization<training_mode = 1>(c2, g2, b2, m2, v2)
    r2 = Relu(n2)
    u1 = Unsqueeze(r1, one)
    u2 = Unsqueeze(r2, one)
    {stack}
"""
STACKED = BRANCHES.format(stack="s = Concat<axis = 1>(u1, u2)")
THREE = BRANCHES.format(stack="c3 = Conv(x, w3)\nu3 = Unsqueeze(c3, one)\ns = Concat<axis = 1>(u1, u2, u3)")
VIEWED = """
    c = Conv<group = 1>(x, w8)
    n, m8n, v8n = BatchNormalization<training_mode = 1>(c, g8, b8, m8, v8)
    r = Relu(n)
    s = Reshape(r, five)
"""
CHOSEN = """
    u = ReduceSum<keepdims = 0>(s, one)
    p = GlobalAveragePool(u)
    a = Conv(p, {weight})
    q = Reshape(a, {shape})
    g = Softmax<axis = 1>(q)
    m = Mul(s, g)
    v = ReduceSum<keepdims = 0>(m, one)
    e = GlobalAveragePool(v)
    f = Flatten(e)
    logits = Gemm<transB = 1>(f, w5)
"""
SHAPES = {"w1": (4, 3, 1, 1), "w2": (4, 3, 3, 3), "w3": (4, 3, 1, 1), "w8": (8, 3, 1, 1), "w5": (5, 4)}
SHAPES |= {"a2": (8, 4, 1, 1), "a3": (12, 4, 1, 1)}


def build(body: str) -> ir.Model:
    rng = np.random.default_rng(0)
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[2,3,6,6] x) => (float[2,5] logits) {{{body}}}'
    model = onnx.parser.parse_model(text)
    arrays = {name: rng.standard_normal(size) for name, size in SHAPES.items()}
    for index, c in ((1, 4), (2, 4), (8, 8)):
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, c), f"b{index}": rng.standard_normal(c)}
        arrays |= {f"m{index}": np.zeros(c), f"v{index}": np.ones(c)}
    arrays |= {"one": np.array([1]), "five": np.array([2, 2, 4, 6, 6])}
    arrays |= {"gates2": np.array([2, 2, 4, 1, 1]), "gates3": np.array([2, 3, 4, 1, 1])}
    read = {name for node in model.graph.node for name in node.input}
    for name, array in arrays.items():
        if name in read:
            kind = array.dtype if array.dtype == np.int64 else np.float32
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(kind), name))
    return ir.from_proto(build_training_graph(model, train=["*"]))


def wide(result) -> list[str]:
    """The operators that work on stacks of more than a pixel."""
    shapes = (
        (node.op_type, value.shape) for node in result.model.graph for value in (*node.inputs, *node.outputs) if value
    )
    return sorted({op for op, shape in shapes if shape is not None and len(shape) == 5 and tuple(shape)[3:] != (1, 1)})


@pytest.mark.parametrize(
    ("stack", "weight", "shape", "maps"),
    [(STACKED, "a2", "gates2", 2), (THREE, "a3", "gates3", 3), (VIEWED, "a2", "gates2", 2)],
    ids=["stacked", "three", "viewed"],
)
def test_a_choice_between_branches_works_on_maps(stack, weight, shape, maps, rewritten):
    result = rewritten(build(stack + CHOSEN.format(weight=weight, shape=shape)), "rcf")
    assert wide(result) == []
    (report,) = [entry for entry in result.report.passes if entry.name == "canonical/stacks"]
    assert report.changed == 1
    products = [node for node in result.model.graph if node.op_type == "Mul" and len(node.outputs[0].shape) == 4]
    # forward, and backward towards map and gate; the softmax's own products are of single pixels
    assert len([node for node in products if tuple(node.outputs[0].shape)[2:] == (6, 6)]) == 3 * maps


def test_every_level_computes_the_same(rewritten):
    for level in ("bnff", "icf"):
        rewritten(build(STACKED + CHOSEN.format(weight="a2", shape="gates2")), level)


def test_a_stack_that_a_softmax_mixes_stays_and_says_so(rewritten):
    body = (
        VIEWED
        + """
        t = Softmax<axis = 1>(s)
        v = ReduceSum<keepdims = 0>(t, one)
        e = GlobalAveragePool(v)
        f = Flatten(e)
        logits = Gemm<transB = 1>(f, w5)
    """
    )
    result = rewritten(build(body), "rcf")
    (report,) = [entry for entry in result.report.passes if entry.name == "canonical/stacks"]
    assert (report.changed, {entry.reason for entry in report.refused}) == (
        0,
        {"it works on a stack of maps in a way that is none of each map alone"},
    )
