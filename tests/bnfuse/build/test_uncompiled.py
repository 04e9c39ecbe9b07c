"""What `build` lists as supported builds and has kernels, or a note says that it has none."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from pooling_cases import lower_everywhere

from bnfuse.build import build
from bnfuse.build.traps import SUPPORTED
from bnfuse.core.errors import BnfuseError

Case = tuple[list[onnx.NodeProto], dict[str, np.ndarray]]
ZERO = np.array(0, np.float32)
NOTE = "cannot be compiled: the file runs in onnxruntime alone"


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def node(op: str, inputs: str = "c", output: str = "y", **attrs) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), name=f"{op}_{output.split()[0]}", **attrs)


def one(op: str, values: dict[str, np.ndarray] | None = None, **attrs) -> Case:
    return [node(op, " ".join(("c", *(values or {}))), **attrs)], values or {}


def mask(*more: onnx.NodeProto) -> Case:
    return [node("Greater", "c k", "g"), *more], {"k": ZERO}


FLAT = node("Flatten", "c", "f")
ALONE = (
    "Abs Celu Cos Dropout Elu Erf Exp Flatten Gelu GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity "
    "LeakyRelu Log LogSoftmax Mish Neg ReduceMax ReduceMean ReduceSum Relu Selu Sigmoid Sin Softmax Softplus Softsign "
    "Sqrt Squeeze Tanh Transpose"
)
CASES: dict[str, Case] = {
    **{op: one(op) for op in ALONE.split()},
    **{op: one(op, {"k": floats(4, 1, 1)}) for op in ("Add", "Div", "Max", "Min", "Mul", "PRelu", "Sub", "Sum")},
    **{op: one(op, kernel_shape=[2, 2]) for op in ("AveragePool", "MaxPool")},
    "And": mask(node("And", "g g", "g2"), node("Where", "g2 c k")),
    "BatchNormalization": (
        [node("BatchNormalization", "c s b m v", "y nm nv", training_mode=1)],
        {name: np.ones(4, np.float32) + np.arange(4, dtype=np.float32) for name in "sbmv"},
    ),
    "Cast": mask(node("Cast", "g", "h", to=1), node("Mul", "c h")),
    "Clip": one("Clip", {"low": ZERO, "high": ZERO + 6}),
    "Concat": ([node("Concat", "c c", axis=1)], {}),
    "Concat of rows": ([node("Concat", "c c", axis=2)], {}),
    "Conv": one("Conv", {"k": floats(5, 4, 3, 3)}),
    "Equal": ([node("Equal", "c k", "g"), node("Where", "g c k")], {"k": ZERO}),
    "Expand": ([node("ReduceMean", "c", "m", axes=[2, 3]), node("Expand", "m k")], {"k": ints(2, 4, 6, 6)}),
    "Gather": one("Gather", {"k": ints(0, 2)}, axis=1),
    "Gemm": ([FLAT, node("Gemm", "f k")], {"k": floats(144, 3)}),
    "LayerNormalization": one("LayerNormalization", {"s": floats(6), "b": floats(6)}),
    "MatMul": ([FLAT, node("MatMul", "f k")], {"k": floats(144, 3)}),
    "MatMul of maps": one("MatMul", {"k": floats(6, 3)}),
    "Pad": one("Pad", {"k": ints(0, 0, 1, 1, 0, 0, 1, 1)}),
    "Pow": one("Pow", {"k": ZERO + 2}),
    "Reshape": one("Reshape", {"k": ints(2, 8, 18)}),
    "Slice": one("Slice", {"from": ints(1), "to": ints(3), "axes": ints(1)}),
    "Split": ([node("Split", "c", "y z", axis=1)], {}),
    "Sum of three": ([node("Sum", "c c k")], {"k": floats(4, 1, 1)}),
    "Unsqueeze": one("Unsqueeze", {"k": ints(1)}),
    "Where": mask(node("Where", "g c k")),
}
ONNXRUNTIME_ALONE: set[str] = set()


def test_every_supported_operator_has_a_case():
    assert set(SUPPORTED.split()) == {name.split(" ")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_supported_operator_has_kernels_or_a_note(name, after_conv):
    nodes, values = CASES[name]
    built = build(after_conv(nodes, values, opset=20 if name == "Gelu" else 18 if name == "Mish" else 17), loss="mse")
    noted = [note for note in built.notes if note.endswith(NOTE)]
    assert bool(noted) == (name in ONNXRUNTIME_ALONE)
    if not noted:
        lower_everywhere(built.model)
        return
    with pytest.raises(BnfuseError, match=f"node '{nodes[-1].name}"):
        lower_everywhere(built.model)
    assert f"'{nodes[-1].name}' ({nodes[-1].op_type})" in noted[0]


def test_convolutions_of_one_dimension_have_kernels():
    graph = helper.make_graph(
        [node("Conv", "x w")],
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 3, 8])],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(floats(4, 3, 3), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    built = build(model, loss="mse")
    assert not any(note.endswith(NOTE) for note in built.notes)
    lower_everywhere(built.model)
