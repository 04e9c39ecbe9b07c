"""Graphs of onnxruntime's operators, run as they are and in our dialect."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from bnfuse.graph.microsoft import convert
from bnfuse.opset.schemas import check_model

MICROSOFT = "com.microsoft"
Arrays = dict[str, np.ndarray]


def node(op: str, inputs: list[str], outputs: list[str], domain: str = MICROSOFT, **attributes: object):
    return helper.make_node(op, inputs, outputs, name=outputs[0] or outputs[-1], domain=domain, **attributes)


def model_of(
    nodes: list[onnx.NodeProto],
    feeds: Arrays,
    wanted: list[str],
    constants: Arrays | None = None,
    shapes: dict[str, list[int]] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """A graph of these nodes; what is neither fed nor constant has the shape of `shapes`, where that says one."""

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    shapes = shapes or {}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes.get(name)) for name in wanted]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items() if n not in wanted]
    tensors = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    inputs = [info(name, array) for name, array in feeds.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors, value_info=infos)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: v.copy() for k, v in feeds.items()}), strict=True))


def converted(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in our dialect: valid, with nothing of onnxruntime's in it."""
    found = ir.to_proto(convert(ir.from_proto(model)))
    nodes = [*found.graph.node, *(n for function in found.functions for n in function.node)]
    assert MICROSOFT not in {n.domain for n in nodes} | {entry.domain for entry in found.opset_import}
    assert not {"MaxPoolGrad", "AveragePoolGrad"} & {n.op_type for n in nodes if not n.domain}
    assert [value.name for value in found.graph.output] == [value.name for value in model.graph.output]
    assert [value.name for value in found.graph.input] == [value.name for value in model.graph.input]
    check_model(found)
    return found


def same(model: onnx.ModelProto, feeds: Arrays, tolerance: float = 2e-5) -> list[str]:
    """The converted graph computes what the graph did; gives its operators."""
    found = converted(model)
    expected, results = run(model, feeds), run(found, feeds)
    for name, value in expected.items():
        scale = max(1.0, float(np.abs(value).max(initial=0)))
        np.testing.assert_allclose(results[name], value, rtol=tolerance, atol=tolerance * scale, err_msg=name)
        assert results[name].shape == value.shape and results[name].dtype == value.dtype
    return [n.op_type for n in found.graph.node]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pool_model(kind, window, shape=(2, 3, 9, 8)):
    x = normal(0, *shape)
    outputs = ["y", "indices"] if kind == "MaxPool" else ["y"]
    forward = helper.make_node(kind, ["x"], outputs, name="pool", **window)
    value = helper.make_tensor_value_info
    probe = helper.make_graph([forward], "g", [value("x", 1, shape)], [value("y", 1, None)])
    y = run(helper.make_model(probe, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {"x": x})["y"].shape
    feeds = {"x": x, "dy": normal(1, *y)}
    backward = helper.make_node(f"{kind}Grad", ["dy", *outputs[1:]], ["dx"], name=f"pool_Grad/{kind}Grad_0", **window)
    return model_of([forward, backward], feeds, ["y", "dx"], shapes={"y": list(y), "dx": list(shape)}), feeds
