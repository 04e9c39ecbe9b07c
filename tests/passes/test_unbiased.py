"""Of which elements a running variance is the unbiased estimate, where statistics are of a part of the batch."""

import onnx_ir as ir
import pytest
from small_networks import RESIDUAL

from bnfuse.build import build
from bnfuse.passes import rewrite

SAMPLES = {  # elements a channel that the unbiased estimate is of, of a map [2, 4, 8, 8]
    "bs:1": 64,
    "fs:0.25": 32,
    "bn+vdn:1@0.25": 1 / (0.25 / 64 + 0.75 / 128),
    "l1bn": 128,
    "rbn": 0,  # an estimate from the range, which this is no correction of
}


@pytest.mark.parametrize("spec", SAMPLES)
def test_of_a_sample_n_is_the_sample_s(spec, network):
    built = build(network(RESIDUAL), running_variance="torch").model
    after = rewrite(ir.from_proto(built), level="icf", sample=spec).model
    halves = [node for node in after.graph if node.op_type == "BatchNormFinalize"]
    first = halves[0].attributes
    assert (first["elements"].as_float() if "elements" in first else 0) == pytest.approx(SAMPLES[spec], rel=1e-6)


def test_of_groups_n_is_a_group_s(network):
    built = build(network(RESIDUAL), running_variance="torch").model
    after = rewrite(ir.from_proto(built), level="none", local_bn=1).model
    first = next(node for node in after.graph if node.op_type == "LocalFinalize")
    assert first.attributes["elements"].as_float() == 64
