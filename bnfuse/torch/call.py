"""Forward and backward of a program as one node of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .program import Call, Program


class Fused(torch.autograd.Function):
    """The node. `tensors` are the inputs of the call, then the parameters that train.

    All that the results depend on is kept by `save_for_backward`, so that autograd says in its own words where
    something of it was changed in place, or freed, before backward: also where the maps of the forward are still there.
    """

    @staticmethod
    def forward(ctx: Any, program: Program, call: Call, kept: tuple[str, ...], *tensors: torch.Tensor) -> Any:
        """Run the forward phase."""
        results = program.run(call)
        ctx.program, ctx.call, ctx.count = call.program, call, len(call.inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.inputs, *(call.state[name] for name in kept))
        ctx.kept = kept
        call.inputs, call.state = (), {}
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Run the backward phase."""
        program, saved = ctx.program, ctx.saved_tensors
        inputs, state = saved[: ctx.count], saved[ctx.count :]
        captured = program.captured
        reached: set[str | int] = set()
        for found, gradient in zip(captured.reached, gradients, strict=True):
            reached |= found if gradient is not None else set()
        if not reached:
            return (None, None, None, *(None for _ in inputs), *(None for _ in captured.trainable))
        call = Call(ctx.call.ticket, ctx.call.seed, dict(zip(ctx.kept, state, strict=True)), inputs)
        with program.lock:
            parameters, of_inputs = program.backward(call, gradients)
        wanted = ctx.needs_input_grad[3:]
        found = [*(of_inputs.get(place) for place in range(len(inputs)))]
        found = [None if one is None else one.to(like.dtype) for one, like in zip(found, inputs, strict=True)]
        names: list[str | int] = [*range(len(inputs)), *captured.trainable]
        results = [*found, *(parameters[name] for name in captured.trainable)]
        return (
            None,
            None,
            None,
            *(
                one if is_wanted and name in reached else None
                for one, is_wanted, name in zip(results, wanted, names, strict=True)
            ),
        )
