"""Differences of normalised maps: sums with the second one behind a gate of -1."""

import numpy as np
import onnxruntime as ort
import pytest

import bnfuse
from bnfuse.passes import rewrite

MIXER = """
    a = conv(x, 6)
    n = bn(a)
    r = {activation}
    p = avgpool(r, k=3, s=1, p=1)
    d = sub({operands})
    c = conv(d, 6)
    out = add(c, r)
"""
CASES = {
    "normalised": ("relu(n)", "p, n", "SkipGateAddNormalizedPointwise"),
    "activated": ("hardswish(n)", "p, r", "SkipHardSwishSkipGateAddNormalizedPointwise"),
    "the first one": ("relu(n)", "n, p", "NormalizeSkipGateAddPointwise"),
}


@pytest.mark.parametrize("level", ["bnff", "icf"])
@pytest.mark.parametrize("case", CASES)
def test_the_normalised_map_is_read_by_the_difference(training, rewritten, ops, case, level):
    activation, operands, wanted = CASES[case]
    result = rewritten(training(MIXER.format(activation=activation, operands=operands)), level)
    assert wanted in ops(result)
    assert "Sub" not in ops(result)
    assert not any(entry.half == "normalise" for entry in result.report.unfused)
    again = rewrite(result.model, level=level)
    assert [entry.name for entry in again.report.passes if entry.changed] == []


def test_the_difference_and_the_skip_beside_it_are_one_sweep(training, rewritten, ops):
    """PoolFormer's residual sum: y + (avgpool(y) - y)."""
    result = rewritten(
        training("""
        a = conv(x, 6)
        n = bn(a)
        p = avgpool(n, k=3, s=1, p=1)
        d = sub(p, n)
        out = add(n, d)
    """)
    )
    assert "NormalizeGateAddNormalizedPlusPointwise" in ops(result)


def test_both_maps_may_be_normalised(training, rewritten, ops):
    result = rewritten(
        training("""
        a = conv(x, 6)
        n = bn(a)
        b = conv(x, 6)
        m = bn(b)
        r = relu(m)
        out = sub(n, r)
    """)
    )
    assert "NormalizeSkipReluSkipGateAddNormalizedPointwise" in ops(result)


def test_a_difference_of_maps_that_are_stored_anyway_stays(training, rewritten, ops):
    result = rewritten(
        training("""
        a = conv(x, 6)
        b = conv(x, 6)
        d = sub(a, b)
        n = bn(d)
        out = conv(n, 6)
    """)
    )
    assert "Sub" in ops(result)
    reasons = {each.reason for entry in result.report.passes for each in entry.refused}
    assert "neither of its maps is normalised" in reasons


@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_same_when_it_is_compiled(training, case):
    activation, operands, _ = CASES[case]
    model = training(MIXER.format(activation=activation, operands=operands))
    found = bnfuse.verify(model, bnfuse.rewrite(model), runtime="tvm", threads=1)
    assert found.equal, found.worst


def test_what_is_exported_of_it_is_what_is_exported_of_the_file(training, tmp_path):
    activation, operands, _ = CASES["activated"]
    model = training(MIXER.format(activation=activation, operands=operands))
    results = []
    for each in (model, rewrite(model).model):
        bnfuse.export_inference(each, tmp_path / "exported.onnx")
        session = ort.InferenceSession(tmp_path / "exported.onnx")
        x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
        results.append(session.run(None, {session.get_inputs()[0].name: x})[0])
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)
