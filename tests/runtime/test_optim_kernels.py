"""The optimisers' updates against their formulas in float64, and against torch."""

import numpy as np
import pytest

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.optim import adamw, sgd

TARGET = resolve("cpu", 2)
COUNT = 16 * 9 + 5  # whole blocks and a rest
SGDS = [(0.0, False), (0.9, False), (0.9, True)]
STEPS = 4


def data(seed=0):
    rng = np.random.default_rng(seed)
    parameters = rng.normal(size=COUNT).astype(np.float32)
    gradients = [rng.normal(size=COUNT).astype(np.float32) for _ in range(STEPS)]
    decay = np.where(np.arange(-(-COUNT // 16)) % 3 == 0, 0, 0.05).astype(np.float32)
    return parameters, gradients, decay


def run(kernel, lr, moments):
    parameters, gradients, decay = data()
    function = execute.compile_kernel(kernel)
    state = {"parameters": parameters, **{name: np.zeros(COUNT, np.float32) for name in moments}}
    for step, gradient in enumerate(gradients, 1):
        scalars = (lr * step, step) if len(moments) == 2 else (lr * step,)
        operands = {**state, "gradients": gradient, "decay": decay}
        found = execute.call(kernel, operands, scalars=scalars, function=function)
        state = {name: found[name] for name in state}
    return state["parameters"]


def sgd_reference(lr, momentum, nesterov):
    w, gradients, decay = data()
    w, decay = w.astype(np.float64), np.repeat(decay, 16)[:COUNT].astype(np.float64)
    v = np.zeros(COUNT)
    for step, g in enumerate(gradients, 1):
        g = g + decay * w
        v = momentum * v + g
        w = w - lr * step * (g + momentum * v if nesterov else v)
    return w


def adamw_reference(lr, beta1, beta2, epsilon):
    w, gradients, decay = data()
    w, decay = w.astype(np.float64), np.repeat(decay, 16)[:COUNT].astype(np.float64)
    m, v = np.zeros(COUNT), np.zeros(COUNT)
    for step, g in enumerate(gradients, 1):
        g = g.astype(np.float64)
        w = w * (1 - lr * step * decay)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - lr * step * (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + epsilon)
    return w


@pytest.mark.parametrize(("momentum", "nesterov"), SGDS)
def test_sgd(momentum, nesterov):
    moments = ("momentum",) if momentum else ()
    found = run(sgd(COUNT, momentum, nesterov, TARGET), 0.01, moments)
    np.testing.assert_allclose(found, sgd_reference(0.01, momentum, nesterov), rtol=1e-5, atol=1e-6)


def test_adamw():
    found = run(adamw(COUNT, (0.9, 0.999), 1e-8, TARGET), 0.01, ("first_moment", "second_moment"))
    np.testing.assert_allclose(found, adamw_reference(0.01, 0.9, 0.999, 1e-8), rtol=1e-5, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adamw"])
def test_torch_takes_the_same_steps(kind):
    import torch

    parameters, gradients, decay = data()
    groups = np.repeat(decay, 16)[:COUNT] > 0
    weights = [torch.tensor(parameters[groups == g].astype(np.float64), requires_grad=True) for g in (True, False)]
    if kind == "adamw":
        make = lambda *a, **k: torch.optim.AdamW(*a, betas=(0.9, 0.999), eps=1e-8, **k)  # noqa: E731
        found = run(adamw(COUNT, (0.9, 0.999), 1e-8, TARGET), 0.01, ("first_moment", "second_moment"))
    else:
        make = lambda *a, **k: torch.optim.SGD(*a, momentum=0.9, nesterov=kind == "nesterov", **k)  # noqa: E731
        found = run(sgd(COUNT, 0.9, kind == "nesterov", TARGET), 0.01, ("momentum",))
    optimizers = [make([w], lr=0.01, weight_decay=d) for w, d in zip(weights, (float(decay[1]), 0.0), strict=True)]
    for step, gradient in enumerate(gradients, 1):
        for w, optimizer, group in zip(weights, optimizers, (True, False), strict=True):
            optimizer.param_groups[0]["lr"] = 0.01 * step
            w.grad = torch.tensor(gradient[groups == group].astype(np.float64))
            optimizer.step()
    wanted = np.empty(COUNT)
    for w, group in zip(weights, (True, False), strict=True):
        wanted[groups == group] = w.detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
