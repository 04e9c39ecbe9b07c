"""The way out of a core, described once: what its steps read, what they make of an element, what is summed.

    y     [Bias] [Relu]                                    then stored;  [Statistics] of y as stored
    dx    {BiasGrad}  [AddGradient|AddGatedGradient] [AddBatchNormGrad] [[Where] ActivationGrad [AddSkipGradient]]
          {Reduce [Part] ReduceOther|ReduceGated|ReduceActivationGrad|...*}  [Scale|Accumulate]     then stored

What stands in braces takes sums of the value as it is there. A code generator keeps the element and the sums in places
of its own and writes these steps in this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bnfuse.opset.activations import GRADIENTS
from bnfuse.opset.spec import ADDED_REDUCTIONS, MASKED_REDUCTIONS, SHARED, OpSpec, masks_gated, parts_of
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.common.steps import Expr, Load
from bnfuse.runtime.kernels.kernel import MapType, Problem

# steps that add to dx: the maps and the per-channel vectors that they read
ADDITIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "AddGradient": (("other",), ()),
    "AddGatedGradient": (("other", "other_gate"), ()),
    "AddBatchNormGrad": (("other_dy", "other_x"), ("other_p", "other_q", "other_w")),
    "AddSkipGradient": (("skip_grad",), ()),
}


@dataclasses.dataclass(frozen=True)
class Total:
    """A sum over pixels: of the value itself, or of value*(x - mean) of one BN, times its inv_std in the end. Its
    results are all equal."""

    results: tuple[str, ...]
    suffix: str | None = None  # of the BN whose x, mean and inv_std it takes
    of_bias: bool = False  # of dy, before the steps of the epilogue
    gate: str | None = None  # the map by which the value is multiplied first
    mask: str | None = None  # or the gradient of an activation that it goes through first, behind its BN
    added: str | None = None  # another gradient that is added before that
    part: str | None = None  # the per-channel vector that says which channels it is of; x has no others

    def centred(self, load: Load) -> Expr:
        """Write x - mean of its BN; 0 in channels that x has not, where what is loaded may be anything."""
        centred = load(f"x{self.suffix}", False) - load(f"mean{self.suffix}", True)
        return centred if self.part is None else self.of_part(centred, load)

    def of_part(self, value: Expr, load: Load) -> Expr:
        """Write a value in the channels of the part, and 0 in the others."""
        assert self.part is not None
        return steps.chosen(load(self.part, True), value, steps.f32(0))

    @property
    def factor(self) -> str | None:
        """Name the per-channel vector by which the sum is multiplied, if it is one of value*(x - mean)."""
        return None if self.suffix is None else f"inv_std{self.suffix}"


def totals_of(spec: OpSpec) -> tuple[Total, ...]:
    """List what a gradient's epilogue sums, in the order in which it is summed."""
    gates, masks = gates_of(spec), masks_of(spec)
    suffixes = [""] if "Reduce" in spec.epilogue else []
    suffixes += [f"_{i}" for i in range(1, spec.others + 1)]
    totals = [Total(("dbias",), of_bias=True)] if "BiasGrad" in spec.epilogue else []
    parts = {f"_{number}": f"part_{number}" for number in parts_of(spec.epilogue)}
    plain = [s for s in suffixes if s not in {**gates, **masks, **parts}]
    if plain:  # the sum of dx is the dbeta of every BN that shares dx
        totals.append(Total(tuple(f"dbeta{s}" for s in plain)))
    added = added_to(spec)

    def total(result: str, suffix: str, of: str | None) -> Total:
        how = (gates.get(suffix), masks.get(suffix), added.get(suffix), parts.get(suffix))
        return Total((f"{result}{suffix}",), of, False, *how)

    totals += [total("dbeta", s, None) for s in suffixes if s in {**gates, **masks, **parts}]
    totals += [total("dgamma", s, s) for s in suffixes]
    return tuple(totals)


def gates_of(spec: OpSpec) -> dict[str, str]:
    """Map the suffixes of the BNs that share dx behind a gate to the gates' names."""
    shared = [step for step in spec.epilogue if step in SHARED]
    return {f"_{i}": f"gate_{i}" for i, step in enumerate(shared, 1) if step == "ReduceGated"}


def masks_of(spec: OpSpec) -> dict[str, str]:
    """Map the suffixes of the BNs that share dx behind an activation to what its gradient is called."""
    shared = [step for step in spec.epilogue if step in SHARED]
    return {f"_{i}": MASKED_REDUCTIONS[step] for i, step in enumerate(shared, 1) if step in MASKED_REDUCTIONS}


def added_to(spec: OpSpec) -> dict[str, str]:
    """Map the suffixes of the BNs that share the sum of dx and another gradient to that other's name."""
    shared = [step for step in spec.epilogue if step in SHARED]
    return {f"_{i}": f"other_{i}" for i, step in enumerate(shared, 1) if step in ADDED_REDUCTIONS}


@dataclasses.dataclass(frozen=True)
class EpiloguePlan:
    """The epilogue of a problem."""

    problem: Problem

    @property
    def spec(self) -> OpSpec:
        """Give the spec of the problem's operator."""
        return self.problem.spec

    @property
    def result(self) -> str:
        """Name the map that is written."""
        return "dx" if self.spec.is_gradient else "y"

    @property
    def masks(self) -> tuple[str, ...]:
        """List the steps that are gradients of activations."""
        return tuple(step for step in self.spec.epilogue if step in GRADIENTS)

    @property
    def statistics(self) -> bool:
        """Tell whether mean and variance of y are taken."""
        return "Statistics" in self.spec.epilogue

    @property
    def totals(self) -> tuple[Total, ...]:
        """List the sums of a gradient."""
        return totals_of(self.spec)

    @property
    def maps(self) -> tuple[str, ...]:
        """List the maps that it reads, `dx` where it adds to what is there."""
        if not self.spec.is_gradient:
            return ()
        names = [name for step in ADDITIONS if step in self.spec.epilogue for name in ADDITIONS[step][0]]
        names += ["x"] if self.masks or "Reduce" in self.spec.epilogue else []
        names += ["gate"] if self.masks and masks_gated(self.spec.prologue) else []
        names += [f"x_{i}" for i in range(1, self.spec.others + 1)]
        names += (*gates_of(self.spec).values(), *added_to(self.spec).values())
        names += [name for name in self._coefficients if name in self._known]
        return (*names, "dx") if "Accumulate" in self.spec.epilogue else tuple(names)

    @property
    def vectors(self) -> tuple[str, ...]:
        """List the per-channel vectors that it reads for each element (and not in the end, as inv_std)."""
        if not self.spec.is_gradient:
            return ("bias",) if "Bias" in self.spec.epilogue else ()
        names = [name for name in self._coefficients if name not in self._known]
        names += ["masked"] if "Where" in self.spec.epilogue else []
        names += [f"part_{number}" for number in parts_of(self.spec.epilogue)]
        names += [f"mean{total.suffix}" for total in self.totals if total.suffix is not None]
        return (*names, "acc_p") if self.places else tuple(names)

    @property
    def _coefficients(self) -> list[str]:
        """List the coefficients that it reads for each element: vectors, or maps where each sample has its own."""
        names = [name for step in ADDITIONS if step in self.spec.epilogue for name in ADDITIONS[step][1]]
        names += ["a", "b"] if self.masks and "Normalize" in self.spec.prologue else []
        return names + [f"{name}{suffix}" for suffix in masks_of(self.spec) for name in "ab"]

    @property
    def _known(self) -> dict[str, MapType]:
        return dict(self.problem.maps)

    def coefficient(self, name: str, load: Load) -> Expr:
        """Write a coefficient of the channel at hand, or of its sample's, where each sample has its own."""
        return load(name, name not in self._known)

    def finished(self, value: Expr, load: Load) -> Expr:
        """Write y: the core's result with its bias, and behind its activation."""
        value = value + load("bias", True) if "Bias" in self.spec.epilogue else value
        return steps.apply_activation("Relu", value, {}) if "Relu" in self.spec.epilogue else value

    @property
    def changes(self) -> bool:
        """Tell whether `changed`, or `finished` of a forward operator, does anything."""
        if not self.spec.is_gradient:
            return bool({"Bias", "Relu"} & {*self.spec.epilogue})
        return bool(self.masks) or bool({*ADDITIONS} & {*self.spec.epilogue})

    def changed(self, d: Expr, load: Load, bind: Callable[[Expr], Expr] = lambda z: z) -> Expr:
        """Write dx with other readers' gradients and behind the mask: what Reduce and ReduceOther sum.

        z, which a mask needs, is recomputed from x by the expression of the forward pass, and goes through `bind`.
        """
        if "AddGradient" in self.spec.epilogue:
            d = d + load("other", False)
        if "AddGatedGradient" in self.spec.epilogue:
            d = steps.fma(load("other_gate", False), load("other", False), d)
        if "AddBatchNormGrad" in self.spec.epilogue:
            p, q, w = (self.coefficient(f"other_{name}", load) for name in "pqw")
            d = d + steps.batch_norm_grad(load("other_dy", False), p, load("other_x", False), q, w)
        for step in self.masks:
            z = ProloguePlan.of_input(self.problem).before_activation(load)
            masked = steps.activation_grad(step, d, bind(z), dict(self.problem.attributes))
            d = steps.chosen(load("masked", True), masked, d) if "Where" in self.spec.epilogue else masked
        if "AddSkipGradient" in self.spec.epilogue:
            d = d + load("skip_grad", False)
        return d

    def summed(self, total: Total, value: Expr, load: Load) -> Expr:
        """Write what a total sums of a value: the value itself, or that behind its gate or mask, in its channels."""
        summed = self._summed(total, value, load)
        return summed if total.part is None else total.of_part(summed, load)

    def _summed(self, total: Total, value: Expr, load: Load) -> Expr:
        if total.gate is not None:
            return value * load(total.gate, False)
        if total.mask is not None:
            suffix = total.results[0].removeprefix("dbeta").removeprefix("dgamma")
            a, b = (self.coefficient(f"{name}{suffix}", load) for name in "ab")
            z = steps.normalize(load(f"x{suffix}", False), a, b)
            whole = value if total.added is None else value + load(total.added, False)
            return steps.activation_grad(total.mask, whole, z, dict(self.problem.attributes))
        return value

    @property
    def places(self) -> bool:
        """Tell whether `placed` does anything."""
        return bool({"Scale", "Accumulate"} & {*self.spec.epilogue})

    def placed(self, d: Expr, load: Load) -> Expr:
        """Write what is stored as dx."""
        if "Scale" in self.spec.epilogue:
            return load("acc_p", True) * d
        if "Accumulate" in self.spec.epilogue:
            return steps.fma(load("acc_p", True), d, load("dx", False))
        return d
