"""Both sides of a comparison: a graph in onnxruntime, or compiled in our runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.progress import Bar
from bnfuse.graph.drawing import drawer, separated
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import TrainingGraph, without_dropout
from bnfuse.ort.oracle import Arrays, OrtGraph
from bnfuse.verifying.interpreter import Interpreter, wide, widened
from bnfuse.verifying.rounded import BITS, rounded
from bnfuse.verifying.verdict import ROUNDINGS


class Runner(Protocol):
    """A graph that can be evaluated at a state and trained from it."""

    def evaluate(self, feeds: Arrays, state: Arrays) -> Arrays:
        """Give loss, gradients and new running statistics, by the output names of `before`."""

    def train(self, feeds: Arrays, state: Arrays, lr: float, steps: int) -> list[float]:
        """Give the losses of `steps` steps of SGD on one batch."""


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

    @property
    def has_fewer_bits(self) -> bool:
        """Whether the step computes in fewer bits than float32."""
        return self.precision in BITS


class FileRunner:
    """A graph whose file something runs as it stands: `run` gives outputs by their names."""

    def __init__(self, graph: TrainingGraph, where: Where) -> None:
        self.signature = graph.signature
        model, random = separated(without_dropout(graph.model), graph.name)
        self.random = drawer(model, random, where.seed)
        self.run = self.opened(model, graph.name, where)

    def opened(self, model: ir.Model, name: str, where: Where) -> Callable[[Arrays, list[str]], Arrays]:
        """Give what computes outputs from inputs."""
        raise NotImplementedError

    def evaluate(self, feeds: Arrays, state: Arrays, step: int = 0) -> Arrays:
        """Give loss, gradients and new running statistics of a step, by the output names of the graph."""
        return self.run({**state, **feeds, **self.random(step)}, compared(self.signature))

    def train(self, feeds: Arrays, state: Arrays, lr: float, steps: int, outputs: Arrays | None = None) -> list[float]:
        """Give the losses of SGD; `outputs` are those of the first step, where they are known already."""
        state, losses = dict(state), []
        for step in range(steps):
            outputs = outputs or self.evaluate(feeds, state, step)
            losses.append(loss_of(self.signature, outputs, feeds))
            for name, gradient in self.signature.gradients.items():
                state[name] = state[name] - np.float32(lr) * outputs[gradient]
            for name, output in self.signature.running.items():
                state[name] = outputs[output]
            outputs = None
        return losses


class OrtRunner(FileRunner):
    """A graph in onnxruntime."""

    def opened(self, model: ir.Model, name: str, where: Where) -> Callable[[Arrays, list[str]], Arrays]:
        """Open a session."""
        return OrtGraph(model, name=name, threads=where.threads).run


class RoundedRunner(OrtRunner):
    """A graph in onnxruntime, rounded as a step in fewer bits rounds."""

    def opened(self, model: ir.Model, name: str, where: Where) -> Callable[[Arrays, list[str]], Arrays]:
        """Open a session of the rounded graph."""
        assert where.precision is not None
        return super().opened(rounded(model, where.precision), name, where)


class Float64Runner(FileRunner):
    """A graph in onnx's evaluator, in float64."""

    def opened(self, model: ir.Model, name: str, where: Where) -> Callable[[Arrays, list[str]], Arrays]:
        """Make the interpreter. Raises BnfuseError, on a run, where it cannot compute an operator."""
        interpreter = Interpreter(widened(ir.to_proto(model)))

        def run(feeds: Arrays, outputs: list[str]) -> Arrays:
            try:
                return interpreter.run(wide(feeds), outputs)
            except Exception as error:  # of any operator of onnx's evaluator
                raise BnfuseError(f"{name}: onnx's evaluator does not run it in float64: {first_line(error)}") from None

        return run


class CompiledRunner:
    """`after` in our runtime. Its gradients and running statistics are given the names they have in the file."""

    def __init__(self, graph: TrainingGraph, where: Where, bar: Bar | None = None) -> None:
        self.graph = dataclasses.replace(graph, model=without_dropout(graph.model))
        self.where, self.bar = where, bar
        self.random = drawer(*separated(self.graph.model, graph.name), where.seed)

    def compiled(self, lr: float | None, state: Arrays) -> Any:
        """Compile the graph at a state; without a rate it has no optimiser."""
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
        """Gather what a step draws by itself, and is to have as the other graph has it."""
        names = (*self.graph.signature.offsets, *self.graph.signature.virtual)
        return {**{name: feeds[name] for name in names}, **self.random(step)}

    def evaluate(self, feeds: Arrays, state: Arrays) -> Arrays:
        """Give loss, gradients and new running statistics, by the output names of the graph."""
        signature = self.graph.signature
        step = self.compiled(None, state)
        step.fix(self.drawn(feeds, 0))
        step.forward(*(feeds[name] for name in step.inputs))
        results = step.outputs
        step.backward(*(feeds[name] for name in signature.output_gradients.values()))
        gradients = step.gradients()
        step.update()  # without an optimiser: running statistics only
        new = step.state_dict()
        return {
            **{name: results[name] for name in signature.results},
            **{output: gradients[name] for name, output in signature.gradients.items()},
            **{output: new[name] for name, output in signature.running.items()},
        }

    def train(self, feeds: Arrays, state: Arrays, lr: float, steps: int) -> list[float]:
        """Give the losses of `steps` steps of SGD on one batch."""
        step, losses = self.compiled(lr, state), []
        for index in range(steps):
            step.fix(self.drawn(feeds, index))
            step.forward(*(feeds[name] for name in step.inputs))
            losses.append(loss_of(self.graph.signature, step.outputs, feeds))
            step.backward(*(feeds[name] for name in self.graph.signature.output_gradients.values()))
            step.update()
        return losses


def loss_of(signature: GraphSignature, values: Arrays, feeds: Arrays) -> float:
    """Give the loss; without one that whose gradients came in: the sum of the outputs times the gradients at them."""
    if signature.loss is not None:
        return float(values[signature.loss])
    return sum(float(np.vdot(values[name], feeds[given])) for name, given in signature.output_gradients.items())


def compared(signature: GraphSignature) -> list[str]:
    """List the outputs that are compared: the loss (or the network's outputs), gradients, running statistics."""
    return [*signature.results, *signature.gradients.values(), *signature.running.values()]
