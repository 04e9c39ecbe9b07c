"""The activations: the one place that knows what each of them is.

An entry is all that an activation takes: steps of this name are in the grammar (spec.py), in a prologue the formula, in
an epilogue, as `<name>Grad`, its gradient; the reference, the bodies of functions and the kernels of all targets
evaluate the formula; source graphs are read, differentiated and compiled with it.
"""

from __future__ import annotations

import dataclasses
import functools

from bnfuse.opset.expressions import (
    Expression,
    absolute,
    attribute,
    clamp,
    derivative,
    fma,
    relu,
    sigmoid,
    variable,
    where,
)

Z = variable("z")  # what the activation reads
D = variable("d")  # the gradient at its result

MICROSOFT = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation: `value` is a formula of Z.

    `stated_gradient` is its gradient at z, a formula of Z and D, where the derived one would be less exact or slower.
    `domain` is that of the operator of this name in source graphs, `defaults` its attributes with the values that a
    node has where it does not say. `built` tells whether onnxruntime's gradient builder knows the operator; of others
    bnfuse.build makes the gradient. `formula`, `about`, ... are for docs/ops.md.
    """

    name: str
    value: Expression
    formula: str
    about: str = "In a gradient as Relu."
    stated_gradient: Expression | None = None
    stated_formula: str = ""
    gradient_about: str = "z is x after Normalize, before the activation."
    domain: str = ""
    defaults: tuple[tuple[str, float], ...] = ()
    built: bool = False

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names, in the order of the node's."""
        return tuple(name for name, _ in self.defaults)

    @functools.cached_property
    def gradient(self) -> Expression:
        """The gradient at z, of Z and of D."""
        return D * derivative(self.value, Z) if self.stated_gradient is None else self.stated_gradient

    @property
    def gradient_formula(self) -> str:
        """For people."""
        return self.stated_formula or f"dx <- dx * (the slope of {self.name} at z)"


_ALPHA = attribute("alpha")
_S = sigmoid(_ALPHA * Z)
_Y = 1.0 + absolute(Z)
_LARGEST = 3.4028234663852886e38  # of float32

ACTIVATIONS: dict[str, Activation] = {
    each.name: each
    for each in (
        Activation(
            "Relu",
            relu(Z),
            "x <- max(x, 0)",
            "In a gradient it is recomputed for the weight gradient.",
            where(Z > 0.0, D, 0.0),
            "dx <- dx * (z > 0)",
            "z is x after Normalize and before the activation; without Normalize it is x, which may then be the output "
            "of the Relu as well, because both have the same sign. The gradient at 0 is 0.",
            built=True,
        ),
        Activation(
            "Clip",
            clamp(Z, attribute("min"), attribute("max")),
            "x <- min(max(x, min), max)",
            "ReLU6 and its like. In a gradient as Relu.",
            where((attribute("min") <= Z) & (attribute("max") >= Z), D, 0.0),
            "dx <- dx * (min <= z <= max)",
            "The gradient at the bounds is 1.",
            defaults=(("min", -_LARGEST), ("max", _LARGEST)),
            built=True,
        ),
        Activation(
            "QuickGelu",
            Z * _S,
            "x <- x*sigmoid(alpha*x)",
            "SiLU is alpha = 1. In a gradient as Relu.",
            D * fma(_ALPHA * Z * _S, 1.0 - _S, _S),
            "dx <- dx * s*(1 + alpha*z*(1 - s)), s = sigmoid(alpha*z)",
            domain=MICROSOFT,
            defaults=(("alpha", 1.702),),
            built=True,
        ),
        Activation(
            "Softsign",
            Z / _Y,
            "x <- x/(1 + |x|)",
            # The derived slope, (1 - |z|/(1 + |z|))/(1 + |z|), cancels where |z| is large.
            stated_gradient=D / (_Y * _Y),
            stated_formula="dx <- dx/(1 + |z|)^2",
        ),
    )
}
GRADIENTS: dict[str, Activation] = {f"{name}Grad": each for name, each in ACTIVATIONS.items()}
