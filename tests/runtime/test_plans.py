"""What prologues and epilogues read, write and sum, as the one description says."""

from __future__ import annotations

import pytest

from bnfuse.opset.spec import (
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    parse,
)
from bnfuse.runtime.kernels.common.epilogue import EpiloguePlan, Total, totals_of
from bnfuse.runtime.kernels.common.params import operator_params
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.kernel import MapType, Problem

MAPS = (*MAPS_LIKE_X, *MAPS_LIKE_DY, "y", "stored", "dx", "x_1", "x_2", "other_1", "other_2", "plus_1", "plus_2")


def problem_of(name: str) -> Problem:
    op = parse(name)
    assert op is not None
    kinds = {each: MapType(2, 3, 3, 6 if each in ("y", *MAPS_LIKE_DY) else 4, 8) for each in MAPS}
    maps = tuple((each, kinds[each]) for each in (*op.operands, *op.results) if each in kinds)
    return Problem(name, maps, (("min", 0.0), ("max", 6.0)), (6, 4, 1, 1))


@pytest.mark.parametrize(
    ("name", "maps", "vectors"),
    [
        ("Conv", ["x"], []),
        ("NormalizeReluConvStatistics", ["x"], ["a", "b"]),
        ("NormalizeAddNormalizedReluConv", ["x", "skip"], ["a", "b", "skip_a", "skip_b"]),
        ("NormalizeWhereReluConv", ["x"], ["a", "b", "active"]),
        ("NormalizeSkipReluAddNormalizedConv", ["x", "skip"], ["a", "b", "skip_a", "skip_b"]),
        ("SliceBatchNormGradNormalizeReluConvGradReluGradReduce", ["x"], ["a", "b"]),
    ],
)
def test_what_the_prologue_of_x_reads(name, maps, vectors):
    plan = ProloguePlan.of_input(problem_of(name))
    assert ([*plan.maps], [*plan.vectors]) == (maps, vectors)
    assert plan.operands == tuple(each for each in parse(name).operands if each in (*maps, *vectors))


def test_what_the_prologue_of_dy_reads():
    plan = ProloguePlan.of_gradient(problem_of("SliceBatchNormGradNormalizeReluConvGradReluGradReduce"))
    assert ([*plan.maps], [*plan.vectors]) == (["dy", "grad_x"], ["grad_p", "grad_q", "grad_w"])


def test_what_gradients_of_activations_around_that_of_a_batch_norm_read():
    plan = ProloguePlan.of_gradient(problem_of("ReluGradBatchNormGradConvGrad"))
    assert ([*plan.maps], [*plan.vectors]) == (["dy", "grad_x"], ["grad_a", "grad_b", "grad_p", "grad_q", "grad_w"])
    plan = ProloguePlan.of_gradient(problem_of("AddGradReluGradBatchNormGradConvGrad"))
    assert [*plan.maps] == ["dy", "grad_other", "grad_x"]
    plan = ProloguePlan.of_gradient(problem_of("BatchNormGradReluGradReluConvGrad"))
    assert ([*plan.maps], [*plan.vectors]) == (["dy", "grad_x"], ["grad_p", "grad_q", "grad_w"])


def test_a_prologue_can_go_without_its_last_step():
    plan = ProloguePlan.of_input(problem_of("NormalizeReluConv"))
    assert plan.ends_in("Relu") and not plan.without_last().ends_in("Relu")
    assert plan.without_last().vectors == plan.vectors
    assert not ProloguePlan.of_input(problem_of("NormalizeWhereReluConv")).ends_in("Relu")


@pytest.mark.parametrize(
    ("name", "maps", "vectors"),
    [
        ("ConvBiasStatistics", [], ["bias"]),
        ("PointwiseGradScale", [], ["acc_p"]),
        ("ConvGradAddGradient", ["other"], []),
        ("ConvGradAddBatchNormGrad", ["other_dy", "other_x"], ["other_p", "other_q", "other_w"]),
        ("ConvGradReluGradAddSkipGradient", ["skip_grad", "x"], []),
        ("NormalizeConvGradClipGradReduce", ["x"], ["a", "b", "mean"]),
        ("NormalizeConvGradWhereClipGradReduce", ["x"], ["a", "b", "masked", "mean"]),
        ("ConvGradReduceOtherReduceAddedReluGrad", ["x_1", "x_2", "other_2"], ["a_2", "b_2", "mean_1", "mean_2"]),
        ("ConvGradReduceOtherReduceReluGrad", ["x_1", "x_2"], ["a_2", "b_2", "mean_1", "mean_2"]),
        ("PointwiseGradReduceReduceOtherAccumulate", ["x", "x_1", "dx"], ["mean", "mean_1", "acc_p"]),
    ],
)
def test_what_an_epilogue_reads(name, maps, vectors):
    plan = EpiloguePlan(problem_of(name))
    assert ([*plan.maps], [*plan.vectors]) == (maps, vectors)
    assert plan.result == ("dx" if "Grad" in name else "y")
    read = {*plan.vectors, *(plan.maps if "dx" not in plan.maps else plan.maps[:-1])}
    assert read <= {*parse(name).operands}


def test_what_a_gradient_sums():
    totals = totals_of(parse("PointwiseGradBiasGradReluGradReduceReduceOther"))
    assert totals == (
        Total(("dbias",), of_bias=True),
        Total(("dbeta", "dbeta_1")),
        Total(("dgamma",), ""),
        Total(("dgamma_1",), "_1"),
    )
    assert [total.factor for total in totals] == [None, None, "inv_std", "inv_std_1"]
    assert totals_of(parse("ConvStatistics")) == ()


def test_parameters_have_the_channels_of_their_side():
    params = {
        p.name: p for p in operator_params(problem_of("BatchNormGradNormalizeConvGradBiasGradReluGradReduceScale"))
    }
    assert {name: p.elements for name, p in params.items() if not p.is_map} == {
        **dict.fromkeys(("grad_p", "grad_q", "grad_w", "dbias"), 6),
        **dict.fromkeys(("a", "b", "mean", "inv_std", "acc_p", "dbeta", "dgamma"), 4),
        **dict.fromkeys(("weight", "dweight"), 24),
    }
    assert [p.name for p in params.values() if p.access == "out"] == [
        *("dx", "dweight", "dbias", "dbeta", "dgamma"),
    ]


def test_an_accumulated_gradient_is_updated_in_place():
    params = {p.name: p.access for p in operator_params(problem_of("PointwiseGradAccumulate"))}
    assert params == {"dy": "in", "acc_p": "in", "dx": "inout"}
