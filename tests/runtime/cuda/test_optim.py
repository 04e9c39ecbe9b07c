"""The optimisers' updates on a GPU, interpreted, against their formulas in float64."""

import numpy as np
import pytest
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu, run_kernel

from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.optim import Options, adam_problem, lion_problem, rmsprop_problem, sgd_problem
from bnfuse.runtime.kernels.cuda.optim import BLOCKS, EACH, THREADS, accumulate, average, gradient_norm, update

BETAS, EPSILON, LR = (0.9, 0.999), 1e-8, 0.01
SIZES = [1, 16 * 9 + 5, 16 * 37 + 5, EACH * THREADS * BLOCKS + 77]  # rests alone, two warps, two turns of all blocks
STEPS = 3


def make(kind, elements, precision="fp32", arch="sm_90"):
    target = gpu(precision, arch, multiprocessors=1)
    if kind == "adamw":
        return update(adam_problem("AdamW", elements, BETAS, EPSILON), target)
    return update(sgd_problem(elements, 0.0 if kind == "sgd" else 0.9, kind == "nesterov"), target)


def data(elements, seed=0):
    rng = np.random.default_rng(seed)
    gradients = [rng.normal(size=elements).astype(np.float32) for _ in range(STEPS)]
    decay = np.where(np.arange(-(-elements // 16)) % 3 == 0, 0, 0.05).astype(np.float32)
    return rng.normal(size=elements).astype(np.float32), gradients, decay


def state_of(kernel):
    return [p.name for p in kernel.params if p.access == "inout"]


def steps(kernel, scale=None):
    """The state after some steps; scaled, the gradients are multiplied by `scale` first."""
    w, gradients, decay = data(kernel.params[0].elements)
    state = {name: np.zeros(w.size, np.float32) for name in state_of(kernel)} | {"parameters": w}
    for step, g in enumerate(gradients, 1):
        scalars = {"lr": LR * step, "step": step, "divisor": scale}
        arrays = {**state, "gradients": g * np.float32(scale or 1), "decay": decay}
        found = run_kernel(kernel, arrays, scalars=scalars)
        state = {name: found[name] for name in state}
    return state


def reference(kind, elements):
    w, gradients, decay = data(elements)
    w, decay = w.astype(np.float64), np.repeat(decay, 16)[:elements].astype(np.float64)
    m, v = np.zeros(elements), np.zeros(elements)
    momentum = 0.0 if kind == "sgd" else 0.9
    for step, g in enumerate(gradients, 1):
        lr, g = LR * step, g.astype(np.float64)
        if kind == "adamw":
            w = w * (1 - lr * decay)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            w = w - lr * (m / (1 - BETAS[0] ** step)) / (np.sqrt(v / (1 - BETAS[1] ** step)) + EPSILON)
        else:
            g = g + decay * w
            v = momentum * v + g
            w = w - lr * (g + momentum * v if kind == "nesterov" else v)
    return w


@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "adamw"])
@pytest.mark.parametrize("elements", SIZES)
def test_equals_the_formula(kind, elements):
    found = steps(make(kind, elements))["parameters"]
    np.testing.assert_allclose(found, reference(kind, elements), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_scaled_gradients_make_the_same_steps(kind):
    plain, scaled = steps(make(kind, 333)), steps(make(kind, 333, "fp16"), scale=1024.0)
    for name, values in plain.items():
        np.testing.assert_array_equal(scaled[name], values)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 77, SIZES[-1] - 1])
def test_a_gradient_that_is_not_finite_stops_the_update(kind, value, at):
    kernel = make(kind, SIZES[-1], "fp16")
    w, gradients, decay = data(SIZES[-1])
    arrays = {name: w + i for i, name in enumerate(state_of(kernel))} | {"decay": decay}
    bad = gradients[0].copy()
    bad[at] = value
    scalars = {"lr": LR, "step": 1, "divisor": 8.0}
    found = run_kernel(kernel, {**arrays, "gradients": bad}, scalars=scalars)
    assert found["finite"][0] == 0
    for name in state_of(kernel):
        np.testing.assert_array_equal(found[name], arrays[name])
    assert run_kernel(kernel, {**arrays, "gradients": gradients[0]}, scalars=scalars)["finite"][0] == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_compiles_without_spills(arch, precision):
    for kind in ("nesterov", "adamw"):
        assert_no_spills(make(kind, 100_003, precision, arch))


# -- what recipes ask for besides ----------------------------------------------------------------------------------


EVERYTHING = Options(rates=True, divided=True, clipped=True, averaged=True)
OTHERS = {
    "adam": lambda elements: adam_problem("Adam", elements, BETAS, EPSILON, EVERYTHING),
    "rmsprop": lambda elements: rmsprop_problem(elements, 0.9, 1e-3, 0.9, False, EVERYTHING),
    "rmsproptf": lambda elements: rmsprop_problem(elements, 0.9, 1e-3, 0.9, True, EVERYTHING),
    "lion": lambda elements: lion_problem(elements, BETAS, EVERYTHING),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_and_options_are_those_of_a_cpu(kind):
    """Whose kernels are held against the formulas (tests/runtime/test_optim_kernels.py)."""
    from bnfuse.runtime.backends.cpu import execute
    from bnfuse.runtime.backends.resolve import resolve

    elements = 16 * 9 + 5
    targets = (gpu(multiprocessors=1), resolve("cpu", 1))
    kernels = [registry.UPDATE.generator(t.backend)(OTHERS[kind](elements), t) for t in targets]
    w, (g, *_), decay = data(elements)
    rng = np.random.default_rng(2)
    arrays = {name: np.abs(rng.normal(size=elements)).astype(np.float32) for name in state_of(kernels[0])}
    arrays |= {"parameters": w, "gradients": g, "decay": decay}
    arrays |= {"rates": 1 + decay, "clip": np.array([0.5], np.float32)}
    scalars = {"lr": LR, "step": 3, "share": 0.1, "divisor": 4.0}
    found = run_kernel(kernels[0], arrays, scalars=scalars)
    own = tuple(scalars[label] for label, _ in kernels[0].scalars)
    wanted = execute.call(kernels[1], arrays, scalars=own)
    for name in state_of(kernels[0]):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("elements", SIZES)
def test_the_norm_of_all_gradients_and_what_they_are_multiplied_by(elements):
    _, (g, *_), _ = data(elements)
    wanted = np.linalg.norm(g.astype(np.float64)) / 8
    kernel = gradient_norm(elements, wanted / 4, True, gpu(multiprocessors=1))
    found = run_kernel(kernel, {"gradients": g}, scalars={"divisor": 8.0})
    assert float(found["norm"][0]) == pytest.approx(wanted, rel=1e-6)
    assert float(found["clip"][0]) == pytest.approx(wanted / 4 / (wanted + 1e-6), rel=1e-6)
    g[elements // 2] = np.nan
    found = run_kernel(kernel, {"gradients": g}, scalars={"divisor": 8.0})
    assert np.isnan(found["norm"][0])
    assert np.isnan(found["clip"][0])


def test_gradients_are_added_up_and_averages_move_by_their_share():
    elements, target = 16 * 9 + 5, gpu(multiprocessors=1)
    _, (a, b, _), _ = data(elements)
    for keep, wanted in ((0, 0.5 * a), (1, b + 0.5 * a)):
        held = b if keep else np.full(elements, np.nan, np.float32)
        arrays = {"gradients": a, "accumulated": held}
        found = run_kernel(accumulate(elements, target), arrays, scalars={"keep": keep, "factor": 0.5})
        np.testing.assert_allclose(found["accumulated"], wanted, rtol=1e-6)
    found = run_kernel(average(elements, target), {"values": a, "average": b}, scalars={"share": 0.25})
    np.testing.assert_allclose(found["average"], 0.75 * b + 0.25 * a, rtol=1e-5, atol=1e-6)


def test_what_is_besides_compiles_without_spills():
    target = gpu("fp32", "sm_90", multiprocessors=1)
    for kernel in (
        update(adam_problem("AdamW", 100_003, BETAS, EPSILON, EVERYTHING), target),
        gradient_norm(100_003, 1.0, True, target),
        accumulate(100_003, target),
        average(100_003, target),
    ):
        assert_no_spills(kernel)
