"""Small forward models, and what they compute before and after decomposition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from differentiated import check
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnfuse.build.decompose import DECOMPOSITIONS, decompose
from bnfuse.build.forward import fold_constants, read_forward, settle_shapes
from bnfuse.build.repair import make_canonical
from bnfuse.opset.functions import add_functions

KINDS = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}


def floats(*shape: int, seed: int = 0, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    values: dict[str, np.ndarray] | None = None,
    *,
    outputs: Sequence[str] = ("y",),
    opset: int = 21,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, KINDS[v.dtype], v.shape) for name, v in feeds.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(v, name) for name, v in (values or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def after(model: onnx.ModelProto, variables: Sequence[str] = ()) -> onnx.ModelProto:
    """The model without the operators that are written by others."""
    forward = read_forward(model)
    constants = settle_shapes(forward, fold_constants(forward))
    make_canonical(forward)
    decompose(forward, constants, frozenset(variables))
    make_canonical(forward)
    onnx.checker.check_model(forward.model, full_check=True)
    return forward.model


def with_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the bodies of our operators, if it has any."""
    if not any(node.domain for node in model.graph.node):
        return model
    known = ir.from_proto(model)
    add_functions(known)
    return ir.to_proto(known)


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    serialized = with_functions(model).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def by_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ReferenceEvaluator(model).run(None, feeds)


def check_same(
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    *,
    variables: Sequence[str] = (),
    before=by_onnxruntime,
    gone: Sequence[str] | None = None,
    tolerance: float = 2e-6,
) -> onnx.ModelProto:
    """Both compute the same, and the operators `gone` (of the model, those with a decomposition) are gone."""
    made = after(model, variables)
    left = {node.op_type for node in made.graph.node}
    for op in gone if gone is not None else {n.op_type for n in model.graph.node} & {*DECOMPOSITIONS}:
        assert op not in left
    whole = ir.from_proto(made)
    add_functions(whole)
    for expected, found in zip(before(model, feeds), by_onnxruntime(ir.to_proto(whole), feeds), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))
    return made


def check_gradients(
    nodes: Sequence[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    function: Callable[..., Any],
    *,
    values: dict[str, np.ndarray] | None = None,
    opset: int = 21,
    tolerance: float = 1e-10,
) -> onnx.ModelProto:
    """What is written by others has, in float64, the results and gradients of `function(torch, *feeds)`."""
    narrow = {name: v.astype(np.float32) if v.dtype.kind == "f" else v for name, v in feeds.items()}
    made = after(model_of(nodes, narrow, values, opset=opset))
    constants = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    wide = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in constants.items()}
    version = next(each.version for each in made.opset_import if not each.domain)
    check(list(made.graph.node), feeds, function, constants=wide, opset=version, tolerance=tolerance)
    return made
