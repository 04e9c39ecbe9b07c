"""Whether two training graphs compute the same: loss, gradients and running statistics from the same inputs and state.

`before` always runs in onnxruntime. `after` runs in onnxruntime too, or compiled in our own runtime.

A tensor's error is ||after - before|| / ||before||. What is tolerated is measured, not guessed: `before` runs again
with its inputs and parameters disturbed by one rounding (relative 2**-24, random signs). A result that moves by so
much under rounding noise cannot be told apart more finely, so the tolerance is eight times that spread, and never
less than 1e-5. Of a step that computes in fewer bits one rounding is that of its precision. Now and then noise opens a
ReLU; where three draws of it say no, up to 16 are made, and then up to two more seeds asked, before no is the answer.
Norms below a millionth of the largest of their kind count as that much, so that a gradient which is zero but for
rounding (a bias in front of a BatchNorm) is not held to its own noise. A tolerance of 0.1 or more (in fewer bits than
float32, of 1) judges nothing: then the answer is that it cannot be judged, which is no yes. What operators draw at
random is drawn once and fed to both, anew for each step (drawing.py). docs/numerics.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.core.text import Section, join
from bnfuse.graph.drawing import drawer, separated
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import TrainingGraph, dropouts, without_dropout
from bnfuse.graph.values import declared_shape
from bnfuse.ort.oracle import Arrays, OrtGraph

MINIMUM = 1e-5
FACTOR = 8.0
ROUNDING = 2.0**-24
ROUNDINGS = {"fp32": ROUNDING, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}  # by precision
LEAST_ROUNDINGS = 2.0  # that are tolerated however small the spread is: results were computed from rounded values
FLOOR = 1e-6  # of the largest norm of the same kind
BLIND, BLIND_IN_FEWER_BITS = 0.1, 1.0  # tolerances from which on nothing is judged: much of what is wrong would pass
DRAWS = 3  # of rounding noise
MOST_DRAWS = 16  # where three say no
SEEDS = 3  # that must all say no
RUNTIMES = ("ort", "tvm")


@dataclasses.dataclass(frozen=True)
class TensorError:
    """One compared tensor. `kind` is loss, gradient or running."""

    tensor: str
    kind: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # also False for a NaN


@dataclasses.dataclass(frozen=True)
class Curves:
    """The loss of each training step in both graphs, and how far they may part by the same rule."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    tolerances: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(abs(a - b) / max(abs(b), 1e-30) for b, a in zip(self.before, self.after, strict=True))

    @property
    def ok(self) -> bool:
        return all(error <= tolerance for error, tolerance in zip(self.errors, self.tolerances, strict=True))


@dataclasses.dataclass(frozen=True)
class Verification:
    runtime: str
    seed: int
    loss_before: float
    loss_after: float
    tensors: tuple[TensorError, ...]
    curves: Curves | None = None
    notes: tuple[str, ...] = ()
    precision: str = "fp32"

    @property
    def equal(self) -> bool:
        return self.judged and not is_wrong(self)

    @property
    def judged(self) -> bool:
        return not self.unjudged

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Tensors, and steps of the training, that rounding noise moves too far for a verdict."""
        limit = BLIND if ROUNDINGS[self.precision] <= ROUNDING else BLIND_IN_FEWER_BITS
        steps = enumerate(self.curves.tolerances if self.curves else (), 1)
        return (
            *(tensor.tensor for tensor in self.tensors if tensor.tolerance >= limit),
            *(f"the loss of step {step}" for step, tolerance in steps if tolerance >= limit),
        )

    @property
    def verdict(self) -> str:
        if is_wrong(self):
            return "NOT equal"
        if self.judged:
            return "Equal"
        return f"cannot be judged: {unjudged_text(self.unjudged, len(self.tensors))}"

    @property
    def worst(self) -> TensorError:
        """The tensor that comes closest to its tolerance or exceeds it by most."""
        return max(self.tensors, key=lambda t: t.error / t.tolerance if np.isfinite(t.error) else np.inf)

    @property
    def loss_error(self) -> float:
        return self.tensors[0].error

    def __bool__(self) -> bool:
        return self.equal

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        found: dict[str, Any] = {
            "equal": self.equal,
            "judged": self.judged,
            "unjudged": list(self.unjudged),
            "runtime": self.runtime,
            "precision": self.precision,
            "seed": self.seed,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "loss_error": self.loss_error,
            "worst": {"tensor": worst.tensor, "error": worst.error, "tolerance": worst.tolerance},
            "tensors": [dataclasses.asdict(tensor) for tensor in self.tensors],
            "notes": list(self.notes),
        }
        if self.curves:
            found["curves"] = dataclasses.asdict(self.curves)
        return found

    def sections(self) -> list[Section]:
        kinds = [(kind, [t for t in self.tensors if t.kind == kind]) for kind in ("loss", "gradient", "running")]
        rows = []
        for kind, tensors in kinds:
            if tensors:
                worst = max(tensors, key=lambda t: t.error / t.tolerance)
                bad = sum(not t.ok for t in tensors)
                rows.append((kind, len(tensors), bad, f"{worst.error:.1e}", f"{worst.tolerance:.1e}", worst.tensor))
        how = self.runtime if self.precision == "fp32" else f"{self.runtime}, {self.precision}"
        title = f"{self.verdict}: loss {self.loss_before:.7g} and {self.loss_after:.7g} ({how})"
        columns = ("compared", "tensors", "wrong", "worst error", "tolerance", "tensor")
        parts = [Section.table(title, columns, rows)]
        if self.curves:
            parts.append(self.curve_section(self.curves))
        if self.notes:
            parts.append(Section.lines("Notes", self.notes))
        return parts

    def curve_section(self, curves: Curves) -> Section:
        rows = [
            (i + 1, f"{b:.6f}", f"{a:.6f}", f"{error:.1e}", f"{tolerance:.1e}")
            for i, (b, a, error, tolerance) in enumerate(
                zip(curves.before, curves.after, curves.errors, curves.tolerances, strict=True)
            )
        ]
        return Section.table("Training on one batch", ("step", "loss before", "loss after", "error", "tolerance"), rows)

    def __str__(self) -> str:
        return join(self.sections())


class Runner(Protocol):
    """A graph that can be evaluated at a state and trained from it."""

    def evaluate(self, feeds: Arrays, state: Arrays) -> Arrays:
        """Loss, gradients and new running statistics, by the output names of `before`."""

    def train(self, feeds: Arrays, state: Arrays, lr: float, steps: int) -> list[float]:
        """The losses of `steps` steps of SGD on one batch."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Threads of the CPU, for what the compiled step is made, and the seed of what random operators give.

    It stays the same where more seeds are asked: a mask is never wrong by luck, so it must not become right by it.
    """

    threads: int | None = None
    target: str = "cpu"
    precision: str | None = None
    seed: int = 0

    @property
    def rounding(self) -> float:
        """How much one rounding of the step's precision moves a value, at most."""
        return ROUNDINGS[self.precision or "fp32"]


def verify_graphs(
    before: TrainingGraph,
    after: TrainingGraph,
    *,
    runtime: str = "ort",
    steps: int = 0,
    seed: int = 0,
    lr: float = 0.01,
    threads: int | None = None,
    target: str = "cpu",
    precision: str | None = None,
    progress: Progress = quiet,
) -> Verification:
    """Compares at the initial state of `before`, on random images and labels.

    A ReLU whose input is zero but for rounding is open in one graph and closed in the other, and then gradients part by
    more than any tolerance. That is luck, of one image in many; a mistake is wrong on every image. So where one seed
    says no, up to two more are asked, and the answer is no only where all of them say so.
    """
    if runtime not in RUNTIMES:
        raise BnfuseError(f"runtime '{runtime}' is unknown: it is {' or '.join(RUNTIMES)}")
    if runtime == "ort" and (target, precision) != ("cpu", None):
        raise BnfuseError(f"onnxruntime takes no target or precision ({target}, {precision}): say --runtime tvm")
    if precision not in (None, *ROUNDINGS):
        raise BnfuseError(f"precision '{precision}' is unknown: it is one of {', '.join(ROUNDINGS)}")
    check_same_interface(before, after)
    where = Where(threads, target, precision, seed)
    refused: list[Verification] = []
    for attempt in range(SEEDS):
        found = verify_once(before, after, runtime, steps, seed + attempt, lr, where, progress)
        if found.equal:
            return dataclasses.replace(found, notes=(*found.notes, *(refusal_note(no) for no in refused)))
        refused.append(found)
        if attempt + 1 < SEEDS:
            what = "not equal" if is_wrong(found) else "not to be judged"
            progress(f"{what} on the images of seed {seed + attempt}: asking seed {seed + attempt + 1}")
    return next(filter(is_wrong, refused), refused[0])


def is_wrong(found: Verification) -> bool:
    """Whether something is beyond its tolerance, and not only beyond judgement."""
    return not verdict(found.tensors, found.curves)


def refusal_note(no: Verification) -> str:
    if not is_wrong(no):
        return f"seed {no.seed} could not be judged ({unjudged_text(no.unjudged, len(no.tensors))})"
    worst = no.worst
    return (
        f"seed {no.seed} said no ({worst.tensor}: {worst.error:.1e} of {worst.tolerance:.1e}), as a ReLU at zero can: "
        "a mistake shows on every seed"
    )


def verify_once(
    before: TrainingGraph,
    after: TrainingGraph,
    runtime: str,
    steps: int,
    seed: int,
    lr: float,
    where: Where,
    progress: Progress,
) -> Verification:
    """The verdict on the images and labels of one seed."""
    rng = np.random.default_rng(seed)
    feeds, state = draw_feeds(before, rng), before.state()

    progress(f"running {before.name} in onnxruntime")
    reference = Reference(before, where, feeds, state, lr, steps, rng)
    reference.draw(DRAWS)
    reference.close()

    progress(f"running {after.name} in {'onnxruntime' if runtime == 'ort' else 'the compiled step'}")
    bar = bar_of(progress)
    second = OrtRunner(after, where.threads, where.seed) if runtime == "ort" else CompiledRunner(after, where, bar)
    result, losses = second.evaluate(feeds, state), second.train(feeds, state, lr, steps)
    del second

    tensors, curves = reference.judge(result, losses)
    if not verdict(tensors, curves):
        progress("not equal by three draws of rounding noise: drawing more")
    while not verdict(tensors, curves) and len(reference.spreads) < MOST_DRAWS:
        reference.draw(1)
        tensors, curves = reference.judge(result, losses)
    notes = dropout_notes(before, after)
    expected, found = (float(values[before.signature.loss]) for values in (reference.values, result))
    return Verification(runtime, seed, expected, found, tensors, curves, notes, where.precision or "fp32")


def dropout_notes(before: TrainingGraph, after: TrainingGraph) -> tuple[str, ...]:
    dropped = sorted({*dropouts(before.model), *dropouts(after.model)})
    return (f"dropout ratio set to 0 in both graphs ({', '.join(dropped)})",) if dropped else ()


def unjudged_text(names: Sequence[str], tensors: int) -> str:
    which = names[0] + (", ..." if len(names) > 1 else "")
    return (
        f"{len(names)} of {tensors} tensors ({which}) are moved too far by rounding noise alone: verify with a larger "
        "--batch or --image, fewer layers, fewer --steps, or in more bits"
    )


def verdict(tensors: Sequence[TensorError], curves: Curves | None) -> bool:
    return all(tensor.ok for tensor in tensors) and (curves is None or curves.ok)


class Reference:
    """What `before` computes, and how far rounding noise moves it: the more draws, the better its tail is known."""

    def __init__(
        self,
        graph: TrainingGraph,
        where: Where,
        feeds: Arrays,
        state: Arrays,
        lr: float,
        steps: int,
        rng: np.random.Generator,
    ) -> None:
        self.graph, self.where, self.rounding, self.rng = graph, where, where.rounding, rng
        self.feeds, self.state, self.lr, self.steps = feeds, state, lr, steps
        self.runner: OrtRunner | None = OrtRunner(graph, where.threads, where.seed)
        self.values = self.runner.evaluate(feeds, state)
        self.losses = self.runner.train(feeds, state, lr, steps, self.values)
        self.spreads: list[Arrays] = []
        self.noisy_losses: list[list[float]] = []

    def draw(self, count: int) -> None:
        """Run with `count` more draws of noise."""
        self.runner = self.runner or OrtRunner(self.graph, self.where.threads, self.where.seed)
        for _ in range(count):
            feeds, state = disturbed(self.feeds, self.state, self.graph.signature, self.rng, self.rounding)
            self.spreads.append(self.runner.evaluate(feeds, state))
            losses = self.runner.train(feeds, state, self.lr, self.steps, self.spreads[-1])
            self.noisy_losses.append(losses)

    def close(self) -> None:
        """Give its memory back before the other graph runs."""
        self.runner = None

    def judge(self, result: Arrays, losses: list[float]) -> tuple[tuple[TensorError, ...], Curves | None]:
        tensors = tuple(compare(self.values, result, self.spreads, self.graph.signature, self.rounding))
        if not self.steps:
            return tensors, None
        tolerances = curve_tolerances(self.losses, self.noisy_losses, self.rounding)
        return tensors, Curves(tuple(self.losses), tuple(losses), tolerances)


def check_same_interface(before: TrainingGraph, after: TrainingGraph) -> None:
    """Both must have the same inputs by name and shape, and `after` the outputs of `before`."""
    ours = {value.name: declared_shape(value) for value in before.model.graph.inputs}
    theirs = {value.name: declared_shape(value) for value in after.model.graph.inputs}
    for name in ours:
        if name not in theirs:
            raise missing_input(after, before, name)
        if ours[name] != theirs[name]:
            raise BnfuseError(
                f"{after.name}: input '{name}' is {theirs[name]}, in {before.name} {ours[name]}: it is another network"
            )
    for name in theirs:
        if name not in ours:
            raise missing_input(before, after, name)
    outputs = set(compared(after.signature))
    for name in compared(before.signature):
        if name not in outputs:
            raise BnfuseError(f"{after.name}: has no output '{name}', which {before.name} has: rewrite it again")
    check_same_draws(before, after)


def check_same_draws(before: TrainingGraph, after: TrainingGraph) -> None:
    """What one graph draws at random the other must draw too: both are fed with the same values, by name."""
    ours, theirs = (separated(graph.model, graph.name)[1] for graph in (before, after))
    for one, other, left, right in ((before, after, ours, theirs), (after, before, theirs, ours)):
        for name, random in left.items():
            if name not in right:
                raise BnfuseError(
                    f"{one.name}: draws '{name}' at random, which {other.name} does not: it is another network"
                )
            if right[name] != random:
                raise BnfuseError(
                    f"{one.name}: draws '{name}' from {random}, {other.name} from {right[name]}: it is another network"
                )


def missing_input(one: TrainingGraph, other: TrainingGraph, name: str | None) -> BnfuseError:
    """What to say of an input that only the other graph has."""
    if name in (*other.signature.offsets, *other.signature.virtual):
        return BnfuseError(
            f"{one.name}: has no input '{name}', which {other.name} draws: rewrite both with one --sample"
        )
    return BnfuseError(f"{one.name}: has no input '{name}', which {other.name} has: it is another network")


def compared(signature: GraphSignature) -> list[str]:
    return [signature.loss, *signature.gradients.values(), *signature.running.values()]


def disturbed(
    feeds: Arrays, state: Arrays, signature: GraphSignature, rng: np.random.Generator, rounding: float = ROUNDING
) -> tuple[Arrays, Arrays]:
    """Feeds and state with one rounding of noise on the data and the parameters."""
    touched = {*signature.data, *signature.virtual, *signature.trainable, *signature.frozen}

    def noise(name: str, value: np.ndarray) -> np.ndarray:
        if name not in touched or not np.issubdtype(value.dtype, np.floating):
            return value
        signs = rng.integers(0, 2, value.shape) * 2 - 1
        return (value.astype(np.float64) * (1 + rounding * signs)).astype(value.dtype)

    return (
        {name: noise(name, value) for name, value in feeds.items()},
        {name: noise(name, value) for name, value in state.items()},
    )


def tolerance(spread: float, rounding: float = ROUNDING) -> float:
    """Eight times the spread, but never less than a few roundings."""
    return max(MINIMUM, LEAST_ROUNDINGS * rounding, FACTOR * spread)


def compare(
    reference: Arrays, result: Arrays, spreads: list[Arrays], signature: GraphSignature, rounding: float = ROUNDING
) -> Iterator[TensorError]:
    """The loss first, then gradients, then running statistics."""
    for kind, outputs in (
        ("loss", [signature.loss]),
        ("gradient", list(signature.gradients.values())),
        ("running", list(signature.running.values())),
    ):
        floor = FLOOR * max((norm(reference[name]) for name in outputs), default=0.0)
        for name in outputs:
            spread = max(distance(noisy[name], reference[name], floor) for noisy in spreads)
            error = distance(result[name], reference[name], floor)
            yield TensorError(name, kind, error, tolerance(spread, rounding))


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64).ravel()))


def distance(a: np.ndarray, b: np.ndarray, floor: float) -> float:
    """||a - b|| / max(||b||, floor), in float64; infinite where the shapes differ, NaN where a value is."""
    if a.shape != b.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # infinities of one sign: NaN, as it should be
        difference = norm(a.astype(np.float64) - b.astype(np.float64))
    return difference / max(norm(b), floor) if difference else 0.0 * difference


def curve_tolerances(curve: list[float], noisy: list[list[float]], rounding: float = ROUNDING) -> tuple[float, ...]:
    """Eight times the largest spread so far: curves that have parted do not come together again."""
    found, spread = [], 0.0
    for step, loss in enumerate(curve):
        spread = max(spread, *(abs(other[step] - loss) / max(abs(loss), 1e-30) for other in noisy))
        found.append(tolerance(spread, rounding))
    return tuple(found)


class OrtRunner:
    def __init__(self, graph: TrainingGraph, threads: int | None, seed: int = 0) -> None:
        self.signature = graph.signature
        model, random = separated(without_dropout(graph.model), graph.name)
        self.random = drawer(model, random, seed)
        self.graph = OrtGraph(model, name=graph.name, threads=threads)

    def evaluate(self, feeds: Arrays, state: Arrays, step: int = 0) -> Arrays:
        return self.graph.run({**state, **feeds, **self.random(step)}, compared(self.signature))

    def train(self, feeds: Arrays, state: Arrays, lr: float, steps: int, outputs: Arrays | None = None) -> list[float]:
        """The losses of SGD; `outputs` are those of the first step, where they are known already."""
        state, losses = dict(state), []
        for step in range(steps):
            outputs = outputs or self.evaluate(feeds, state, step)
            losses.append(float(outputs[self.signature.loss]))
            for name, gradient in self.signature.gradients.items():
                state[name] = state[name] - np.float32(lr) * outputs[gradient]
            for name, output in self.signature.running.items():
                state[name] = outputs[output]
            outputs = None
        return losses


class CompiledRunner:
    """`after` in our runtime. Its gradients and running statistics are given the names they have in the file."""

    def __init__(self, graph: TrainingGraph, where: Where, bar: Callable[[int, int, str], None] | None = None) -> None:
        self.graph = dataclasses.replace(graph, model=without_dropout(graph.model))
        self.where, self.bar = where, bar
        self.random = drawer(*separated(self.graph.model, graph.name), where.seed)

    def compiled(self, lr: float | None, state: Arrays) -> Any:
        from bnfuse.runtime import SGD, compile_step

        optimizer = None if lr is None else SGD(lr=lr)
        step = compile_step(
            self.graph,
            target=self.where.target,
            precision=self.where.precision,
            threads=None if self.where.target.startswith("cuda") else self.where.threads,
            optimizer=optimizer,
            progress=self.bar,
        )
        step.load_state_dict(state)
        return step

    def drawn(self, feeds: Arrays, step: int) -> Arrays:
        """What a step draws by itself, and is to have as the other graph has it."""
        names = (*self.graph.signature.offsets, *self.graph.signature.virtual)
        return {**{name: feeds[name] for name in names}, **self.random(step)}

    def evaluate(self, feeds: Arrays, state: Arrays) -> Arrays:
        signature = self.graph.signature
        step = self.compiled(None, state)
        step.fix(self.drawn(feeds, 0))
        loss = step.forward(*(feeds[name] for name in step.inputs))
        step.backward()
        gradients = step.gradients()
        step.update()  # without an optimiser: running statistics only
        new = step.state_dict()
        return {
            signature.loss: np.float32(loss),
            **{output: gradients[name] for name, output in signature.gradients.items()},
            **{output: new[name] for name, output in signature.running.items()},
        }

    def train(self, feeds: Arrays, state: Arrays, lr: float, steps: int) -> list[float]:
        step, losses = self.compiled(lr, state), []
        for index in range(steps):
            step.fix(self.drawn(feeds, index))
            losses.append(step(*(feeds[name] for name in step.inputs)))
        return losses
