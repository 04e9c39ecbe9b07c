"""ConvNeXts, which have LayerNorms and no BatchNorm: what moves into the convolutions, and what is told of the rest."""

from __future__ import annotations

import collections

import onnx_ir as ir
import pytest
from convnext import Net

import bnfuse
from bnfuse.build import build


def operators(model):
    return collections.Counter(node.op_type for node in model.graph)


@pytest.fixture(scope="module")
def rewritten():
    return bnfuse.rewrite(build(Net(blocks=(2, 1)).model()).model)


def test_a_gelu_goes_into_the_convolution_behind_it_and_its_slope_into_that_ones_gradient(rewritten):
    found = operators(rewritten.model)
    assert found["GeluConvBias"] == 3
    fused = [name for name in found if "GeluConvGrad" in name and name.endswith("GeluGrad")]
    assert sum(found[name] for name in fused) == 3
    assert not {"Gelu", "GeluPointwise", "PointwiseGradGeluGrad"} & {*found}


def test_again_nothing_changes(rewritten):
    again = bnfuse.rewrite(rewritten.model)
    assert [entry.name for entry in again.report.passes if entry.changed] == []
    assert operators(again.model) == operators(rewritten.model)


def test_layer_norms_are_told_by_themselves(rewritten):
    report = rewritten.report
    assert (report.batch_norms, report.layer_norms) == (0, 5)
    assert {entry.norm for entry in report.unfused} == {"LayerNorm"}
    assert collections.Counter(entry.half for entry in report.unfused) == {"forward": 5, "gradient": 5}
    assert all("one sweep" in entry.reason for entry in report.unfused)


BEFORE = """
    a = conv(x, 6, k=3, bias=1)
    b = silu(a)
"""
AFTER = {  # and how many SiLUs stay in sweeps of their own
    "one convolution": ("out = conv(b, 4)", 0),
    "several convolutions": ("c = conv(b, 4)\nd = conv(b, 4)\nout = add(c, d)", 1),
    "a depthwise convolution": ("out = conv(b, 6, k=3, g=6)", 1),
    "a convolution and a sum": ("c = conv(b, 6)\nout = add(b, c)", 1),
}


@pytest.mark.parametrize(("behind", "left"), AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_an_activation_moves_where_one_convolution_alone_reads_it(behind, left, level, training):
    model = training(BEFORE + "\n".join(f"    {line}" for line in behind.splitlines()))
    found = operators(bnfuse.rewrite(ir.to_proto(model), level=level).model)
    kept = sum(count for name, count in found.items() if "QuickGelu" in name and "Conv" not in name)
    assert (kept > 0) == bool(left), found
