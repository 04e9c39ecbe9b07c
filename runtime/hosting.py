"""What a framework that calls a step as a part of its own asks of it: views of its memory, forward without copies,
statistics after forward, backward in pieces.

    states, gradients = step.state_views(), step.gradient_views()  # the step's memory, once
    ticket = step.run_forward(images, commit_statistics=True);  results = step.output_views()
    for piece in step.pieces(4):
        step.backward_piece(piece, *(output_gradients if piece.index == 0 else ()), ticket=ticket)
        begin_to_average(gradients, piece.parameters)

Views are numpy's on a CPU, `DeviceArray`s (DLPack) on a GPU. Nothing here waits for a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_whole
from bnfuse.runtime.backends.exclusion import Exclusive, alone
from bnfuse.runtime.backends.execution import Block, Runner, Scalars
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.pieces import Piece, cut, meet

TICKETS = itertools.count(1)  # one for all steps: the ticket of another step is of no forward here
ITEM = 4  # bytes of an element: parameters and gradients are float32


@dataclasses.dataclass(frozen=True)
class GradientViews:
    """All gradients in one array, `flat` (float32), so that one copy takes all of them out.

    Those of a parameter are the elements `slices[name]` of it, in the file's layout of shape `shapes[name]`. Between
    them lie up to 15 elements that only align, and are 0. With fp16 they are multiplied by `loss_scale`.
    """

    flat: Any
    slices: dict[str, slice]
    shapes: dict[str, tuple[int, ...]]

    def of(self, flat: Any) -> dict[str, Any]:
        """Cut an array like `flat` (itself, or a copy of it in any framework) up by parameter: views of it."""
        return {name: flat[part].reshape(self.shapes[name]) for name, part in self.slices.items()}


@dataclasses.dataclass
class Under:
    """What is under way between calls: which forward the arena holds, and which piece of backward comes next."""

    ticket: int = 0  # of the last call that wrote to the arena
    next: int = 0  # piece, of `count`; 0 where no backward in pieces is under way
    count: int = 0


@dataclasses.dataclass
class Plans:
    """What was found out of the programs of a step, by batch size."""

    pieces: dict[tuple[int, int], tuple[Piece, ...]] = dataclasses.field(default_factory=dict)  # and by their count
    steady: set[int] = dataclasses.field(default_factory=set)  # whose backward reads no running statistic


class Insides(Protocol):
    """What of a step the methods here work with."""

    _done: p.Phase | None
    _done_by: int
    _under: Under
    _plans: Plans

    @property
    def _train(self) -> Runner: ...

    @property
    def _state_tensors(self) -> Mapping[str, p.Tensor]: ...

    @property
    def _batch(self) -> int: ...

    @property
    def _output_gradients(self) -> dict[str, str]: ...

    def _take(self, inputs: tuple[Any, ...]) -> None: ...

    def _did(self, phase: p.Phase) -> None: ...

    def _moved(self) -> None: ...

    def _scalars(self, phases: tuple[p.Phase, ...]) -> dict[p.Phase, Scalars]: ...


class Hosted(Exclusive):
    """The part of a step that is for a host framework."""

    _done: p.Phase | None

    # -- views -------------------------------------------------------------------------------------------------

    @alone
    def state_views(self: Insides) -> dict[str, Any]:
        """Give parameters and running statistics where the step has them, by name, in the file's layout.

        Whoever writes there changes the step, from the next phase on: between a forward and its backward the gradients
        would be of no network at all. On a GPU write on the step's stream (`step.stream`), or wait for it. They are the
        same for all batch sizes, and stay valid as long as they are held.
        """
        return views(self._train, self._state_tensors)

    @alone
    def output_views(self: Insides) -> dict[str, Any]:
        """Give the outputs of the file where the step has them, by name, of the batch size of the last call.

        The next call of that batch size writes over them.
        """
        return views(self._train, self._train.program.outputs)

    @alone
    def gradient_views(self: Insides) -> GradientViews:
        """Give the gradients where the step has them, of the batch size of the last call.

        The next backward writes over them, unless `gradients_to` says where else to; nothing reads them but `update`.
        """
        program = self._train.program
        held = {name: program.storages[tensor.storage] for name, tensor in program.gradients.items()}
        elements = program.regions.get(p.GRADIENTS, 0) // ITEM
        return GradientViews(
            self._train.view(p.Storage(p.GRADIENTS, 0, elements), (elements,)),
            {name: slice(s.offset // ITEM, s.offset // ITEM + s.elements) for name, s in held.items()},
            {name: tensor.shape for name, tensor in program.gradients.items()},
        )

    @alone
    def another_gradients(self: Insides) -> Block:
        """Make further memory for all gradients, of the batch size of the last call, on a CPU: `gradients_to` it.

        So gradients can be handed out as they lie, and the next backward writes elsewhere. It is freed with the last
        that holds it or a view of it. A step on a GPU refuses: its graph has the addresses in it.
        """
        return self._train.on_host("further memory for gradients").another(p.GRADIENTS)

    @alone
    def gradients_to(self: Insides, place: Block) -> None:
        """Let backward, of the batch size of the last call, write its gradients to `another_gradients()` of it.

        `gradient_views` are then of that place, and `update` reads there. Raises BnfuseError in the middle of a
        backward, and for a place of another batch size.
        """
        if self._under.next:
            raise BnfuseError("gradients cannot be put elsewhere between two pieces of a backward")
        if place.owner is not self._train:
            raise BnfuseError("that memory for gradients is of another batch size: ask for it after forward")
        self._train.on_host("further memory for gradients").use(place)

    # -- running -----------------------------------------------------------------------------------------------

    @alone
    def run_forward(self: Insides, *inputs: Any, commit_statistics: bool = False) -> int:
        """Run the forward phase and copy no result out: they lie in `output_views()`.

        With `commit_statistics` new running statistics take the place of the old ones behind it, as torch has it.
        Returns a ticket: `backward_piece` goes on from this forward, in any thread, as long as `is_current(ticket)`.
        What a graph draws follows from `seed` and `steps`: without `update` calls, count `steps` up by hand.
        """
        self._take(inputs)
        forward = p.Part("forward", commits=commit_statistics)
        if commit_statistics:
            check_statistics(self)
        self._train.run([forward], self._scalars(("forward",)))
        if commit_statistics:
            self._moved()
        self._did("forward")
        return self._under.ticket

    @alone
    def is_current(self: Insides, ticket: int) -> bool:
        """Tell whether the forward that gave this ticket can be gone on from: nothing else ran since."""
        return self._done == "forward" and self._under.ticket == ticket

    @alone
    def is_next(self: Insides, piece: Piece, ticket: int) -> bool:
        """Tell whether it is this piece's turn, in the backward of the forward that gave this ticket."""
        under = self._under
        if under.ticket != ticket:
            return False
        return self._done == "forward" if piece.index == 0 else (under.next, under.count) == (piece.index, piece.count)

    @alone
    def commit_statistics(self: Insides) -> None:
        """Put the running statistics that forward computed into the place of the old ones, without an update.

        After `forward`, before or after its backward, once or more often: it is the same. An `update` does it too.
        """
        if self._done not in ("forward", "backward") and not self._under.next:
            raise BnfuseError("there are no new running statistics: commit_statistics needs a forward before it")
        check_statistics(self)
        self._train.run([p.COMMIT], {})
        self._moved()

    @alone
    def pieces(self: Insides, count: int) -> tuple[Piece, ...]:
        """Cut the backward phase, of the batch size of the last call, into at most `count` pieces to run in order.

        They have about the same bytes of gradients each. There are fewer where gradients become final together.
        """
        check_whole("pieces", count, 1)
        return pieces_of(self, count)

    @alone
    def backward_piece(self: Insides, piece: Piece, *gradients: Any, ticket: int | None = None) -> None:
        """Run one of `pieces(...)`, after `forward` or `run_forward` and in order: its parameters' gradients are final
        when it is done (on a GPU: for what is on the step's stream from now on).

        The first one takes the gradients of the outputs, as `backward` does, of a graph without a loss. Raises
        BnfuseError for a piece out of order, and where another call came in between; with the `ticket` of `run_forward`
        also where that was another forward. Without it all pieces are of the thread that ran the forward.
        """
        names = list(self._output_gradients.values()) if piece.index == 0 else []
        if len(gradients) != len(names):
            raise BnfuseError(
                f"piece {piece.index} of backward takes the gradients of {len(names)} outputs: {len(gradients)} are "
                "given"
            )
        check_turn(self, piece, ticket)
        if piece not in pieces_of(self, piece.asked):
            raise BnfuseError("the piece is of another batch size: ask for pieces() after forward")
        self._train.feed(names, gradients)
        self._done, self._under.next = None, 0  # whatever goes wrong now, the maps of forward are gone
        self._train.run([piece.part], self._scalars(("backward",)))
        self._under.next, self._under.count = piece.index + 1, piece.count
        if piece.index + 1 == piece.count:
            self._under.next = 0
            self._did("backward")


def check_turn(step: Insides, piece: Piece, ticket: int | None) -> None:
    """Refuse a piece whose turn it is not."""
    under = step._under
    if ticket is not None and ticket != under.ticket:
        raise BnfuseError("backward goes on from a forward that another call has overwritten: run that forward again")
    if piece.index == 0:
        if step._done != "forward":
            raise BnfuseError("backward needs a forward before it, with no evaluate in between, and runs once")
    elif (piece.index, piece.count) != (under.next, under.count):
        wanted = f"piece {under.next} of {under.count}" if under.next else "piece 0, after a forward"
        raise BnfuseError(f"piece {piece.index} of {piece.count} is out of order: it is the turn of {wanted}")
    if ticket is None and step._done_by != threading.get_ident():
        raise BnfuseError("the forward before it was another thread's: give its ticket, run_forward(...) returns it")


def pieces_of(step: Insides, count: int) -> tuple[Piece, ...]:
    """Give the pieces of the program of the last call."""
    known, key = step._plans.pieces, (step._batch, count)
    if key not in known:
        known[key] = cut(step._train.program, count)
    return known[key]


def check_statistics(step: Insides) -> None:
    """Refuse to replace running statistics before backward where that reads the old ones."""
    if step._batch in step._plans.steady:
        return
    program = step._train.program
    old = {name: program.storages[program.running[name].storage] for name in program.new_running}
    for launch in program.phase("backward"):
        for read in (program.storages[buffer.storage] for buffer in launch.buffers):
            if name := next((n for n, s in old.items() if meet(read, s)), None):
                raise BnfuseError(
                    f"node '{launch.node}' of backward reads the running statistic '{name}' as it was before forward: "
                    "let update() replace it"
                )
    step._plans.steady.add(step._batch)


def views(runner: Runner, tensors: Mapping[str, p.Tensor]) -> dict[str, Any]:
    """Give tensors of the file where they lie."""
    storages: Sequence[p.Storage] = runner.program.storages
    return {name: runner.view(storages[tensor.storage], tensor.shape) for name, tensor in tensors.items()}
