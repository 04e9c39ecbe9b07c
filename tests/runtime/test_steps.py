"""The elementwise steps, compiled in a vectorised loop, against float64 numpy."""

import math

import numpy as np
import pytest
from pointwise_case import ATTRIBUTES

from bnfuse.opset import reference, spec
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common import steps
from bnfuse.runtime.kernels.common.prologue import ProloguePlan
from bnfuse.runtime.kernels.cpu import sweep
from bnfuse.runtime.kernels.cpu.layout import flat
from bnfuse.runtime.kernels.kernel import Kernel, Param, Problem

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 1)


def evaluate(expression, **operands):
    """`expression(load)` for each element; load(name) is that of an operand."""
    count = len(next(iter(operands.values())))
    params = (*(Param(name, "in", count) for name in operands), Param("out", "out", count))

    def emit(args):
        def store(i):
            value = expression(lambda name, is_vector=False: args[name][i])
            sweep.T.buffer_store(args["out"], value, [i])

        flat(count, TARGET, store)

    kernel = Kernel("steps", None, TARGET, params, lambda: sweep.prim_func("steps", params, {}, emit))
    return execute.call(kernel, operands)["out"]


def values(seed=0, count=403):
    return np.random.default_rng(seed).normal(size=count).astype(np.float32) * 2


def close(found, wanted, tolerance=1e-6):
    assert np.abs(found - wanted).max() <= tolerance * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_and_their_gradients(kind):
    z, d = values(), values(1)
    z[:4] = [0, -0.5, 1.25, -0.0]  # the kinks
    found = evaluate(lambda load: steps.apply_activation(kind, load("z"), ATTRIBUTES), z=z)
    close(found, reference.activation(kind, z.astype(np.float64), ATTRIBUTES))
    found = evaluate(lambda load: steps.activation_grad(f"{kind}Grad", load("d"), load("z"), ATTRIBUTES), z=z, d=d)
    close(found, reference.activation_grad(f"{kind}Grad", d.astype(np.float64), z.astype(np.float64), ATTRIBUTES))


def test_exp_over_its_range():
    x = np.linspace(-90, 90, 10_001).astype(np.float32)
    found = evaluate(lambda load: steps.exp(load("x")), x=x)
    wanted = np.exp(np.clip(x.astype(np.float64), -87, 88))
    np.testing.assert_allclose(found, wanted, rtol=1.5e-7)
    assert np.isnan(evaluate(lambda load: steps.exp(load("x")), x=np.full(16, np.nan, np.float32))).all()


FUNCTIONS = {  # in units of the last place, against float64, where the result is a normal float
    "tanh": (np.tanh, 3),
    "erf": (lambda x: np.vectorize(math.erf)(x), 1),
    "softplus": (lambda x: np.logaddexp(x, 0), 2),
    "elu": (lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), 1.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_over_their_range(name):
    exact, units = FUNCTIONS[name]
    small = np.geomspace(1e-30, 1, 2000)
    x = np.concatenate([np.linspace(-12, 12, 20_000), np.linspace(-85, 85, 3000), small, -small]).astype(np.float32)
    found = evaluate(lambda load: getattr(steps, name)(load("x")), x=x)
    wanted = exact(x.astype(np.float64))
    assert (np.abs(found - wanted) / np.spacing(np.abs(wanted).astype(np.float32))).max() <= units
    for far in (-1e30, 1e30, -np.inf, np.inf):
        found = evaluate(lambda load: getattr(steps, name)(load("x")), x=np.full(16, far, np.float32))
        np.testing.assert_allclose(found, exact(np.full(16, far)), atol=1e-30)
    assert np.isnan(evaluate(lambda load: getattr(steps, name)(load("x")), x=np.full(16, np.nan, np.float32))).all()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_large_values_and_nan_show_for_what_they_are(kind):
    z = np.array([-1e30, -1e4, -90, 90, 1e4, 1e30] * 3, np.float32)
    d = np.ones_like(z)
    found = evaluate(lambda load: steps.apply_activation(kind, load("z"), ATTRIBUTES), z=z)
    np.testing.assert_allclose(
        found, reference.activation(kind, z.astype(np.float64), ATTRIBUTES), rtol=1e-6, atol=1e-7
    )
    found = evaluate(lambda load: steps.activation_grad(f"{kind}Grad", load("d"), load("z"), ATTRIBUTES), z=z, d=d)
    wanted = reference.activation_grad(f"{kind}Grad", d.astype(np.float64), z.astype(np.float64), ATTRIBUTES)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    nan = np.full(16, np.nan, np.float32)
    assert np.isnan(evaluate(lambda load: steps.apply_activation(kind, load("z"), ATTRIBUTES), z=nan)).all()


def test_normalize_rounds_once():
    x, a, b = values(), values(1), values(2)
    b[:200] = -(a * x)[:200]  # almost zero: what is left is the rounding error of a*x
    exact = a.astype(np.longdouble) * x + b
    found = evaluate(lambda load: steps.normalize(load("x"), load("a"), load("b")), x=x, a=a, b=b)
    assert (found == exact.astype(np.float32)).all()


def test_the_mask_agrees_with_the_forward_value_at_the_boundary():
    x, a = values(), values(1)
    b = -(a * x)
    plan = ProloguePlan.of_input(Problem("NormalizeReluPointwise", ()))
    y = evaluate(plan.value, x=x, a=a, b=b)

    def masked(load):
        return steps.activation_grad("ReluGrad", steps.f32(1.0), plan.before_activation(load), {})

    assert (evaluate(masked, x=x, a=a, b=b) == (y > 0)).all()


@pytest.mark.parametrize(
    "name", ["NormalizeClipAddNormalizedReluPointwise", "ReluAddReluPointwise", "AddQuickGeluPointwise"]
)
def test_forward_prologue(name):
    op = spec.parse(name)
    operands = {operand: values(i) for i, operand in enumerate(op.operands)}
    found = evaluate(ProloguePlan.of_input(Problem(name, (), tuple(ATTRIBUTES.items()))).value, **operands)
    maps = {k: v.astype(np.float64) for k, v in operands.items()}
    shaped = {k: v.reshape(1, -1, 1, 1) if k in ("x", "skip") else v for k, v in maps.items()}
    close(found, reference.run(op, shaped, ATTRIBUTES)["y"].reshape(-1))


def test_gradient_prologue():
    operands = {name: values(i) for i, name in enumerate(("dy", "grad_p", "grad_x", "grad_q", "grad_w"))}
    plan, plain = (ProloguePlan.of_gradient(Problem(f"{step}PointwiseGrad", ())) for step in ("BatchNormGrad", ""))
    dy, p, x, q, w = (v.astype(np.float64) for v in operands.values())
    close(evaluate(plan.value, **operands), p * dy + q * x + w)
    plain = evaluate(plain.value, dy=operands["dy"])
    assert (plain == operands["dy"]).all()
