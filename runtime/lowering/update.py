"""The update phase: one launch over the flat buffers of all trainable parameters, their gradients and moments."""

from __future__ import annotations

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import some
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.optim import BLOCK
from bnfuse.runtime.lowering.scaling import loss_scale
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import SGD, Optimizer, decays, unused_globs


def update_phase(low: Lowering, optimizer: Optimizer) -> None:
    """Add the optimiser's launch and its moments. Every trainable parameter must have a gradient."""
    names = low.signature.trainable
    outputs = {value.name for value in low.graph.outputs}
    missing = [name for name in names if low.signature.gradients.get(name) not in outputs]
    if missing or not names:
        what = f"parameter '{missing[0]}' has no gradient among the outputs" if missing else "nothing is trainable"
        raise BnfuseError(f"{what}: build the training graph anew, or compile it without an optimizer")
    if unused := unused_globs(optimizer, names):
        raise BnfuseError(f"no_decay: no parameter is named like '{unused[0]}' (there are {some(names)})")
    inputs = {value.name: value for value in low.graph.inputs}
    own = {name: low.storages[low.dense(inputs[name])] for name in names}
    elements = max(s.offset + p.aligned(s.bytes) for s in own.values()) // np.dtype(np.float32).itemsize
    low.regions[p.GRADIENTS] = low.regions[p.PARAMETERS]
    refs: dict[str, Ref] = {
        "parameters": low.storage(elements, region=p.PARAMETERS, offset=0),
        "gradients": low.storage(elements, region=p.GRADIENTS, offset=0),
        "decay": low.constant_storage(decay_by_block(optimizer, own, elements)),
        **{moment: low.storage(elements, region=p.OPTIMIZER) for moment in optimizer.moments},
    }
    if low.target.precision == "fp16":
        low.finite = low.storage(1, "int32", p.OUTPUTS)
        refs["finite"] = low.finite
    if isinstance(optimizer, SGD):
        arguments = (elements, optimizer.momentum, optimizer.nesterov, low.target)
        low.launch(registry.SGD, arguments, refs, [p.Scalar("lr"), *loss_scale(low)])
    else:
        adam = (elements, optimizer.betas, optimizer.epsilon, low.target)
        low.launch(registry.ADAMW, adam, refs, [p.Scalar("lr"), p.Scalar("step"), *loss_scale(low)])


def decay_by_block(optimizer: Optimizer, own: dict[str, p.Storage], elements: int) -> np.ndarray:
    """Give the weight decay of each block of parameters."""
    decay = np.zeros(elements // BLOCK, np.float32)
    for name, storage in own.items():
        if decays(optimizer, name):
            first = storage.offset // (BLOCK * 4)
            decay[first : first + p.aligned(storage.bytes) // (BLOCK * 4)] = optimizer.weight_decay
    return decay
