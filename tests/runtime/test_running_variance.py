"""Running variances as torch moves them, by the batch's unbiased variance, and as ONNX does, by the biased one."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from fake_cuda import FakeCuda, install
from gpu_step import interpreted_step
from onnx import helper, numpy_helper

from bnfuse import runtime
from bnfuse.build import build
from bnfuse.core.errors import BnfuseError
from bnfuse.exporting import inference_model
from bnfuse.graph.training_graph import open_graph
from bnfuse.opset import reference
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.schemas import check_model
from bnfuse.passes import rewrite
from bnfuse.runtime.targets.target import CudaTarget
from bnfuse.verifying.interpreter import run

BATCH, STEPS = 4, 3
SHAPES = {"w1": (6, 3, 3, 3), "w2": (5, 6, 1, 1), "w3": (4, 5)}
NORMS = {"n1": 6, "n2": 5, "n3": 4}  # the last is of rank 2: n is the batch


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    for name, channels in NORMS.items():
        for what in ("scale", "bias", "mean", "var"):
            found[f"{name}.{what}"] = rng.uniform(0.5, 2, channels)
    return {name: value.astype(np.float32) for name, value in found.items()}


def forward() -> onnx.ModelProto:
    def norm(name: str, x: str, y: str) -> onnx.NodeProto:
        operands = [x, *(f"{name}.{what}" for what in ("scale", "bias", "mean", "var"))]
        outputs = [y, f"{name}.new_mean", f"{name}.new_var"]
        return helper.make_node("BatchNormalization", operands, outputs, name, momentum=0.8, training_mode=1)

    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], "conv1", pads=[1, 1, 1, 1], strides=[2, 2]),
        norm("n1", "c1", "b1"),
        helper.make_node("Relu", ["b1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2"),
        norm("n2", "c2", "b2"),
        helper.make_node("Relu", ["b2"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w3"], ["g"], "fc", transB=1),
        norm("n3", "g", "y"),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in values().items()]
    x = helper.make_tensor_value_info("x", 1, [BATCH, 3, 6, 5])
    graph = helper.make_graph(nodes, "net", [x], [helper.make_tensor_value_info("y", 1, [BATCH, 4])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(1, 2, (BATCH, 3, 6, 5)).astype(np.float32), rng.integers(0, 4, BATCH)) for _ in range(STEPS)]


def torch_statistics() -> dict[str, np.ndarray]:
    """Mean and variance of every BatchNorm of torch's after the batches, in float64."""
    import torch

    known = {name: torch.from_numpy(value).double() for name, value in values().items()}
    norms = {}
    for name, channels in NORMS.items():
        norms[name] = (torch.nn.BatchNorm1d if name == "n3" else torch.nn.BatchNorm2d)(
            channels, eps=float(np.float32(1e-5)), momentum=1 - float(np.float32(0.8))
        ).double()
        state = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
        tensors = {key: known[f"{name}.{what}"] for key, what in state.items()}
        norms[name].load_state_dict(tensors | {"num_batches_tracked": torch.tensor(0)})
    functional = torch.nn.functional
    for x, _ in batches():
        c1 = functional.conv2d(torch.from_numpy(x).double(), known["w1"], stride=2, padding=1)
        c2 = functional.conv2d(norms["n1"](c1).relu(), known["w2"])
        norms["n3"](norms["n2"](c2).relu().mean((2, 3)) @ known["w3"].T)
    return {
        f"{name}.{what}": getattr(norm, f"running_{what}").numpy()
        for name, norm in norms.items()
        for what in ("mean", "var")
    }


def rewritten(level: str, definition: str = "torch") -> onnx.ModelProto:
    return ir.to_proto(rewrite(ir.from_proto(build(forward(), running_variance=definition).model), level=level).model)


def roles(model: onnx.ModelProto) -> dict:
    return json.loads({entry.key: entry.value for entry in model.metadata_props}["bnfuse.roles"])


def moved(model: onnx.ModelProto, evaluate) -> dict[str, np.ndarray]:
    """The running statistics after the batches; `evaluate` gives the outputs of the graph for what it is fed."""
    state = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    state = {name: value for name, value in state.items() if name in inputs}
    running = roles(model)["running"]
    for x, labels in batches():
        found = evaluate(model, {**state, "x": x, "labels": labels})
        state |= {name: found[new] for name, new in running.items()}
    return {name: state[name] for name in running}


def in_float64(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return run(model, {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in feeds.items()})


def in_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.torch
@pytest.mark.parametrize("level", ["none", "mvf", "icf"])
def test_statistics_are_torch_s_in_float64(level):
    model = rewritten(level)
    check_model(model)
    found, expected = moved(model, in_float64), torch_statistics()
    assert {*found} == {*expected}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize("level", ["none", "icf"])
def test_bodies_and_compiled_steps_give_torch_s(level):
    model, expected = rewritten(level), torch_statistics()
    step = runtime.compile_step(model, threads=1)
    for x, labels in batches():
        step(x, labels)
    for found in (moved(model, in_onnxruntime), step.state_dict()):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.torch
def test_a_gpu_s_kernels_give_torch_s(monkeypatch):
    fake = install(monkeypatch, FakeCuda(seed=1))
    expected = torch_statistics()
    for level in ("none", "icf"):
        step = interpreted_step(open_graph(rewritten(level)), CudaTarget("sm_90", 4, "fp32"), fake)
        for x, labels in batches():
            step(x, labels)
        for name, value in expected.items():
            np.testing.assert_allclose(step.state_dict()[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_onnx_s_definition_is_the_default_and_differs_in_the_variances_alone():
    default, named = build(forward()), build(forward(), running_variance="onnx")
    assert default.model == named.model and not default.notes
    ours, other = moved(rewritten("mvf", "onnx"), in_float64), moved(rewritten("mvf"), in_float64)
    for name in ours:
        assert np.allclose(ours[name], other[name], rtol=1e-9) == name.endswith("mean")


def test_the_file_says_which_it_is():
    built = build(forward(), running_variance="torch")
    norms = [node for node in built.model.graph.node if node.op_type == "BatchNorm"]
    assert [{a.name: a.i for a in node.attribute}["unbiased"] for node in norms] == [1, 1, 1]
    (note,) = built.notes
    assert note.startswith("the running variances of 3 BatchNormalization nodes are moved by the unbiased variance")
    halves = [node for node in rewritten("icf").graph.node if node.op_type == "BatchNormFinalize"]
    elements = [{a.name: a.f for a in node.attribute}["elements"] for node in halves]
    assert elements == [BATCH * 3 * 3, BATCH * 3 * 3, BATCH]  # the last one's is of rows
    with pytest.raises(BnfuseError, match=r"--running-variance keras is no definition .*: give onnx or torch"):
        build(forward(), running_variance="keras")


def test_inference_and_export_take_the_statistics_as_they_are():
    model = rewritten("icf")
    step = runtime.compile_step(model, threads=1)
    x, _ = batches()[0]
    exported = inference_model(open_graph(model), step.state_dict())
    (expected,) = in_onnxruntime(exported, {exported.graph.input[0].name: x}).values()
    np.testing.assert_allclose(step.evaluate(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["BatchNormFinalize", "LocalFinalize"])
def test_one_element_has_no_unbiased_variance_and_gives_no_nan(name):
    op = PLAIN_OPS[name]
    operands = {key: np.full((1, 3) if key in ("mean", "variance") else 3, 0.5) for key in op.operands}
    given = {"epsilon": 1e-5, "momentum": 0.9, "elements": 1.0}
    found = reference.run(op, operands, given)["new_running_variance"]
    np.testing.assert_array_equal(found.reshape(-1), np.full(3, 0.5))
