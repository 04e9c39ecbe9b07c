"""Which tensor a loss that is not finite comes from: the first in the order of the forward pass.

On a CPU the parameters are still those before the step, so its forward pass can be looked at tensor by tensor
(replay.py). On a GPU the update has run; then the running statistics tell that follow from the batch's (a map with one
infinite element has no finite mean), and the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import onnx_ir as ir

from bnfuse.analysis.ancestors import forward_nodes
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.graph.batches import with_batch
from bnfuse.graph.initial_values import with_values
from bnfuse.graph.signature import GraphSignature
from bnfuse.opset.spec import parse
from bnfuse.runtime.targets.target import CpuTarget

if TYPE_CHECKING:
    from bnfuse.runtime import Step

TOO_FAST = "Use a smaller --lr or a --warm-up"
ELSEWHERE = "that of this rank's images is finite"
Arrays = Mapping[str, np.ndarray]


def complain(
    step: Step, loss: float, images: np.ndarray, *labels: np.ndarray, epoch: int, index: int, lr: float
) -> NoReturn:
    """Raise the error of a loss of nan or inf, which is a mean over the ranks: of which one it comes its own tells."""
    if step.world is not None and np.isfinite(step.outputs[step.program.signature["loss"]]).all():
        raise DivergedError(f"the loss is {loss} in step {index} (epoch {epoch}), and {ELSEWHERE}. {TOO_FAST}.")
    raise error_of(step, loss, images, *labels, epoch=epoch, index=index, lr=lr)


def error_of(
    step: Step, loss: float, images: np.ndarray, *labels: np.ndarray, epoch: int, index: int, lr: float
) -> BnfuseError:
    """Make the error of a loss of nan or inf. The step has run its forward phase, and on a GPU the others too."""
    what = first_not_finite(step, images, *labels)
    where = f"the loss is {loss} in step {index} (epoch {epoch}) at a learning rate of {lr:.4g}"
    culprit = f"the first tensor that is not finite is {what}" if what else "all other tensors are finite"
    spoilt = what is not None and what.startswith("the batch of images")
    remedy = "Check the data" if spoilt else TOO_FAST
    kind = BnfuseError if spoilt else DivergedError  # a search counts trainings that diverge
    return kind(f"{where}: {culprit}. {remedy}.")


def require_finite_state(step: Step, *, where: str, lr: float) -> None:
    """Raise DivergedError where the last update has left a parameter, a running statistic or a moment that is not
    finite: no later loss tells of it. For the ends of epochs and what is saved, not for each step."""
    name = step.not_finite()
    if name is not None:
        raise DivergedError(f"'{name}' is not finite after {where} at a learning rate of {lr:.4g}. {TOO_FAST}.")


def require_finite_gradients(step: Step, *, epoch: int, index: int, lr: float) -> None:
    """Raise DivergedError where the norm that the last update was clipped by is none: that update has spoilt all
    parameters. It names the gradient that the backward phase came to first. At fp16 such updates are skipped."""
    if step.program.norm is None or step.pending or step.target.precision == "fp16":
        return
    norm = step.gradient_norm
    if np.isfinite(norm):
        return
    gradients = step.gradients()
    trained = reversed(step.program.signature["trainable"])
    found = next((name for name in trained if is_bad(gradients.get(name))), None)
    culprit = f"the gradient of '{found}' is not finite" if found else "a gradient of a batch before it is not finite"
    where = f"the norm of the gradients is {norm} in step {index} (epoch {epoch}) at a learning rate of {lr:.4g}"
    raise DivergedError(f"{where}: {culprit}. {TOO_FAST}.")


def error_of_evaluation(images: np.ndarray) -> BnfuseError:
    """Make the error of logits that are not finite, of a state that is."""
    if not np.isfinite(images).all():
        return BnfuseError("the held-out images hold values that are not finite. Check the data.")
    return DivergedError(f"the network gives numbers that are not finite for held-out images. {TOO_FAST}.")


def first_not_finite(step: Step, images: np.ndarray, *labels: np.ndarray) -> str | None:
    """Find what first is not finite in the forward phase of a step, as a message names it; None where it cannot be
    told."""
    if not np.isfinite(images).all():
        return "the batch of images itself"
    graph = with_values(step.model, step.state_dict())
    model, signature = graph.model, graph.signature
    if len(images) != step.batches[0]:
        model = with_batch(graph, len(images)).model
    needed = forward_nodes(model.graph, signature)
    forward = [node for node in model.graph if node in needed]
    state: Arrays = {}
    bad: Set[str] = set()
    if isinstance(step.target, CpuTarget):
        from bnfuse.training.replay import not_finite  # onnxruntime: a step needs it for this alone

        state = step.state_dict()
        given = dict(zip((*signature.data, *signature.labels), (images, *labels), strict=False))
        try:
            bad = not_finite(step, model, {str(node.name) for node in forward}, given, step.target.threads)
        except (BnfuseError, ImportError):  # what onnxruntime cannot run is told by what the step itself has left
            bad = set()
    return first_of(forward, state, bad, signature) or first_of(forward, state, bad_outputs(step), signature)


def bad_outputs(step: Step) -> set[str]:
    """List the outputs of the file that are not finite after the forward phase."""
    gradients = set(step.program.signature["gradients"].values())
    return {name for name, value in step.outputs.items() if name not in gradients and is_bad(value)}


def first_of(forward: list[ir.Node], state: Arrays, bad: Set[str], signature: GraphSignature) -> str | None:
    """Find by name and node: a parameter, or a tensor among `bad`."""
    new_running = {new: old for old, new in signature.running.items()}
    for node in forward:
        for value in node.inputs:
            if value is not None and is_bad(state.get(str(value.name))):
                return f"'{value.name}', a parameter of {described(node)}"
        for value in node.outputs:
            name = str(value.name)
            if name in bad and name in new_running:
                return f"'{new_running[name]}' as the batch leaves it, a running statistic of {described(node)}"
            if name in bad:
                return f"'{name}', which {described(node)} gives"
    return None


def described(node: ir.Node) -> str:
    """Write node 'layer1/conv' (Conv), by the operator that people know."""
    op = parse(node.op_type) if node.domain else None
    kind = op.core if op is not None else node.op_type.replace("BatchNormFinalize", "BatchNorm")
    return f"node '{(node.name or '').removesuffix('/finalize')}' ({kind})"


def is_bad(array: np.ndarray | None) -> bool:
    """Tell whether an array of floats has a value that is not finite."""
    return array is not None and array.dtype.kind == "f" and not bool(np.isfinite(array).all())
