"""Backward of a program in pieces: a chain of nodes of autograd, each with the gradients of its own parameters.

    Link(last piece's parameters, inputs)  ->  token  ->  Link(...)  ->  token  ->  Head(first piece's parameters)
                                                                                      ->  the results

Autograd runs the chain from its end: behind each node the gradients of that piece are accumulated, and whoever hooks on
to that (DistributedDataParallel) sends them while the next piece is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from bnfuse.runtime.program.pieces import Piece

from .program import Call, Program


class Chain:
    """What the nodes of one forward share: the pieces, and from when backward begins on what they go on with."""

    def __init__(self, program: Program, call: Call, kept: tuple[str, ...], pieces: Sequence[Piece]) -> None:
        self.program, self.kept, self.pieces = program, kept, pieces
        self.ticket, self.seed, self.count = call.ticket, call.seed, len(call.inputs)
        self.call: Call | None = None
        self.gradients: tuple[torch.Tensor | None, ...] = ()
        self.reached: set[str | int] = set()

    def begin(self, gradients: tuple[torch.Tensor | None, ...], saved: Sequence[torch.Tensor]) -> None:
        """Take the gradients of the results, and what autograd kept."""
        state = dict(zip(self.kept, saved[self.count :], strict=True))
        self.call = Call(self.ticket, self.seed, state, tuple(saved[: self.count]))
        self.gradients, self.reached = gradients, set()
        for found, gradient in zip(self.program.captured.reached, gradients, strict=True):
            self.reached |= found if gradient is not None else set()

    def run(self, index: int) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """Run a piece. Gives the gradients of its parameters, and with the last piece those of the inputs."""
        call, program = self.call, self.program
        assert call is not None, "a piece before the first one"
        with program.lock:
            found = program.backward(call, self.gradients, self.pieces, index)
        self.ticket = call.ticket
        if index + 1 == len(self.pieces):
            self.call, self.gradients = None, ()
        return found

    def names(self, index: int) -> tuple[str | int, ...]:
        """Name the parameters that the node of a piece has the gradients of; the last one has all inputs, by place."""
        trainable = set(self.program.captured.trainable)
        own = tuple(name for name in self.pieces[index].parameters if name in trainable)
        return (*own, *range(self.count)) if index + 1 == len(self.pieces) else own

    def found(self, index: int, needed: Sequence[bool], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor | None]:
        """Run a piece. Gives the gradients that its node gives: None for what nothing asks for, or reaches."""
        parameters, of_inputs = self.run(index)
        gradients: dict[Any, torch.Tensor] = {**parameters, **of_inputs}
        return [
            gradients[name].to(kind) if is_needed and name in self.reached and name in gradients else None
            for name, is_needed, kind in zip(self.names(index), needed, dtypes, strict=True)
        ]


class Head(torch.autograd.Function):
    """The node that gives the results, and the first piece."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: Chain,
        results: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        token: torch.Tensor | None,
        *own: torch.Tensor,
    ) -> Any:
        """Give the results. `saved` are the inputs of the call and the state that it read."""
        ctx.chain, ctx.links, ctx.dtypes = chain, token is not None, [one.dtype for one in own]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Run the first piece."""
        chain, saved = ctx.chain, ctx.saved_tensors
        chain.begin(gradients, saved)
        if not chain.reached:
            return (None,) * (4 + len(ctx.dtypes))
        token = saved[-1].new_empty(0, dtype=torch.float32) if ctx.links else None
        return (None, None, None, token, *chain.found(0, ctx.needs_input_grad[4:], ctx.dtypes))


class Link(torch.autograd.Function):
    """The node of another piece. The last one has the inputs of the call too."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, index: int, token: torch.Tensor | None, *own: torch.Tensor) -> torch.Tensor:
        """Give a token, which stands for what is computed of the parameters of this piece."""
        ctx.chain, ctx.index, ctx.links, ctx.dtypes = chain, index, token is not None, [one.dtype for one in own]
        ctx.set_materialize_grads(False)
        return own[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: torch.Tensor | None) -> Any:
        """Run the piece."""
        if token is None:
            return (None,) * (3 + len(ctx.dtypes))
        found = ctx.chain.found(ctx.index, ctx.needs_input_grad[3:], ctx.dtypes)
        return (None, None, token if ctx.links else None, *found)


def run(program: Program, call: Call, kept: tuple[str, ...], count: int) -> Any:
    """Run forward, with a backward in at most `count` pieces."""
    with torch.no_grad():
        results = program.run(call, count)
    assert call.program is not None
    pieces, chain = call.pieces, Chain(call.program, call, kept, call.pieces)

    def own(index: int) -> list[torch.Tensor]:
        return [call.state[name] if isinstance(name, str) else call.inputs[name] for name in chain.names(index)]

    token = None
    for piece in reversed(pieces[1:]):
        token = Link.apply(chain, piece.index, token, *own(piece.index))
    saved = [*call.inputs, *(call.state[name] for name in kept)]
    return Head.apply(chain, results, saved, token, *own(0))
