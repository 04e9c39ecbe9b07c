"""The way into a core, described once: which maps and vectors its steps read, and what they make of an element.

    x after its steps     [Normalize] [[Where] Activation] [Gate]
                          [[SkipActivation] [SkipGate] Add|AddNormalized [Plus|PlusNormalized]*] [Activation]
    dy after its steps    [GateGrad] [[AddGrad] [ActivationGrad] BatchNormGrad [ActivationGrad]]

A code generator brings the operands (into registers, shared memory, vectors) and says by `load` where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import (
    OF_GRADIENT,
    applied,
    around_batch_norm_grad,
    further_terms,
    masks_gated,
    may_be_of_samples,
    prologue_operands,
    skip_activation,
)
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.steps import Expr, Load
from bnfuse.runtime.kernels.kernel import MapType, Problem


@dataclasses.dataclass(frozen=True)
class ProloguePlan:
    """The steps on the way from a map (`source`: x or dy) to what the core reads of it."""

    source: str
    steps: tuple[str, ...]
    known: Mapping[str, MapType]
    attributes: Mapping[str, Any]

    @staticmethod
    def of_input(problem: Problem) -> ProloguePlan:
        """Plan the steps of x; in a gradient those that recompute what the core had read."""
        own = tuple(step for step in problem.spec.prologue if step not in OF_GRADIENT)
        return ProloguePlan("x", own, dict(problem.maps), dict(problem.attributes))

    @staticmethod
    def of_gradient(problem: Problem) -> ProloguePlan:
        """Plan the steps of dy."""
        own = tuple(step for step in problem.spec.prologue if step in OF_GRADIENT)
        return ProloguePlan("dy", own, dict(problem.maps), dict(problem.attributes))

    @staticmethod
    def at_input(problem: Problem) -> ProloguePlan:
        """Plan what happens to the map at a convolution's input before it is read: x, or a transposed one's dy."""
        return (ProloguePlan.of_gradient if problem.spec.is_transposed else ProloguePlan.of_input)(problem)

    @staticmethod
    def at_output(problem: Problem) -> ProloguePlan:
        """Plan what happens to the map at a convolution's output before it is read: dy, or a transposed one's x."""
        return (ProloguePlan.of_input if problem.spec.is_transposed else ProloguePlan.of_gradient)(problem)

    @property
    def operands(self) -> tuple[str, ...]:
        """List all that is read, in the order of the operator's operands."""
        return (self.source, *prologue_operands(self.steps))

    @property
    def maps(self) -> dict[str, MapType]:
        """Give the maps that are read, by name."""
        return {name: self.known[name] for name in self.operands if name in self.known}

    @property
    def vectors(self) -> tuple[str, ...]:
        """List the per-channel vectors that are read."""
        return tuple(name for name in self.operands if name not in self.known)

    @property
    def keeps_zero(self) -> bool:
        """Tell whether zeros of all maps are made zeros, as pixels are brought that are not there.

        Of activations Relu alone is known to; others may, depending on their attributes.
        """
        kinds = {step.removeprefix("Skip") for step in self.steps} & {*ACTIVATIONS}
        coefficients = any(map(may_be_of_samples, self.operands))
        return not self.vectors and not coefficients and kinds <= {"Relu"}

    def ends_in(self, step: str) -> bool:
        """Tell whether this is the last step, in all channels."""
        return self.steps[-1:] == (step,) and self.steps[-2:-1] != ("Where",)

    def without_last(self) -> ProloguePlan:
        """Give the plan of all steps but the last."""
        return dataclasses.replace(self, steps=self.steps[:-1])

    def value(self, load: Load) -> Expr:
        """Write what the core reads. `load` is called once for each operand."""
        value = load(self.source, False)
        for step, of_some in applied(self.steps):
            if step == "Normalize":
                value = steps.normalize(value, self.coefficient("a", load), self.coefficient("b", load))
            elif step in ACTIVATIONS:
                made = steps.apply_activation(step, value, self.attributes)
                value = steps.chosen(load("active", True), made, value) if of_some else made
            elif step == "Gate":
                value = value * load("gate", False)
            elif step in ("Add", "AddNormalized"):
                value = value + self._skip(step, load)
                for name, a, b in further_terms(prologue_operands(self.steps)):
                    plus = load(name, False)
                    normalized = a in prologue_operands(self.steps)
                    if normalized:
                        plus = steps.normalize(plus, self.coefficient(a, load), self.coefficient(b, load))
                    value = value + plus
            elif step == "GateGrad":
                value = value * load("grad_gate", False)
            elif step == "BatchNormGrad":
                value = self._batch_norm_grad(value, load)
        return value

    def coefficient(self, name: str, load: Load) -> Expr:
        """Write a coefficient of the channel at hand, or of its sample's, where each sample has its own."""
        return load(name, name not in self.known)

    def before_activation(self, load: Load) -> Expr:
        """Write z: x after Normalize, and a Gate that follows it, before the activation, which a mask asks for."""
        x = load(self.source, False)
        z = x
        if "Normalize" in self.steps:
            z = steps.normalize(x, self.coefficient("a", load), self.coefficient("b", load))
        return z * load("gate", False) if masks_gated(self.steps) else z

    def _batch_norm_grad(self, dy: Expr, load: Load) -> Expr:
        """Write dy behind BatchNormGrad and the gradients of activations around it."""
        before, behind = around_batch_norm_grad(self.steps)
        x = read = load("grad_x", False)
        dy = dy + load("grad_other", False) if "AddGrad" in self.steps else dy
        if before:
            z = steps.normalize(x, self.coefficient("grad_a", load), self.coefficient("grad_b", load))
            dy = steps.activation_grad(before, dy, z, self.attributes)
        if behind:
            read = steps.apply_activation(behind.removesuffix("Grad"), x, self.attributes)
        q, w = self.coefficient("grad_q", load), self.coefficient("grad_w", load)
        dy = steps.batch_norm_grad(dy, self.coefficient("grad_p", load), read, q, w)
        return steps.activation_grad(behind, dy, x, self.attributes) if behind else dy

    def _skip(self, step: str, load: Load) -> Expr:
        """Write what Add or AddNormalized adds."""
        skip = load("skip", False)
        if step == "AddNormalized":
            skip = steps.normalize(skip, self.coefficient("skip_a", load), self.coefficient("skip_b", load))
        kind = skip_activation(self.steps)
        skip = steps.apply_activation(kind, skip, self.attributes) if kind else skip
        return skip * load("skip_gate", False) if "SkipGate" in self.steps else skip
