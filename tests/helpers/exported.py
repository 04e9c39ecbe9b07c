"""Graphs with what torch's exporter writes beside them, without torch."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from bnfuse.build.exporters import AROUND, CALL, MODULES, SIGNATURE


def called(node: onnx.NodeProto, call: str, operator: str, arguments: Sequence[str], module: str) -> onnx.NodeProto:
    """The node with the metadata of a call `%call = operator(arguments)` in the module of that path."""
    kind = "batchnorm.BatchNorm2d" if "batch_norm" in operator else "conv.Conv2d"
    said = {
        AROUND[0]: f"['net.Net', 'torch.nn.modules.{kind}', '{operator}']",
        AROUND[1]: f": net.Net/{module}: torch.nn.modules.{kind}/{call}: {operator}",
        CALL: f"%{call} : [num_users=1] = call_function[target=torch.ops.{operator}]"
        f"(args = ({', '.join(arguments)}, 1), kwargs = {{}})",
        MODULES: f"['', '{module}', '{call}']",
    }
    for key, value in said.items():
        node.metadata_props.add(key=key, value=value)
    return node


def norm_of_module(x: str, y: str, operands: Sequence[str], module: str, *, affine: bool = True) -> onnx.NodeProto:
    node = helper.make_node("BatchNormalization", [x, *operands], [y], f"node_{module}")
    own = [f"%p_{module}_weight", f"%p_{module}_bias"] if affine else ["None", "None"]
    arguments = [f"%{x}", *own, f"%b_{module}_running_mean", f"%b_{module}_running_var"]
    return called(node, f"bn_{module}", "aten._native_batch_norm_legit_no_training.default", arguments, module)


def signed(model: onnx.ModelProto, parameters: Sequence[str], buffers: Sequence[str] = ()) -> onnx.ModelProto:
    """The model as torch's exporter leaves it, with the names of the module's parameters and buffers."""
    lines = [f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in parameters]
    lines += [f"b_{name.replace('.', '_')}: BUFFER target='{name}' persistent=True" for name in buffers]
    model.graph.metadata_props.add(key=SIGNATURE, value="\n# inputs\n" + "\n".join(lines) + "\n\n# outputs\n")
    model.producer_name = "pytorch"
    return model
