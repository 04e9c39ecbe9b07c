"""Networks that compile in seconds. One has what makes training hard to repeat: BatchNorms, Dropout, and on request
samples that are drawn each epoch and virtual ones drawn each step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as h

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.data import Dataset, load_data

BATCH, CLASSES = 16, 10
SAMPLED = "fs:1/4+vdn:2@0.5"
STRIDED = {"strides": [2, 2], "pads": [1, 1, 1, 1]}


def forward_model(dropout: float = 0.25) -> onnx.ModelProto:
    """Conv, BN, ReLU twice, global pooling, Dropout, a classifier: images of 1x8x8."""
    rng = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, array: np.ndarray) -> str:
        weights.append(onnx.numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def layer(name: str, x: str, cin: int, cout: int, stride: int) -> str:
        w = weight(f"{name}/weight", rng.standard_normal((cout, cin, 3, 3)) * np.sqrt(2 / (9 * cin)))
        window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [stride, stride]}
        nodes.append(h.make_node("Conv", [x, w], [f"{name}/y"], name=name, **window))
        parts = (("scale", np.ones(cout)), ("bias", np.zeros(cout)), ("mean", np.zeros(cout)), ("var", np.ones(cout)))
        operands = [weight(f"{name}/bn/{what}", value) for what, value in parts]
        results = [f"{name}/z", f"{name}/m", f"{name}/v"]
        nodes.append(
            h.make_node("BatchNormalization", [f"{name}/y", *operands], results, name=f"{name}/bn", training_mode=1)
        )
        nodes.append(h.make_node("Relu", [f"{name}/z"], [f"{name}/out"], name=f"{name}/relu"))
        return f"{name}/out"

    x = layer("conv2", layer("conv1", "image", 1, 8, 1), 8, 16, 2)
    nodes.append(h.make_node("GlobalAveragePool", [x], ["pooled"], name="pool"))
    nodes.append(h.make_node("Flatten", ["pooled"], ["flat"], name="flatten"))
    ratio, training = weight("ratio", np.float32(dropout)), "training"
    weights.append(onnx.numpy_helper.from_array(np.array(True), training))
    nodes.append(h.make_node("Dropout", ["flat", ratio, training], ["dropped"], name="dropout", seed=7))
    head = [weight("head/weight", rng.standard_normal((CLASSES, 16)) / 4), weight("head/bias", np.zeros(CLASSES))]
    nodes.append(h.make_node("Gemm", ["dropped", *head], ["logits"], name="head", transB=1))
    image = h.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [BATCH, 1, 8, 8])
    logits = h.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [BATCH, CLASSES])
    graph = h.make_graph(nodes, "small", [image], [logits], weights)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def plain_graph(batch: int) -> onnx.ModelProto:
    """Conv, ReLU, a classifier, without BatchNorm: of it `n` ranks of a batch compute what one does of `n` batches."""
    rng = np.random.default_rng(4)
    sizes = {"conv/weight": (4, 1, 3, 3), "conv/bias": (4,), "head/weight": (CLASSES, 64), "head/bias": (CLASSES,)}
    values = {name: (rng.standard_normal(shape) / 6).astype(np.float32) for name, shape in sizes.items()}
    nodes = [
        h.make_node("Conv", ["image", "conv/weight", "conv/bias"], ["y"], name="conv", kernel_shape=[3, 3], **STRIDED),
        h.make_node("Relu", ["y"], ["z"], name="relu"),
        h.make_node("Flatten", ["z"], ["flat"], name="flatten"),
        h.make_node("Gemm", ["flat", "head/weight", "head/bias"], ["logits"], name="head", transB=1),
    ]
    image = h.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [batch, 1, 8, 8])
    logits = h.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [batch, CLASSES])
    weights = [onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = h.make_graph(nodes, "plain", [image], [logits], weights)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    import onnx_ir as ir

    built = build_training_graph(model)
    return ir.to_proto(bnfuse.rewrite(built, level="icf").model)


def small_graph(sample: str | None = SAMPLED, level: str = "icf") -> onnx.ModelProto:
    import onnx_ir as ir

    model = build_training_graph(forward_model())
    return ir.to_proto(bnfuse.rewrite(model, level=level, sample=sample).model)


def normalised_graph(level: str = "icf") -> onnx.ModelProto:
    """One in which nothing is drawn."""
    import onnx_ir as ir

    return ir.to_proto(bnfuse.rewrite(build_training_graph(forward_model(0.0)), level=level).model)


def small_data(train: int = 5 * BATCH + 3, test: int = 40) -> Dataset:
    """Some of the digits, not normalised."""
    data = load_data("digits")
    return dataclasses.replace(
        data,
        train_x=data.train_x[:train],
        train_y=data.train_y[:train],
        test_x=data.test_x[:test],
        test_y=data.test_y[:test],
    )


def save_npz(path: Path, data: Dataset) -> Path:
    np.savez(path, x=data.train_x, y=data.train_y, x_test=data.test_x, y_test=data.test_y)
    return path
