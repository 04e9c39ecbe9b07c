"""Which tensor a loss that is not finite comes from: the first in the order of the forward pass.

What can be looked at after the forward phase of a step: the images, each layer's parameters, the running statistics
that follow from the batch's (a map with one infinite element has no finite mean), the logits. Where all of these are
finite the gradients are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bnfuse.errors import BnfuseError, DivergedError
from bnfuse.opset.spec import parse
from bnfuse.roles import Roles, roles_of

if TYPE_CHECKING:
    from bnfuse.runtime import Step


def error_of(step: Step, loss: float, images: np.ndarray, *, epoch: int, index: int, lr: float) -> BnfuseError:
    """The error of a loss of nan or inf. The step has run its forward phase, and on a GPU the others too."""
    what = first_not_finite(step, images)
    if what is None and step.target.kind != "cuda":
        step.backward()
        what = first_of(step, {}, gradients=True)
    where = f"the loss is {loss} in step {index} (epoch {epoch}) at a learning rate of {lr:.4g}"
    culprit = f"the first tensor that is not finite is {what}" if what else "all other tensors are finite"
    spoilt = what is not None and what.startswith("the batch of images")
    remedy = "Check the data" if spoilt else "Use a smaller --lr or a --warm-up"
    kind = BnfuseError if spoilt else DivergedError
    return kind(f"{where}: {culprit}. {remedy}.")


def first_not_finite(step: Step, images: np.ndarray) -> str | None:
    if not np.isfinite(images).all():
        return "the batch of images itself"
    trained_on = step.target.kind == "cuda"  # the update has run, so every parameter is spoilt: they say nothing
    return first_of(step, {} if trained_on else step.state_dict())


def first_of(step: Step, state: Mapping[str, np.ndarray], *, gradients: bool = False) -> str | None:
    """By name and node, in the order of the file's forward nodes."""
    model = ir.from_proto(_proto(step.model))
    roles = roles_of(model)
    outputs = step.outputs
    slopes = step.gradients() if gradients else {}
    new_running = {new: old for old, new in roles.running.items()}
    for node in forward_nodes(model, roles):
        for value in node.inputs:
            name = str(value.name) if value is not None else ""
            if _bad(state.get(name)):
                return f"'{name}', a parameter of {described(node)}"
            if _bad(slopes.get(name)):
                return f"the gradient of '{name}', a parameter of {described(node)}"
        for value in node.outputs:
            name = str(value.name)
            if name in new_running and _bad(outputs.get(name)):
                return f"'{new_running[name]}' as the batch leaves it, a running statistic of {described(node)}"
            if name == roles.logits and _bad(outputs.get(name)):
                return f"the logits '{name}', which come from {described(node)}"
    return None


def forward_nodes(model: ir.Model, roles: Roles) -> Iterator[ir.Node]:
    """The nodes that the loss, the logits and the running statistics depend on, in their order."""
    wanted = {roles.loss, roles.logits, *roles.running.values()}
    waiting = [value.producer() for value in model.graph.outputs if value.name in wanted]
    needed: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in needed:
            needed.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    yield from (node for node in model.graph if node in needed)


def described(node: ir.Node) -> str:
    """node 'layer1/conv' (Conv), by the operator that people know."""
    op = parse(node.op_type) if node.domain else None
    kind = op.core if op is not None else node.op_type.replace("BatchNormFinalize", "BatchNorm")
    return f"node '{(node.name or '').removesuffix('/finalize')}' ({kind})"


def _bad(array: np.ndarray | None) -> bool:
    return array is not None and array.dtype.kind == "f" and not bool(np.isfinite(array).all())


def _proto(data: bytes):  # type: ignore[no-untyped-def]
    import onnx

    return onnx.ModelProto.FromString(data)
