"""Random networks of today's blocks: what is rewritten computes the same, and rewriting it again changes nothing."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from random_modern import modern_network

from bnfuse.build import build_training_graph
from bnfuse.passes import rewrite
from bnfuse.verifying.interpreter import run, wide, widened


def drawn(seed, groups=False):
    """The training graph of a network, and what to feed it, as float64."""
    proto = build_training_graph(modern_network(seed, groups=groups))
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    names = [value.name for value in proto.graph.input]
    rng = np.random.default_rng(seed)
    fed = {"x": rng.standard_normal((2, 3, 8, 8)), "labels": rng.integers(0, 5, 2)}
    return ir.from_proto(proto), {**{name: arrays[name] for name in names if name in arrays}, **fed}


def errors(found, expected):
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    return {name: np.linalg.norm(found[name] - v) / (np.linalg.norm(v) + floor) for name, v in expected.items()}


@pytest.mark.parametrize("seed", range(32))
def test_a_random_modern_network(seed):
    check(seed)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_modern_network_of_group_norms(seed):
    check(seed, groups=True)


def check(seed, groups=False):
    model, feeds = drawn(seed, groups)
    source = ir.to_proto(model)
    expected = run(widened(source), wide(feeds))
    for level in ("icf", "bnff") if seed % 4 == 0 else ("icf",):
        result = rewrite(model, level=level)
        after = ir.to_proto(result.model)
        found = run(widened(after), wide(feeds))
        assert [*found] == [*expected]
        off = errors(found, expected)
        worst = max(off, key=off.__getitem__)
        assert off[worst] < 1e-9, f"{level}: {worst} is off by {off[worst]:.1e}"
        again = rewrite(result.model, level=level)
        assert [entry.name for entry in again.report.passes if entry.changed] == []


@pytest.mark.parametrize("seed", range(32, 40))
def test_the_functions_of_a_random_modern_network(seed, rewritten):
    rewritten(drawn(seed)[0], tolerance=5e-3)
