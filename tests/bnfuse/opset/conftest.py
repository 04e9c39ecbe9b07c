"""Operators with operands: what the tests of the op set share."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper

from bnfuse.opset import reference
from bnfuse.opset.functions import function_for
from bnfuse.opset.plain import WHOLE_OPS, PlainOp
from bnfuse.opset.spec import CONV_GRADS, CONVS, DOMAIN, MAPS_LIKE_X, SAMPLEWISE, OpSpec, find, parts_of

CONV = {
    "dilations": [1, 1],
    "group": 1,
    "kernel_shape": [3, 3],
    "output_padding": [0, 0],
    "pads": [1, 1, 1, 1],
    "strides": [1, 1],
}
POOL = {
    "ceil_mode": 0,
    "count_include_pad": 0,
    "dilations": [1, 1],
    "kernel_shape": [3, 3],
    "pads": [1, 1, 1, 1],
    "strides": [2, 2],
}


@dataclasses.dataclass
class Case:
    """An operator, float32 operands (indices and labels are integers), and attributes."""

    op: OpSpec | PlainOp
    operands: dict[str, np.ndarray]
    attributes: dict[str, object]

    def expected(self, dtype=np.float64) -> dict[str, np.ndarray]:
        return reference.run(
            self.op, {name: _as(dtype, value) for name, value in self.operands.items()}, self.attributes
        )

    def model(self, opset: int = 17, *, dynamic: bool = False, function: bool = True) -> onnx.ModelProto:
        """A model of this one node."""
        node = helper.make_node(
            self.op.name, self.operands, self.op.results, domain=DOMAIN, name="it", **self.attributes
        )
        results = self.expected()
        graph = helper.make_graph(
            [node],
            "one_node",
            [_value(name, value, dynamic) for name, value in self.operands.items()],
            [_value(name, results[name], True) for name in self.op.results],
        )
        imports = [
            helper.make_opsetid("", opset),
            helper.make_opsetid(DOMAIN, 1),
            helper.make_opsetid("com.microsoft", 1),
        ]
        functions = [ir.serde.serialize_function(function_for(self.op, opset))] if function else []
        return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=9)

    def run_body(self, opset: int = 17, *, dynamic: bool = False) -> dict[str, np.ndarray]:
        """The results of the function body in onnxruntime."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        model = self.model(opset, dynamic=dynamic).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return dict(zip(self.op.results, session.run(None, self.operands), strict=True))


def _as(dtype, value: np.ndarray) -> np.ndarray:
    return value if np.issubdtype(value.dtype, np.integer) else value.astype(dtype)


def _value(name: str, value: np.ndarray, dynamic: bool) -> onnx.ValueInfoProto:
    dims = [f"{name}_{axis}" for axis in range(value.ndim)] if dynamic else list(value.shape)
    is_integer = np.issubdtype(value.dtype, np.integer)
    kind = helper.np_dtype_to_tensor_dtype(value.dtype) if is_integer else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, dims)


def make_case(
    name: str,
    *,
    seed: int = 0,
    shape=(2, 6, 7, 9),
    out_channels: int = 4,
    conv=None,
    pool=None,
    by_sample: bool = False,
    **attributes,
) -> Case:
    """Random operands of fitting shapes for the operator of this name. x has `shape`; the core makes y of it.

    The coefficients that may be of each sample are so where `by_sample` is set.
    """
    op = find(name)
    assert op is not None, name
    rng = np.random.default_rng(seed)
    if op in WHOLE_OPS:
        return _whole_case(op, rng, shape)
    if isinstance(op, PlainOp):
        return _plain_case(op, rng, shape)
    window = {**CONV, **(conv or {})} if op.core in (*CONVS, *CONV_GRADS) else {**POOL, **(pool or {})}
    own = {
        "min": -0.5,
        "max": 0.75,
        "alpha": 1.702,
        "beta": 0.4,
        "gamma": 1.05,
        "grad_start": 1,
        "acc_start": 3,
        **dict.fromkeys((f"start_{i}" for i in range(1, 9)), min(shape[1] - 1, 1)),
        **window,
        **attributes,
    }
    channels = (shape[1], out_channels) if op.is_transposed else (out_channels, shape[1])
    weight = rng.normal(size=(channels[0], channels[1] // window.get("group", 1), *window["kernel_shape"]))
    x = rng.normal(size=shape)
    core = find(op.core.removesuffix("Input").removesuffix("Weight").removesuffix("Grad"))
    matrices = {"rows": rng.normal(size=(shape[2] + 3, shape[2])), "columns": rng.normal(size=(2, shape[3]))}
    forward = reference.run(core, {"x": x, "weight": weight, **matrices}, window)
    y = forward["y"].shape
    own |= {"grad_stop": own["grad_start"] + y[1], "acc_stop": own["acc_start"] + shape[1]}
    sliced = own["grad_stop"] + 2 if "Slice" in op.prologue else y[1]
    shapes = {
        "dy": (y[0], sliced, *y[2:]),
        **dict.fromkeys(("grad_x", "grad_other"), y),
        **dict.fromkeys(("grad_a", "grad_b", "grad_p", "grad_q", "grad_w", "bias"), (y[1],)),
        "acc": (shape[0], own["acc_stop"] + 1, *shape[2:]),
        **dict.fromkeys(
            (*MAPS_LIKE_X, *(f"{name}_{i}" for name in ("x", "other", "plus") for i in range(1, 9))), shape
        ),
    }
    part = (shape[0], max(shape[1] - 1, 1), *shape[2:])
    shapes |= {f"x_{number}": part for number in parts_of(op.epilogue)}
    gate = (shape[0], shape[1], 1, 1)
    shapes |= dict.fromkeys(("gate", "skip_gate", "other_gate", *(f"gate_{i}" for i in range(1, 9))), gate)
    shapes["grad_gate"] = (y[0], y[1], 1, 1)
    if by_sample:
        at_output = [name for name in SAMPLEWISE if name.startswith("grad_")]
        shapes |= dict.fromkeys(SAMPLEWISE, shape[:2]) | dict.fromkeys(at_output, y[:2])
    given = {"x": x, "weight": weight, **matrices, "indices": forward.get("indices")}
    operands = {
        operand: given[operand] if operand in given else rng.normal(size=shapes.get(operand, (shape[1],)))
        for operand in op.operands
    }
    return Case(
        op, {key: _as(np.float32, value) for key, value in operands.items()}, {k: own[k] for k in op.attributes}
    )


def _whole_case(op: PlainOp, rng: np.random.Generator, shape: tuple[int, ...]) -> Case:
    """Maps of any rank; one label is no class, with a dloss of 0."""
    rows = (shape[0], *shape[2:])
    shapes = {**dict.fromkeys(("x", "dy"), shape), "dlosses": rows}
    if op.name == "LayerNormGrad":
        shapes |= {"mean": rows, "inv_std": rows}
    if op.name.startswith("GroupNorm"):
        shapes |= dict.fromkeys(("mean", "inv_std"), shape[:2])
    given = {
        name: rng.normal(size=shapes.get(name, (shape[1],)))
        for name in op.operands
        if name not in ("log_prob", "labels")
    }
    if "running_variance" in given:
        given["running_variance"] = np.abs(given["running_variance"])
    if "labels" in op.operands:
        scores = rng.normal(size=shape)
        given["log_prob"] = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        given["labels"] = rng.integers(shape[1], size=rows)
        given["labels"].flat[0], given["dlosses"].flat[0] = -100, 0
    operands = {name: _as(np.float32, given[name]) for name in op.operands}
    attributes = {"epsilon": 1e-3, "momentum": 0.9, "groups": next(k for k in (3, 2, 1) if shape[1] % k == 0)}
    return Case(op, operands, {name: attributes[name] for name in op.attributes})


def _plain_case(op: PlainOp, rng: np.random.Generator, shape) -> Case:
    n, c, h, w = shape
    attributes = {
        "epsilon": 1e-3,
        "momentum": 0.9,
        "count": 37,
        "start": 2,
        "stop": 2 + c,
        "acc_start": 1,
        "acc_stop": 1 + c,
        "weight": 0.25,
        "groups": next(k for k in (3, 2, 1) if c % k == 0),
        "extent": [max(1, n - 1), max(1, h // 2), max(1, w - 2)],
        **_groups(n),
    }
    wide = {"beta_acc": c + 3, "gamma_acc": c + 3}
    if op.name in ("BatchNormGradFinalize", "AllReduceTerms"):
        wide = {"beta_term": c + 4, "gamma_term": c + 4}
    grouped = (n // attributes["samples"], c)

    def draw(name: str) -> np.ndarray:
        if name == "offset":
            return np.array([size - part for size, part in zip((n, h, w), attributes["extent"], strict=True)])
        if name == "points":
            return np.sort(rng.choice(n * h * w, max(1, n * h * w // 3), replace=False))
        local = op.name.startswith("Local") and name in ("a", "b", "p", "q", "w", "mean", "variance", "inv_std")
        of_samples = op.name.startswith("GroupNorm") and name not in ("scale", "bias")
        coefficient = grouped if local else (n, c) if of_samples else (wide.get(name, c),)
        return rng.normal(size=shape if name in ("x", "dz", "acc") else coefficient).astype(np.float32)

    operands = {name: draw(name) for name in op.operands}
    for name in {"variance", "variance_2", "running_variance", "low_count", "high_count"} & {*operands}:
        operands[name] = np.abs(operands[name]) + np.float32(1e-3)
    if op.name == "RangeGradInput":
        operands |= {"low": operands["x"].min((0, 2, 3)), "high": operands["x"].max((0, 2, 3))}
    return Case(op, operands, {name: attributes[name] for name in op.attributes})


def _groups(n: int) -> dict[str, int]:
    """Two groups where the batch is even; of each the samples but the first count."""
    samples = n // 2 if n % 2 == 0 else n
    return {"samples": samples, "first": min(1, samples - 1), "rows": max(1, samples - 1)}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """L2 error relative to the expected norm."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    scale = np.linalg.norm(expected) or 1.0
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / scale)


@pytest.fixture(name="case", scope="session")
def case_fixture():
    return make_case


@pytest.fixture(scope="session")
def assert_close():
    def check(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-5) -> None:
        assert {*actual} == {*expected}
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        assert max(errors.values()) <= tolerance, errors

    return check
