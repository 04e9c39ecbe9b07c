"""The forward pass of one step over again in onnxruntime, with a look at every tensor: which are not finite?

For the one moment when a loss is not. Each tensor is multiplied by 0 and summed up, which is 0 where all is finite, so
that the maps themselves need not be kept. Dropout is left out: it makes nothing finite or infinite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.graph.drawing import separated
from bnfuse.graph.sampling import virtual_samples
from bnfuse.graph.training_graph import without_dropout
from bnfuse.ort.oracle import OrtGraph

if TYPE_CHECKING:
    from bnfuse.runtime import Step

LOOKED_AT = "/not_finite"


def not_finite(
    step: Step, model: ir.Model, forward: Collection[str], given: Mapping[str, np.ndarray], threads: int
) -> set[str]:
    """List the tensors that are not finite among all that the nodes `forward` (by name) give.

    `given` are the data and labels of the step, whose state is still that before it.
    """
    watched = watching(ir.to_proto(separated(without_dropout(model))[0]), forward)
    names = [value.name for value in watched.graph.output]
    feeds = {**step.state_dict(), **drawn(step), **given}
    wanted = {value.name for value in watched.graph.input}
    graph = OrtGraph(ir.from_proto(watched), name="the forward pass", threads=threads)
    found = graph.run({name: value for name, value in feeds.items() if name in wanted}, names)
    return {name.removesuffix(LOOKED_AT) for name, value in found.items() if not np.isfinite(value)}


def watching(model: onnx.ModelProto, forward: Collection[str]) -> onnx.ModelProto:
    """Give the forward nodes alone; outputs are scalars, 0 or nan, one for each float tensor that they give."""
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
    nodes = [node for node in model.graph.node if node.name in forward]
    looks, outputs = [], []
    for node in nodes:
        for name in node.output:
            if types.get(name) == onnx.TensorProto.FLOAT:
                look = name + LOOKED_AT
                looks.append(onnx.helper.make_node("Mul", [name, LOOKED_AT], [f"{look}/zeros"]))
                looks.append(onnx.helper.make_node("ReduceSum", [f"{look}/zeros"], [look], keepdims=0))
                outputs.append(onnx.helper.make_tensor_value_info(look, onnx.TensorProto.FLOAT, []))
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend([*nodes, *looks])
    model.graph.output.extend(outputs)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((), np.float32), LOOKED_AT))
    return model


def drawn(step: Step) -> dict[str, np.ndarray]:
    """Tell what the step drew for itself: random values are of the samples of its rank."""
    from bnfuse.runtime.updating import seed_of

    seed = seed_of(step.seed, 0 if step.world is None else step.world.rank)
    mean, std = (values.tolist() for values in step.virtual_statistics)
    shapes = {name: step.latest.inputs[name].shape for name in step.sampling.virtual}
    virtual = {
        name: virtual_samples(shape, mean, std, seed=step.seed, step=step.steps) for name, shape in shapes.items()
    }
    random = {
        name: one.draw(held.shape, held.dtype, seed=seed, step=step.steps, name=name)
        for name, one in step.sampling.random.items()
        if (held := step.latest.inputs[name])
    }
    return {**step.sampling.offsets(seed=step.seed, epoch=step.epoch), **virtual, **random}
