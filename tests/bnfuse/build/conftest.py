"""Small forward graphs, and a step of a training file through onnxruntime."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper


def make_forward(
    nodes: Sequence[onnx.NodeProto],
    values: dict[str, np.ndarray] | None = None,
    *,
    x: Sequence[int | str] = (2, 3, 6, 6),
    output: str = "y",
    opset: int = 17,
) -> onnx.ModelProto:
    """A graph from `x` to `output` with these nodes and initializers."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in (values or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def conv_values(channels: int = 4) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(0).standard_normal((channels, 3, 3, 3)).astype(np.float32)}


def conv(name: str = "conv", x: str = "x", y: str = "c") -> onnx.NodeProto:
    return helper.make_node("Conv", [x, "w"], [y], name=name, pads=[1, 1, 1, 1])


def norm_values(channels: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    names = ("scale", "bias", "mean", "var")
    return {name: rng.uniform(0.5, 2, channels).astype(np.float32) for name in names}


def run_step(model: onnx.ModelProto, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results by name, and what was fed: standard normal images, random labels, parameters by their initial values."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 2
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    signature = json.loads({e.key: e.value for e in model.metadata_props}["bnfuse.roles"])
    rng, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name in signature["data"] or value.type.tensor_type.elem_type == TensorProto.FLOAT:
            fed = (*signature["data"], *signature["labels"], *signature["output_gradients"].values())
            if value.name in fed:
                feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif value.name in signature["labels"]:
            feeds[value.name] = rng.integers(0, 2, shape).astype(np.int64)
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session.run(names, feeds), strict=True)), feeds


@pytest.fixture
def forward() -> Callable[..., onnx.ModelProto]:
    return make_forward


@pytest.fixture
def conv_norm() -> Callable[..., onnx.ModelProto]:
    """x -> Conv -> BN(attributes) -> Relu -> y."""

    def make(extra_nodes: Sequence[onnx.NodeProto] = (), values: dict | None = None, **attrs) -> onnx.ModelProto:
        settings = {"training_mode": 1, **attrs}
        outputs = ["n", "new_mean", "new_var"] if settings["training_mode"] else ["n"]
        nodes = [
            conv(),
            helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], outputs, "bn", **settings),
            *(extra_nodes or [helper.make_node("Relu", ["n"], ["y"], name="relu")]),
        ]
        return make_forward(nodes, {**conv_values(), **norm_values(), **(values or {})})

    return make


@pytest.fixture
def after_conv() -> Callable[..., onnx.ModelProto]:
    """x -> Conv -> c -> the given nodes -> y."""

    def make(nodes: Sequence[onnx.NodeProto], values: dict | None = None, **how) -> onnx.ModelProto:
        return make_forward([conv(), *nodes], {**conv_values(), **(values or {})}, **how)

    return make


@pytest.fixture
def step() -> Callable[..., tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    return run_step
