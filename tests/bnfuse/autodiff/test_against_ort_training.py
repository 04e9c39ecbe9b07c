"""Our gradients against those that onnxruntime-training builds, operator by operator; both run in onnxruntime."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from ort_training import forward_of, training_gradients

from bnfuse.autodiff import differentiate
from bnfuse.build import build_training_graph
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import open_graph, without_dropout
from bnfuse.models import build_forward
from bnfuse.opset.functions import add_functions
from bnfuse.ort.oracle import OrtGraph

pytestmark = pytest.mark.ort_training

MAP = (2, 4, 6, 6)
OPSET = 18


@dataclasses.dataclass
class Case:
    """A node y = op(operands, constants): shapes of the operands that are differentiated, values of the others."""

    op: str
    operands: Sequence[Sequence[int]] = (MAP,)
    constants: Sequence[np.ndarray] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: int = 1
    positive: bool = False  # the operator has a domain
    order: str = ""  # of operands x0, ... and constants c0, ..., where it is another

    def model(self, feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
        """The sum of all results, each times a constant drawn for it."""
        inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, s) for i, s in enumerate(self.operands)]
        names = [value.name for value in inputs]
        given = [f"c{i}" for i in range(len(self.constants))]
        results = [f"y{i}" for i in range(self.results)]
        nodes = [
            helper.make_node(self.op, self.order.split() or [*names, *given], results, name="op", **self.attributes)
        ]
        tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in zip(given, self.constants, strict=True)]
        forward = ir.from_proto(model_of(nodes, inputs, results, tensors))
        values = OrtGraph(forward, name="forward").run(feeds, results)
        rng = np.random.default_rng(1)
        for name, value in values.items():
            tensors.append(numpy_helper.from_array(rng.standard_normal(value.shape).astype(np.float32), f"{name}_w"))
            nodes.append(helper.make_node("Mul", [name, f"{name}_w"], [f"{name}_m"], name=f"{name}/mul"))
            nodes.append(helper.make_node("ReduceSum", [f"{name}_m"], [f"{name}_s"], name=f"{name}/sum", keepdims=0))
        total = "y0_s"
        for name in results[1:]:
            nodes.append(helper.make_node("Add", [total, f"{name}_s"], [f"{name}_t"], name=f"{name}/add"))
            total = f"{name}_t"
        nodes.append(helper.make_node("Identity", [total], ["loss"], name="loss"))
        return onnx.shape_inference.infer_shapes(model_of(nodes, inputs, ["loss"], tensors), strict_mode=True)


def model_of(nodes, inputs, outputs, tensors) -> onnx.ModelProto:
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, results, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


W = (6, 4, 3, 3)
ROUND = {"pads": [1, 1, 1, 1]}
POOL = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 1, 0]}
CHOICE = np.random.default_rng(2).standard_normal(MAP) > 0

CASES = {
    **{op: Case(op) for op in ("Abs", "Cos", "Erf", "Exp", "Identity", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Sin")},
    **{op: Case(op) for op in ("Elu", "HardSwish", "Mish", "Softplus", "Tanh", "Flatten", "GlobalAveragePool")},
    **{op: Case(op, positive=True) for op in ("Log", "Sqrt", "Reciprocal")},
    **{op: Case(op, [MAP, MAP]) for op in ("Add", "Sub", "Mul")},
    **{f"{op} along an axis": Case(op, [MAP], attributes={"axis": 1}) for op in ("Softmax", "LogSoftmax")},
    **{f"{op} with a channel's": Case(op, [MAP, (4, 1, 1)]) for op in ("Add", "Sub", "Mul")},
    **{op: Case(op, [MAP, (1, 4, 1, 6)], positive=True) for op in ("Div",)},
    **{f"{op} of two": Case(op, [MAP, MAP]) for op in ("Max", "Min")},
    "Pow": Case("Pow", constants=[np.float32(2.5)], positive=True),
    "HardSigmoid": Case("HardSigmoid", attributes={"alpha": 1 / 6}),
    "Clip": Case("Clip", constants=[np.float32(-0.5), np.float32(0.7)]),
    "Where": Case("Where", [MAP, MAP], [CHOICE], order="c0 x0 x1"),
    "Conv": Case("Conv", [MAP, W, (6,)], attributes=ROUND),
    "Conv with strides": Case("Conv", [MAP, W], attributes={**ROUND, "strides": [2, 1]}),
    "Conv with dilations": Case("Conv", [MAP, W], attributes={"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
    "Conv in groups": Case("Conv", [MAP, (4, 2, 3, 3)], attributes={**ROUND, "group": 2}),
    "Conv per channel": Case("Conv", [MAP, (4, 1, 3, 3)], attributes={**ROUND, "group": 4}),
    "MaxPool": Case("MaxPool", attributes=POOL),
    "AveragePool": Case("AveragePool", attributes=POOL),
    "AveragePool that counts padding": Case("AveragePool", attributes={**POOL, "count_include_pad": 1}),
    "Gemm": Case("Gemm", [(3, 5), (4, 5), (4,)], attributes={"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "MatMul": Case("MatMul", [(3, 5), (5, 4)]),
    "MatMul of stacks": Case("MatMul", [(2, 3, 4, 5), (3, 5, 2)]),
    "ReduceSum": Case("ReduceSum", [MAP], [ints(0, 2)], {"keepdims": 0}),
    "ReduceMean": Case("ReduceMean", [MAP], [ints(2, 3)]),
    "ReduceMax": Case("ReduceMax", [MAP], [ints(1)]),
    "ReduceL2": Case("ReduceL2", [MAP], [ints(1)]),
    "Concat": Case("Concat", [MAP, (2, 3, 6, 6)], attributes={"axis": 1}),
    "Split": Case("Split", [MAP], [ints(1, 3)], {"axis": 1}, results=2),
    "Slice": Case("Slice", [MAP], [ints(1, 0), ints(6, 4), ints(2, 3), ints(2, 1)]),
    "Pad": Case("Pad", [MAP], [ints(0, 0, 1, 2, 0, 0, 2, 0)]),
    "Reshape": Case("Reshape", [MAP], [ints(2, -1)]),
    "Transpose": Case("Transpose", attributes={"perm": [0, 2, 3, 1]}),
    "Squeeze": Case("Squeeze", [(2, 1, 4)], [ints(1)]),
    "Unsqueeze": Case("Unsqueeze", [(2, 4)], [ints(0, 2)]),
    "Expand": Case("Expand", [(4, 1, 6)], [ints(2, 4, 6, 6)]),
    "Gather": Case("Gather", [MAP], [ints(2, 0, 2)], {"axis": 1}),
    "GatherElements": Case("GatherElements", [(3, 4)], [np.array([[0, 2, 2, 1]], np.int64)], {"axis": 0}),
    "Tile": Case("Tile", [(2, 3, 4)], [ints(2, 1, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_that_of_onnxruntime_training(name):
    case = CASES[name]
    rng = np.random.default_rng(0)
    low = 0.5 if case.positive else -2
    feeds = {f"x{i}": rng.uniform(low, 2, shape).astype(np.float32) for i, shape in enumerate(case.operands)}
    model = case.model(feeds)
    theirs = ir.from_proto(training_gradients(model, list(feeds), "loss"))
    ours = ir.from_proto(model)
    gradients = differentiate(ours, list(feeds), {"loss": None})
    ours.graph.outputs.extend(gradients.values())
    add_functions(ours)
    names = [f"{name}_grad" for name in feeds]
    expected = OrtGraph(theirs, name="theirs").run(feeds, names)
    found = OrtGraph(ours, name="ours").run(feeds, names)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=2e-5, err_msg=key)


NETWORKS = {  # large enough batches that no statistics are of a few elements
    "densenet40": {"batch": 2, "depth": 1, "image": 16},
    "resnet20": {"batch": 4, "image": 16},
    "squeezenet": {"batch": 4, "image": 64},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_gradients_of_onnxruntime_training(name):
    built = build_training_graph(build_forward(name, **NETWORKS[name]))
    graph = open_graph(without_dropout(ir.from_proto(built)))
    signature = graph.signature
    feeds = {**graph.state(), **draw_feeds(graph, np.random.default_rng(0))}
    theirs = training_gradients(forward_of(ir.to_proto(graph.model), signature), signature.trainable, signature.loss)
    names = [*signature.gradients.values(), *signature.running.values(), signature.loss]
    expected = OrtGraph(ir.from_proto(theirs), name="theirs").run(feeds, names)
    found = OrtGraph(graph.model, name="ours").run(feeds, names)
    for key, value in expected.items():
        assert np.linalg.norm(found[key] - value) < 1e-4 * np.linalg.norm(value), key
