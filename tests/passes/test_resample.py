"""Resizes and reflected borders take a BatchNorm and its activation on their own way in, and reduce on the way out."""

import numpy as np
import onnx_ir as ir
import pytest

from bnfuse.passes import rewrite

UP = """
    c = conv(x, 6)
    n = bn(c)
    r = {act}(n)
    u = {how}
    out = conv(u, 4, k=3)
"""
HOW = ["resize(r)", "resize(r, h=1, w=3)", "resize(r, mode=1)", "resize(r, mode=2)", "reflect(r)"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_no_map_is_stored_normalised(act, how, training, rewritten, ops):
    result = rewritten(training(UP.format(act=act, how=how)))
    step = {"relu": "Relu", "silu": "QuickGelu"}[act]
    assert result.report.unfused == ()
    assert [op for op in ops(result) if op not in ("GlobalAveragePool", "GlobalAveragePoolGrad")] == sorted(
        [
            "BatchNormGradConvGradWeight",
            "Conv",
            "ConvGrad",
            "ConvStatistics",
            f"Normalize{step}Resample",
            f"NormalizeResampleGrad{step}GradReduce",
        ]
    )


def test_statistics_of_what_a_resize_makes(training, rewritten, ops):
    result = rewritten(training("c = conv(x, 6)\nu = resize(c)\nn = bn(u)\nr = relu(n)\nout = conv(r, 4)"))
    assert result.report.unfused == ()
    assert {"ResampleStatistics", "BatchNormGradResampleGrad"} <= {*ops(result)}


def test_resizes_of_one_size_share_their_matrices(training, rewritten, ops):
    body = "c = conv(x, 6)\nd = conv(x, 6)\nu = resize(c)\nv = resize(d)\nout = add(u, v)"
    result = rewritten(training(body), "rcf")
    assert [op for op in ops(result) if op.startswith("Resample")] == ["Resample"] * 2 + ["ResampleGrad"] * 2
    made = [node for node in result.model.graph if node.op_type == "Resample"]
    assert made[0].inputs[1:] == made[1].inputs[1:]


def test_a_product_with_another_matrix_stays(training, rewritten, ops):
    model = training("c = conv(x, 6)\nu = resize(c)\nout = conv(u, 4)")
    (product, _) = [node for node in model.graph if node.op_type == "MatMul"]
    (place,) = [i for i, value in enumerate(product.inputs) if value.const_value is not None]
    other = ir.Value(name="other", const_value=ir.tensor(2 * product.inputs[place].const_value.numpy(), name="other"))
    model.graph.register_initializer(other)
    product.replace_input_with(place, other)
    assert "MatMul" in ops(rewritten(model))


def test_at_level_none_a_resize_stays(training, rewritten, ops):
    assert "Resize" in ops(rewritten(training(UP.format(act="relu", how=HOW[0])), "none"))


def test_what_changes_channels_stays_and_says_so(training, rewritten, ops):
    model = training("c = conv(x, 6)\nu = resize(c)\nout = conv(u, 12)")
    (node,) = [node for node in model.graph if node.op_type == "Resize"]
    pads = ir.Value(name="pads", const_value=ir.tensor(np.array([0, 1, 0, 0, 0, 1, 0, 0]), name="pads"))
    model.graph.register_initializer(pads)
    c = node.inputs[0]
    wide = ir.Value(name="wide", shape=ir.Shape([2, 8, 8, 8]), type=c.type)
    model.graph.insert_after(c.producer(), ir.node("Pad", [c, pads], {"mode": "reflect"}, outputs=[wide], name="wide"))
    model.graph.outputs.append(wide)
    result = rewrite(model)
    (refusal,) = [e for entry in result.report.passes if entry.name == "canonical/resample" for e in entry.refused]
    assert (refusal.node, refusal.reason) == ("wide", "it changes samples or channels")
