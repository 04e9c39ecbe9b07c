"""A captured module, compiled, and the module's tensors in its memory.

Parameters and running statistics of the module become views of the step's memory (`Home`): an optimiser's update is
then seen without a copy. What somebody put elsewhere since is copied in before a forward.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime import Step, add_batch, compile_step
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.pieces import Piece

from .capture import Captured
from .gradients import UNSHARED, Copied, Gradients, Lent, as_torch, uses

log = logging.getLogger("bnfuse")

LIES: tuple[Callable[[torch.Tensor], Any], ...] = (  # where and how a tensor lies
    torch.Tensor.data_ptr,
    operator.attrgetter("shape"),
    torch.Tensor.stride,
)


@dataclasses.dataclass(frozen=True)
class Compiling:
    """How steps are compiled: as in `bnfuse.compile`."""

    target: str
    precision: str | None = None
    threads: int | None = None
    cache: bool | str | Path = True


@dataclasses.dataclass
class Call:
    """One forward: what backward needs to run it again, in which program it ran, and the pieces of its backward."""

    ticket: int
    seed: int
    state: Mapping[str, torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    program: Program | None = None
    pieces: tuple[Piece, ...] = ()


class Program:
    """The step of a captured module, for one or several batch sizes. One thread at a time is in it.

    Its memory is that of the tensors that live there. What is called with others, as a copy of the module or
    `functional_call` does, runs in a `guest`: the same code with memory of its own.
    """

    def __init__(self, captured: Captured, compiling: Compiling, code: Step | None = None) -> None:
        self.captured, self.compiling = captured, compiling
        self.lock = threading.RLock()
        self.guest: Program | None = None
        self.step = (
            code.twin()
            if code is not None
            else compile_step(
                captured.rewritten,
                target=compiling.target,
                precision=compiling.precision,
                threads=compiling.threads,
                cache=compiling.cache,
                evaluates=False,  # a module in evaluation mode is another graph
            )
        )
        if self.step.target.precision == "fp16":
            self.step.loss_scale = 1.0  # what gradients come in with is the caller's
        self.on_gpu = compiling.target.startswith("cuda")
        self.home = {name: as_torch(view) for name, view in self.step.state_views().items()}
        self.address = {name: home.data_ptr() for name, home in self.home.items()}
        self._own = tuple(name for name in captured.state if name in self.home)
        own = [self.home[name] for name in self._own]
        self._at_home = [list(map(get, own)) for get in LIES]
        program = self.step.program
        self.draws = bool(self.step.sampling.random) or any(
            isinstance(argument, p.Scalar) and argument.name == "seed"
            for launch in program.launches
            for argument in launch.arguments
        )
        self._outputs: dict[int, dict[str, torch.Tensor]] = {}  # by batch size
        self._gradients: dict[int, Gradients] = {}  # by batch size
        self._place = [place for place, name in enumerate(captured.inputs) if name is not None]

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that it is compiled for."""
        return self.step.batches

    def add(self, batch: int) -> None:
        """Compile it for another batch size. Raises BnfuseError where its graph cannot follow."""
        with self.lock:
            add_batch(self.step, batch, cache=self.compiling.cache)

    # -- state ---------------------------------------------------------------------------------------------------

    def elsewhere(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Name the tensors that do not lie in the step's memory, or lie there otherwise: turned, or a part of it."""
        if self.is_home(state):
            return []
        places, homes = self.address, self.home
        late = [
            name
            for name, one in state.items()
            if name in places
            and (one.data_ptr() != places[name] or not one.is_contiguous() or one.shape != homes[name].shape)
        ]
        if any(self.home[name].data_ptr() != places[name] for name in late):
            self.return_home()
        return late

    def is_home(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Tell whether all tensors of a call are as they lie in the step's memory. It is asked in each call."""
        try:
            own = [state[name] for name in self._own]
        except KeyError:  # of a call that is run again, which moves no statistics
            return False
        return all(list(map(get, own)) == found for get, found in zip(LIES, self._at_home, strict=True))

    def return_home(self) -> None:
        """Make the views of the step's memory anew that are elsewhere: what moves a tensor of the module into memory
        of several processes (share_memory, a queue) moves all that are views of the same."""
        for name, view in self.step.state_views().items():
            if self.home[name].data_ptr() != self.address[name]:
                self.home[name] = as_torch(view)

    def place_for(self, state: Mapping[str, torch.Tensor]) -> Program:
        """Give the program whose memory the tensors may enter: this one, unless others live where they would go."""
        with self.lock:
            return self if self.may_enter(self.elsewhere(state)) else self.beside().place_for(state)

    def may_enter(self, late: Sequence[str]) -> bool:
        """Tell whether nobody lives where these tensors would go."""
        return all(uses(self.home[name]) == UNSHARED for name in late)

    def beside(self) -> Program:
        """Give the guest."""
        if self.guest is None:
            self.guest = Program(self.captured, self.compiling, self.step)
        self.guest.step.add_from(self.step)
        return self.guest

    def enter(self, state: Mapping[str, torch.Tensor], late: Sequence[str], *, adopts: bool) -> list[str]:
        """Bring the module's tensors into the step's memory, of which these are `elsewhere`. Gives the names of those
        that stay there."""
        if not late:
            return []
        targets, sources = [], []
        for name in late:
            tensor, home = state[name], self.home[name]
            if tensor.shape != home.shape or tensor.dtype != home.dtype:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise BnfuseError(
                    f"'{name}' is {kind} {list(tensor.shape)} now, it was float32 {list(home.shape)} when it was "
                    "captured: call bnfuse.torch.fuse again"
                )
            targets.append(home)
            sources.append(tensor.detach())
        torch._foreach_copy_(targets, sources)
        del sources  # they count as users of the memory
        return [name for name in late if not (adopts and self.adopt(name, state[name]))]

    def adopt(self, name: str, tensor: torch.Tensor) -> bool:
        """Let a tensor of the module be a view of the step's memory, if its own is nobody else's: another tensor's, or
        another step's. Says whether it is one now."""
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_leaf and tensor.is_contiguous()
        if not plain or uses(tensor) != UNSHARED or name in self.captured.cumulative or not tensor.numel():
            return False
        if not tensor.is_cuda and tensor.is_shared():  # other processes see it there
            return False
        with torch.inference_mode(False):
            tensor.data = self.home[name]
        return True

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, call: Call, pieces: int = 1) -> list[torch.Tensor]:
        """Run a forward, in this program or in that whose memory its tensors may enter, and give copies of the results.

        The call then says which, and the pieces that its backward is cut into.
        """
        with self.lock:
            late = self.elsewhere(call.state)
            if not self.may_enter(late):
                return self.beside().run(call, pieces)
            results = self.forward(call, late)
            call.program, call.pieces = self, self.step.pieces(pieces) if pieces > 1 else ()
            return results

    def forward(self, call: Call, late: Sequence[str], *, again: bool = False) -> list[torch.Tensor]:
        """Run the forward phase, from the module's tensors as they are, and give copies of the results.

        `late` names the tensors that are `elsewhere`.

        Running statistics and counts are moved as torch moves them, unless it is `again`.
        """
        captured = self.captured
        if self.on_gpu:
            self.use_stream()
        away = self.enter(call.state, late, adopts=not again)
        if self.draws:
            self.step.seed = call.seed
        moves = bool(captured.running) and not again
        call.ticket = self.step.run_forward(*self.fed(call.inputs), commit_statistics=moves)
        if moves:
            self.move_statistics(call.state, away)
        views = self._views()
        return [] if again else [views[name].clone() for name in captured.results]

    def fed(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Give the inputs that the graph reads, as the step takes them."""
        found = [inputs[place].detach().float().contiguous() for place in self._place]
        return found if self.on_gpu else [one.numpy() for one in found]

    def move_statistics(self, state: Mapping[str, torch.Tensor], away: Sequence[str]) -> None:
        """Bring new running statistics where the module has its own, and count the batches."""
        captured = self.captured
        with torch.no_grad():
            counts = [state[name] for name in captured.counts]
            if counts:
                torch._foreach_add_(counts, list(captured.counts.values()))  # type: ignore[call-overload]
            own = [name for name in captured.running if name in set(away) and name not in captured.cumulative]
            if own:
                torch._foreach_copy_([state[name] for name in own], [self.home[name] for name in own])
            for name in captured.cumulative & {*captured.running}:
                batches = state[f"{name.rpartition('.')[0]}.num_batches_tracked".lstrip(".")]
                state[name].lerp_(self.home[name], 1.0 / float(batches))
        moved = [state[name] for name in captured.running if name not in captured.cumulative]
        torch.autograd.graph.increment_version(moved)

    def backward(
        self,
        call: Call,
        gradients: Sequence[torch.Tensor | None],
        pieces: Sequence[Piece] = (),
        index: int = 0,
    ) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """Run the backward phase of a forward, which is run again where its maps are gone; of `pieces` the one of that
        index alone. Gives the gradients of its parameters by name, and with the last one those of inputs by place:
        nothing that runs later writes to them."""
        captured, step = self.captured, self.step
        again = not (step.is_next(pieces[index], call.ticket) if pieces else step.is_current(call.ticket))
        if again:
            place = self.place_for(call.state)
            if place is not self:
                with place.lock:
                    return place.backward(call, gradients, pieces, index)
            self.forward(call, self.elsewhere(call.state), again=True)
        pieces = pieces or step.pieces(1)
        if self.on_gpu:
            self.use_stream()
        views, held = self._views(), self._gradients_now()
        if held is not None and (again or not index):
            held.begin()
        given = [
            torch.zeros_like(views[name]) if one is None else one.detach().float().contiguous()
            for name, one in zip(captured.results, gradients, strict=True)
        ]
        for piece in pieces[0 if again else index : index + 1]:
            first = [] if piece.index else given if self.on_gpu else [one.numpy() for one in given]
            step.backward_piece(piece, *first, ticket=call.ticket)
        parameters: dict[str, torch.Tensor] = {}
        if held is not None:
            parameters = held.some(pieces[index].parameters) if len(pieces) > 1 else held.all()
        if index + 1 < len(pieces):
            return parameters, {}
        return parameters, {place: views[name].clone() for place, name in captured.input_gradients.items()}

    def _gradients_now(self) -> Gradients | None:
        """Give the gradients, for the batch size of the last call; None where nothing trains."""
        batch = self.step.batch
        if self.captured.trainable and batch not in self._gradients:
            self._gradients[batch] = Copied(self.step) if self.on_gpu else Lent(self.step)
        return self._gradients.get(batch)

    def _views(self) -> dict[str, torch.Tensor]:
        """Give the outputs of the file where they lie, for the batch size of the last call."""
        batch = self.step.batch
        if batch not in self._outputs:
            wanted = (*self.captured.results, *self.captured.input_gradients.values())
            views = self.step.output_views()
            self._outputs[batch] = {name: as_torch(views[name]) for name in wanted}
        return self._outputs[batch]

    def use_stream(self) -> None:
        """Run on the caller's current stream."""
        current = torch.cuda.current_stream()
        if self.step.stream != current.cuda_stream:
            self.step.stream = current
