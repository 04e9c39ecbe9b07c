"""The optimisers' updates on a GPU, interpreted, against their formulas in float64."""

import numpy as np
import pytest
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu, run_kernel

from bnfuse.runtime.kernels.cuda.optim import BLOCKS, EACH, THREADS, adamw, sgd

BETAS, EPSILON, LR = (0.9, 0.999), 1e-8, 0.01
SIZES = [1, 16 * 9 + 5, EACH * THREADS * BLOCKS + 77]  # a rest alone, a part of a block, two turns of all blocks
STEPS = 3


def make(kind, elements, precision="fp32", arch="sm_90"):
    target = gpu(precision, arch, multiprocessors=1)
    if kind == "adamw":
        return adamw(elements, BETAS, EPSILON, target)
    return sgd(elements, 0.0 if kind == "sgd" else 0.9, kind == "nesterov", target)


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
        scalars = {"lr": LR * step, "step": step, "loss_scale": scale}
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
    scalars = {"lr": LR, "step": 1, "loss_scale": 8.0}
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
