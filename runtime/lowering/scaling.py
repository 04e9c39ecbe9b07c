"""At precision fp16 gradients are those of the loss times a factor, so that small ones do not vanish in 16 bits.

    loss_grad (1, an initializer)  ->  loss_scale, a number in memory that the session writes

All gradients are linear in what they begin with, whatever the loss is. The optimiser divides by the factor.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.lowering.state import Lowering
from bnfuse.runtime.lowering.values import Form


def enter_seed(low: Lowering) -> None:
    """Make what the gradients begin with a number that is not known yet. Gradients that come in are scaled already.

    Raises BnfuseError where the graph does not show what they begin with.
    """
    loss = low.signature.loss
    if low.target.precision != "fp16" or not low.signature.gradients or low.signature.output_gradients:
        return
    name = f"{loss}_grad"
    value = low.graph.initializers.get(name)
    if value is None or not is_one(value):
        raise BnfuseError(
            f"precision fp16 scales what the gradients begin with, and there is no initializer '{name}' of 1: build "
            "the graph anew, or use bf16"
        )
    low.seed = low.constant_storage(np.ones(1, np.float32))
    low.forms[value] = Form((), "float32", dense=low.seed)


def is_one(value: ir.Value) -> bool:
    """Tell whether an initializer is the single number 1, of float32."""
    tensor = value.const_value
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size == 1 and tensor.numpy().item() == 1
