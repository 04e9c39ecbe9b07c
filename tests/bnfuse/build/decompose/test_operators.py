"""Reductions, rearrangements, sequences, and what ONNX defines by other operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from decomposed import after, by_reference, check_same, floats, ints, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from bnfuse.core.errors import BnfuseError

BY_SUM = ["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin"]


@given(
    op=st.sampled_from([*BY_SUM, "ReduceMean"]),
    axes=st.lists(st.integers(-4, 3), max_size=3, unique_by=lambda a: a % 4),
    keepdims=st.booleans(),
    noop=st.booleans(),
    opset=st.sampled_from([13, 18]),
)
@settings(max_examples=60, deadline=None)
def test_reductions(op, axes, keepdims, noop, opset):
    feeds = {"x": floats(2, 3, 4, 5, low=0.1, high=2)}
    attrs, values, names = {"keepdims": int(keepdims)}, {}, ["x"]
    if opset == 13:
        attrs |= {"axes": axes} if axes else {}
    else:
        attrs["noop_with_empty_axes"] = int(noop)
        if axes:
            names.append("axes")
            values["axes"] = ints(*axes)
    if noop and opset == 18 and not axes and op not in ("ReduceMax", "ReduceMin", "ReduceMean"):
        return  # whether the square or the logarithm is taken then differs among runtimes
    model = model_of([helper.make_node(op, names, ["y"], **attrs)], feeds, values, opset=opset)
    check_same(
        model, feeds, gone=[op] if op not in ("ReduceMax", "ReduceMin", "ReduceMean") else [], before=by_reference
    )


@pytest.mark.parametrize("keepdims", [0, 1])
def test_the_mean_over_pixels_is_a_global_pooling(keepdims):
    feeds = {"x": floats(2, 3, 4, 5)}
    node = helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=keepdims)
    made = check_same(model_of([node], feeds, {"axes": ints(-1, 2)}), feeds)
    assert [n.op_type for n in made.graph.node] == ["GlobalAveragePool", "Flatten"][: 2 - keepdims]


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode):
    feeds = {"x": floats(2, 12, 3, 4)}
    check_same(model_of([helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2, mode=mode)], feeds), feeds)


def test_space_to_depth():
    feeds = {"x": floats(2, 3, 4, 6)}
    check_same(model_of([helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2)], feeds), feeds)


def test_sequences_of_known_items_are_tensors():
    nodes = [
        helper.make_node("SplitToSequence", ["x", "two"], ["s"], axis=1),
        helper.make_node("SequenceAt", ["s", "one"], ["b"]),
        helper.make_node("SequenceAt", ["s", "minus"], ["c"]),
        helper.make_node("SequenceAt", ["s", "one"], ["b2"]),
        helper.make_node("Neg", ["b"], ["nb"]),
        helper.make_node("SequenceConstruct", ["c", "nb"], ["t"]),
        helper.make_node("SequenceInsert", ["t", "b2"], ["u"]),
        helper.make_node("ConcatFromSequence", ["u"], ["y"], axis=1),
        helper.make_node("SequenceErase", ["u", "one0"], ["v"]),
        helper.make_node("ConcatFromSequence", ["v"], ["stacked"], axis=0, new_axis=1),
    ]
    values = {"two": np.array(2, np.int64), "one": np.array(1, np.int64), "minus": np.array(-1, np.int64)}
    values["one0"] = np.array(0, np.int64)
    feeds = {"x": floats(2, 6, 3)}
    made = check_same(model_of(nodes, feeds, values, outputs=["y", "stacked"]), feeds)
    assert not any("Sequence" in node.op_type for node in made.graph.node)


@given(
    heads=st.sampled_from([(4, 4), (4, 2)]),
    causal=st.booleans(),
    mask=st.booleans(),
    flat=st.booleans(),
    cap=st.booleans(),
)
@settings(max_examples=16, deadline=None)
def test_attention_of_opset_23(heads, causal, mask, flat, cap):
    of_q, of_kv = heads
    shapes = ((2, of_q, 5, 8), (2, of_kv, 6, 8), (2, of_kv, 6, 8))
    feeds = {name: floats(*shape, seed=i) for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))}
    attrs = {"is_causal": int(causal)} | ({"softcap": 2.0} if cap else {})
    if flat:
        feeds = {k: np.ascontiguousarray(v.transpose(0, 2, 1, 3)).reshape(2, v.shape[2], -1) for k, v in feeds.items()}
        attrs |= {"q_num_heads": of_q, "kv_num_heads": of_kv}
    values = {"mask": floats(5, 6, seed=4)} if mask else {}
    node = helper.make_node("Attention", ["q", "k", "v", *values], ["y"], **attrs)
    made = check_same(model_of([node], feeds, values, opset=23), feeds, before=by_reference, tolerance=1e-5)
    assert not {"Shape", "Gather", "ConstantOfShape"} & {n.op_type for n in made.graph.node}


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding_of_opset_23(interleaved):
    feeds = {"x": floats(2, 3, 4, 8)}
    values = {"cos": floats(10, 4, seed=1), "sin": floats(10, 4, seed=2), "at": np.arange(8).reshape(2, 4) % 4}
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "at"], ["y"], interleaved=interleaved)
    check_same(model_of([node], feeds, values, opset=23), feeds, before=by_reference)


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "opset"),
    [
        ("Shrink", {}, {"lambd": 0.3, "bias": 0.1}, 13),
        ("CenterCropPad", {"to": ints(3, 7)}, {"axes": [2, 3]}, 18),
    ],
)
def test_operators_that_onnx_defines_by_others(op, operands, attrs, opset):
    feeds = {"x": floats(2, 3, 5, 4)}
    model = model_of([helper.make_node(op, ["x", *operands], ["y"], **attrs)], feeds, operands, opset=opset)
    made = check_same(model, feeds, before=by_reference)
    assert made.opset_import[0].version <= 21


def test_a_file_of_the_newest_opset_becomes_one_that_runs():
    feeds = {"x": floats(2, 3, 6, 6)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("HardSwish", ["c"], ["h"]),
        helper.make_node("AveragePool", ["h"], ["p"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        helper.make_node("Cast", ["p"], ["q"], to=onnx.TensorProto.FLOAT, round_mode="up"),
        helper.make_node("Softmax", ["q"], ["y"]),
    ]
    model = model_of(nodes, feeds, {"w": floats(4, 3, 1, 1)}, opset=onnx.defs.onnx_opset_version())
    assert check_same(model, feeds, before=by_reference, gone=[]).opset_import[0].version == 21


def test_an_operator_of_a_newer_opset_that_nothing_replaces_is_refused():
    node = helper.make_node("BitCast", ["x"], ["y"], name="it", to=onnx.TensorProto.FLOAT)
    model = model_of([node], {"x": floats(2, 3)}, opset=26)
    with pytest.raises(BnfuseError, match=r"^node 'it' \(BitCast\) is an operator of opset 26 that no older one"):
        after(model)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 1, 4, 5), (2, 1, 3, 4, 5)])
def test_affine_grid(corners, sizes):
    axes = len(sizes) - 2
    feeds = {"x": floats(2, axes, axes + 1)}
    node = helper.make_node("AffineGrid", ["x", "sizes"], ["y"], align_corners=corners)
    check_same(model_of([node], feeds, {"sizes": ints(*sizes)}, opset=20), feeds, before=by_reference)
