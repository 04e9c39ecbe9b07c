"""Sums of each image and channel in a sweep, on both targets, against the numpy reference in float64."""

import cuda_kernels
import numpy as np
import pytest
from conv_case import as_buffer
from lowered_graph import Graph, assert_close, kernels, shapes_of

from bnfuse.opset import reference
from bnfuse.opset.spec import parse
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.images import of_map
from bnfuse.runtime.kernels.cpu import images as cpu
from bnfuse.runtime.kernels.cuda import images as cuda
from bnfuse.runtime.kernels.kernel import MapType, Problem

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

ATTRIBUTES = {"alpha": 1.702, "beta": 0.4, "min": -0.5, "max": 0.75}
CASES = [
    ("PointwiseImageStatistics", (3, 21, 5, 4)),
    ("PointwiseImageStatistics", (2, 8, 1, 1)),
    ("PointwiseGradImageReduce", (5, 16, 3, 3)),
    ("PointwiseGradImageGate", (2, 33, 4, 5)),
    ("PointwiseGradImageGateHardSwish", (3, 20, 7, 7)),
    ("PointwiseGradImageReduceOther", (2, 7, 5, 6)),
    ("PointwiseGradImageGateQuickGelu", (2, 7, 9, 2)),
    ("PointwiseGradImageGateClip", (1, 130, 6, 3)),
]


def found_and_expected(name, shape, run):
    """Results of the sweep, which reads what an operator of this name has written, and of the reference."""
    op, rng = parse(name), np.random.default_rng(0)
    n, c, h, w = shape
    operands = {}
    for operand in op.operands:
        is_map = operand in ("x", "dy", "gated_x", "reduced_x")
        operands[operand] = rng.normal(size=shape if is_map else (c,)).astype(np.float32)
    if "x" in operands:
        operands["x"] += 50  # variances that raw sums would lose
    maps = {k: MapType(n, h, w, c, c + 3) for k, v in operands.items() if v.ndim == 4}
    maps["dx" if op.is_gradient else "y"] = MapType(n, h, w, c, c + 3)
    known = tuple((key, ATTRIBUTES[key]) for key in op.attributes)
    problem = of_map(Problem(name, tuple(maps.items()), known))
    given = {k: as_buffer(v, maps[k], 2) if k in maps else v for k, v in operands.items()}
    found = run(problem, given, dict.fromkeys(maps, 2))
    wide = {k: v.astype(np.float64) for k, v in operands.items()}
    expected = reference.run(op, wide, dict(known))
    return {k: (found[k].reshape(n, c), v) for k, v in expected.items() if k.startswith("image_")}


def on_cpu(problem, given, offsets):
    kernel = cpu.image_sums(problem, resolve("cpu", 2))
    return execute.call(kernel, given, {name: at for name, at in offsets.items() if name in given})


def on_gpu(problem, given, offsets):
    kernel = cuda.image_sums(problem, cuda_kernels.gpu("fp32"))
    return cuda_kernels.run_kernel(kernel, given, {name: at for name, at in offsets.items() if name in given})


@pytest.mark.parametrize("run", [on_cpu, on_gpu])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_equals_the_reference(name, shape, run):
    results = found_and_expected(name, shape, run)
    assert results
    for name_, (found, expected) in results.items():
        scale = np.abs(expected).max() if name_ != "image_variance" else max(1.0, np.abs(expected).max())
        assert np.abs(found - expected).max() <= 1e-5 * scale, name_


CONV = "dilations = [1, 1], group = 1, kernel_shape = [{k}, {k}], pads = [{p}, {p}, {p}, {p}], strides = [1, 1]"
NAMES = ("image_gate", "image_beta", "image_gamma", "image_slope", "image_tilt")


def statistics_of(k):
    window = CONV.format(k=k, p=k // 2)
    body = f"y, m, v = ai.bnfuse.ConvImageStatistics <{window}> (x, w)"
    return Graph(body, (("x", (2, 32, 12, 12)), ("w", (48, 32, k, k))), outputs=("y", "m", "v"))


def gate_of(k):
    window = CONV.format(k=k, p=k // 2)
    results = ", ".join(("dx", "dw", *NAMES))
    body = f"{results} = ai.bnfuse.NormalizeHardSwishConvGradImageGateHardSwish <{window}> "
    body += "(dy, x, w, a, b, x, mean, inv_std, a, b)"
    vectors = tuple((name, (32,)) for name in ("a", "b", "mean", "inv_std"))
    inputs = (("dy", (2, 48, 12, 12)), ("x", (2, 32, 12, 12)), ("w", (48, 32, k, k)), *vectors)
    return Graph(body, inputs, outputs=("dx", "dw", *NAMES))


def expected_of(graph):
    """What the numpy reference makes of the graph's one node."""
    (node,) = graph.model().graph.node
    op, feeds = parse(node.op_type), graph.feeds()
    operands = {name: feeds[value].astype(np.float64) for name, value in zip(op.operands, node.input, strict=True)}
    attributes = {each.name: list(each.ints) or each.i for each in node.attribute}
    made = reference.run(op, operands, attributes)
    return {output: made[name] for name, output in zip(op.results, node.output, strict=True)}


@pytest.mark.parametrize("graph", [statistics_of, gate_of])
@pytest.mark.parametrize("k", [1, 3])
def test_a_convolution_of_a_cpu_takes_them_along(graph, k):
    expected = expected_of(graph(k))
    made, found = graph(k).on_cpu(shapes_of(expected))
    assert_close(found, expected, 1e-5)
    sweeps = [name for name in kernels(made.program) if "PointwiseImage" in name or "PointwiseGradImage" in name]
    assert not sweeps


@pytest.mark.parametrize("graph", [statistics_of, gate_of])
def test_a_sweep_follows_a_convolution_on_a_gpu(graph, monkeypatch):
    expected = expected_of(graph(1))
    _, found = graph(1).on_gpu(shapes_of(expected), monkeypatch)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("run", [on_cpu, on_gpu])
def test_a_channel_with_a_nan_has_no_variance(run):
    """A run that has diverged must show it."""
    kind = MapType(2, 4, 4, 8, 8)
    x = np.random.default_rng(0).normal(size=(2, 8, 4, 4)).astype(np.float32)
    x[0, 3, 1, 1] = np.nan
    problem = of_map(Problem("PointwiseImageStatistics", (("x", kind), ("y", kind)), ()))
    found = run(problem, {"x": as_buffer(x, kind, 0)}, {})
    for name in ("image_mean", "image_variance"):
        assert np.isnan(found[name].reshape(2, 8)).tolist() == np.isnan(x).any((2, 3)).tolist()
