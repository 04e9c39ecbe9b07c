"""Values at the ends of float32: a step says NaN where something diverged, and a number where the source has one."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx.helper as h
import pytest

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.ort.oracle import OrtGraph

LEVELS = ("none", "mvf", "bnff", "icf")
SHAPE = (2, 3, 8, 8)
NORMS = {"n1": 6, "n2": 10}


def forward_model() -> onnx.ModelProto:
    """Conv, BN, ReLU, Conv, Concat, BN, ReLU, Conv: statistics of a convolution, and of a range of channels."""
    rng = np.random.default_rng(0)
    values = {"w1": (6, 3, 1, 1), "w2": (4, 6, 3, 3), "w3": (5, 10, 1, 1)}
    arrays = {name: rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for name, shape in values.items()}
    for norm, channels in NORMS.items():
        arrays |= {f"{norm}/scale": 1 + 0.2 * rng.random(channels), f"{norm}/bias": 0.2 * rng.random(channels)}
        arrays |= {f"{norm}/mean": np.zeros(channels), f"{norm}/var": np.ones(channels)}

    def bn(name: str, x: str) -> onnx.NodeProto:
        operands = [x, *(f"{name}/{what}" for what in ("scale", "bias", "mean", "var"))]
        results = [name, f"{name}/new_mean", f"{name}/new_var"]
        return h.make_node("BatchNormalization", operands, results, name=name, training_mode=1)

    nodes = [
        h.make_node("Conv", ["x", "w1"], ["y1"]),
        bn("n1", "y1"),
        h.make_node("Relu", ["n1"], ["r1"]),
        h.make_node("Conv", ["r1", "w2"], ["y2"], pads=[1] * 4),
        h.make_node("Concat", ["y1", "y2"], ["t"], axis=1),
        bn("n2", "t"),
        h.make_node("Relu", ["n2"], ["r2"]),
        h.make_node("Conv", ["r2", "w3"], ["y3"]),
        h.make_node("GlobalAveragePool", ["y3"], ["pooled"]),
        h.make_node("Flatten", ["pooled"], ["logits"]),
    ]
    weights = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    x = h.make_tensor_value_info("x", onnx.TensorProto.FLOAT, SHAPE)
    logits = h.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [SHAPE[0], 5])
    graph = h.make_graph(nodes, "network", [x], [logits], weights)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


@functools.cache
def graph(level: str) -> TrainingGraph:
    return open_graph(bnfuse.rewrite(build_training_graph(forward_model()), level=level))


@functools.cache
def step(level: str) -> bnfuse.Step:
    return bnfuse.compile(graph(level), threads=2)


def feeds(scale: float = 1, offset: float = 0, gamma: float = 1) -> dict[str, np.ndarray]:
    """Images times `scale` plus `offset`, the BatchNorms' scales times `gamma`."""
    rng = np.random.default_rng(1)
    found = graph("none").state()
    found |= {name: value * np.float32(gamma) for name, value in found.items() if name.endswith("/scale")}
    x = rng.standard_normal(SHAPE) * scale + offset
    return {**found, "x": x.astype(np.float32), "labels": rng.integers(0, 5, SHAPE[0])}


def by_onnxruntime(level: str, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    signature = graph(level).signature
    wanted = [signature.loss, *signature.gradients.values(), *signature.running.values()]
    return OrtGraph(graph(level).model, name=level).run(fed, wanted)


def compiled(level: str, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    signature, ours = graph(level).signature, step(level)
    ours.load_state_dict({name: fed[name] for name in ours.state_dict()})
    loss = ours.forward(fed["x"], fed["labels"])
    ours.backward()
    gradients = ours.gradients()
    ours.update()
    state = ours.state_dict()
    return {
        signature.loss: np.float32(loss),
        **{output: gradients[name] for name, output in signature.gradients.items()},
        **{output: state[name] for name, output in signature.running.items()},
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_all_statistics(bad, level):
    """One such pixel reaches every channel: no running statistic may look as if nothing had happened."""
    fed = feeds()
    fed["x"][1, 0, 3, 5] = bad
    found = compiled(level, fed)
    assert np.isnan(found["loss"])
    for name in (f"{norm}/new_{what}" for norm in NORMS for what in ("mean", "var")):
        assert not np.isfinite(found[name]).any(), name
    for norm in NORMS:
        assert np.isnan(found[f"{norm}/new_var"]).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "values",
    [{"scale": 1e20}, {"scale": 1e36}, {"scale": 1e36, "offset": 1e36}, {"gamma": 1e30}, {"gamma": 0}],
    ids=str,
)
def test_a_variance_beyond_float32_gives_what_the_source_gives(values, level):
    """Its 1/sqrt is 0, so the BatchNorm passes on its bias: in onnxruntime and compiled."""
    fed = feeds(**values)
    source = by_onnxruntime("none", fed)
    if "scale" in values:
        assert np.isposinf(source["n1/new_var"]).all() and np.isfinite(source["loss"])
    for result in (by_onnxruntime(level, fed), compiled(level, fed)):
        for name, expected in source.items():
            largest = np.abs(expected[np.isfinite(expected)]).max(initial=1e-30)
            np.testing.assert_allclose(result[name], expected, rtol=1e-4, atol=1e-5 * largest, err_msg=name)
