"""The activations: the one place that knows what each of them is.

An entry is all that an activation takes: steps of this name are in the grammar (spec.py), in a prologue the formula, in
an epilogue, as `<name>Grad`, its gradient; the reference, the bodies of functions and the kernels of all targets
evaluate the formula; source graphs are read (sources.py), differentiated and compiled with it. Gradients at kinks are
torch's. No name is the beginning of another, but for Gelu: names of operators put steps one behind the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from bnfuse.opset.expressions import (
    Expression,
    absolute,
    attribute,
    clamp,
    constant,
    derivative,
    elu,
    erf,
    exp,
    fma,
    minimum,
    relu,
    sigmoid,
    softplus,
    tanh,
    variable,
    where,
)

Z = variable("z")  # what the activation reads
D = variable("d")  # the gradient at its result


@dataclasses.dataclass(frozen=True)
class Activation:
    """One activation: `value` is a formula of Z.

    `stated_gradient` is its gradient at z, a formula of Z and D, where the derived one would be less exact or slower.
    `defaults` are its attributes, with the values that a node has where it does not say. `operator` is the operator of
    standard ONNX that it is, from the opset `since` on, where that has the attributes `chosen`; None where it has none
    (Clip's numbers are operands). `formula`, `about`, ... are for docs/ops.md.
    """

    name: str
    value: Expression
    formula: str
    about: str = "In a gradient as Relu."
    stated_gradient: Expression | None = None
    stated_formula: str = ""
    gradient_about: str = "z is x after Normalize, before the activation."
    defaults: tuple[tuple[str, float], ...] = ()
    operator: str | None = ""
    since: int = 1
    chosen: tuple[tuple[str, str], ...] = ()

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


_ALPHA, _BETA, _GAMMA = (attribute(name) for name in ("alpha", "beta", "gamma"))
_LARGEST = 3.4028234663852886e38  # of float32

_S = sigmoid(_ALPHA * Z)
_Y = 1.0 + absolute(Z)
_BELOW = exp(minimum(Z, 0.0))  # the slope of elu where Z <= 0
_LINE = fma(_ALPHA, Z, _BETA)
_NORMAL = 0.5 + 0.5 * erf(math.sqrt(0.5) * Z)  # distribution function and density of the normal distribution
_DENSITY = 1 / math.sqrt(2 * math.pi) * exp(-0.5 * Z * Z)
# (1 + tanh(u))/2 = sigmoid(2*u), which keeps its digits where u is negative; 2*u = z*(a + b*z*z)
_A, _B = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
_U = Z * fma(Z * Z, _B, _A)
_T, _R = sigmoid(_U), sigmoid(-1.0 * _U)  # 1 - t is r, which keeps its digits
_M = clamp(Z, -16.0, 16.0)  # beyond, t*r is 0, also times the cube of a large z
# tanh(softplus(z)) = w/(w + 2), w = n*(n + 2), n = e**z. From z = 20 on it is 1, also in float64.
_C = minimum(Z, 20.0)
_N = exp(_C)
_W = _N * (_N + 2.0)

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
            operator=None,
        ),
        Activation(
            "QuickGelu",
            Z * _S,
            "x <- x*sigmoid(alpha*x)",
            "SiLU is alpha = 1. In a gradient as Relu.",
            D * fma(_ALPHA * Z * _S, 1.0 - _S, _S),
            "dx <- dx * s*(1 + alpha*z*(1 - s)), s = sigmoid(alpha*z)",
            defaults=(("alpha", 1.702),),
            operator="Swish",
            since=24,
        ),
        Activation(
            "Softsign",
            Z / _Y,
            "x <- x/(1 + |x|)",
            # The derived slope, (1 - |z|/(1 + |z|))/(1 + |z|), cancels where |z| is large.
            stated_gradient=D / (_Y * _Y),
            stated_formula="dx <- dx/(1 + |z|)^2",
        ),
        Activation("Sigmoid", sigmoid(Z), "x <- 1/(1 + e^-x)"),
        Activation("Tanh", tanh(Z), "x <- tanh(x)"),
        Activation(
            "LeakyRelu",
            where(Z > 0.0, Z, _ALPHA * Z),
            "x <- x where x > 0, else alpha*x",
            stated_formula="dx <- dx where z > 0, else alpha*dx",
            defaults=(("alpha", 0.01),),
        ),
        Activation(
            "Elu",
            where(Z > 0.0, Z, _ALPHA * elu(Z)),
            "x <- x where x > 0, else alpha*(e^x - 1)",
            stated_gradient=D * where(Z > 0.0, 1.0, _ALPHA * _BELOW),
            stated_formula="dx <- dx where z > 0, else alpha*e^z*dx",
            defaults=(("alpha", 1.0),),
        ),
        Activation(
            "Selu",
            _GAMMA * where(Z > 0.0, Z, _ALPHA * elu(Z)),
            "x <- gamma*x where x > 0, else gamma*alpha*(e^x - 1)",
            stated_gradient=D * (_GAMMA * where(Z > 0.0, 1.0, _ALPHA * _BELOW)),
            stated_formula="dx <- gamma*dx where z > 0, else gamma*alpha*e^z*dx",
            defaults=(("alpha", 1.67326319217681884765625), ("gamma", 1.05070102214813232421875)),
        ),
        Activation(
            "Celu",
            where(Z > 0.0, Z, _ALPHA * elu(Z / _ALPHA)),
            "x <- x where x > 0, else alpha*(e^(x/alpha) - 1)",
            stated_gradient=D * where(Z > 0.0, 1.0, exp(minimum(Z, 0.0) / _ALPHA)),
            stated_formula="dx <- dx where z > 0, else e^(z/alpha)*dx",
            defaults=(("alpha", 1.0),),
            since=12,
        ),
        Activation(
            "HardSigmoid",
            clamp(_LINE, 0.0, 1.0),
            "x <- min(max(alpha*x + beta, 0), 1)",
            stated_gradient=where((_LINE > 0.0) & (constant(1.0) > _LINE), _ALPHA * D, 0.0),
            stated_formula="dx <- alpha*dx where 0 < alpha*z + beta < 1, else 0",
            gradient_about="The gradient at the bounds is 0.",
            defaults=(("alpha", 0.2), ("beta", 0.5)),
        ),
        Activation(
            "HardSwish",
            Z * (clamp(Z + 3.0, 0.0, 6.0) / 6.0),
            "x <- x*min(max(x + 3, 0), 6)/6",
            stated_gradient=D * where(Z >= 3.0, 1.0, where(Z > -3.0, Z / 3.0 + 0.5, 0.0)),
            stated_formula="dx <- dx where z >= 3, dx*(z/3 + 1/2) where -3 < z < 3, else 0",
            since=14,
        ),
        Activation(
            "Gelu",
            Z * _NORMAL,
            "x <- x*(1 + erf(x/sqrt(2)))/2",
            stated_gradient=D * fma(Z, _DENSITY, _NORMAL),
            stated_formula="dx <- dx*(P(z) + z*p(z)), P the normal distribution, p its density",
            since=20,
            chosen=(("approximate", "none"),),
        ),
        Activation(
            "GeluTanh",
            Z * _T,
            "x <- x*(1 + tanh(sqrt(2/pi)*(x + 0.044715*x^3)))/2",
            "Gelu by the approximation with tanh. In a gradient as Relu.",
            D * fma(_M * fma(_M * _M, 3 * _B, _A), _T * _R, _T),
            "dx <- dx*(s + z*s*(1 - s)*(a + 3*b*z^2)), s = sigmoid(a*z + b*z^3), a = 2*sqrt(2/pi), b = 0.044715*a",
            operator="Gelu",
            since=20,
            chosen=(("approximate", "tanh"),),
        ),
        Activation(
            "Mish",
            Z * (_W / (_W + 2.0)),
            "x <- x*tanh(log(1 + e^x))",
            stated_gradient=D * ((_W + _C * (4.0 * _N * (_N + 1.0) / (_W + 2.0))) / (_W + 2.0)),
            stated_formula="dx <- dx*(w + 4*z*n*(n + 1)/(w + 2))/(w + 2), w = n*(n + 2), n = e^z",
            since=18,
        ),
        Activation("Softplus", softplus(Z), "x <- log(1 + e^x)", stated_formula="dx <- dx*sigmoid(z)"),
        Activation(
            "ThresholdedRelu",
            where(_ALPHA >= Z, 0.0, Z),
            "x <- x where x > alpha, else 0",
            stated_formula="dx <- dx where z > alpha, else 0",
            defaults=(("alpha", 1.0),),
            since=10,
        ),
    )
}
GRADIENTS: dict[str, Activation] = {f"{name}Grad": each for name, each in ACTIVATIONS.items()}
