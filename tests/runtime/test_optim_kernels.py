"""The optimisers' updates against their formulas in float64, and against torch."""

import dataclasses
import math

import numpy as np
import pytest

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.optim import (
    PLAIN,
    Options,
    adam_problem,
    lion_problem,
    rmsprop_problem,
    scalars_of,
    sgd_problem,
)
from bnfuse.runtime.kernels.cpu.optim import accumulate, average, gradient_norm, update

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

TARGET = resolve("cpu", 2)
COUNT = 16 * 9 + 5  # whole blocks and a rest
STEPS = 4
EVERYTHING = Options(rates=True, divided=True, clipped=True, averaged=True)
BOUNDED = Options(bound=0.4)

PROBLEMS = {
    "sgd": lambda options: sgd_problem(COUNT, 0.0, False, options),
    "momentum": lambda options: sgd_problem(COUNT, 0.9, False, options),
    "nesterov": lambda options: sgd_problem(COUNT, 0.9, True, options),
    "adamw": lambda options: adam_problem("AdamW", COUNT, (0.9, 0.999), 1e-8, options),
    "adam": lambda options: adam_problem("Adam", COUNT, (0.9, 0.999), 1e-8, options),
    "rmsprop": lambda options: rmsprop_problem(COUNT, 0.99, 1e-8, 0.0, False, options),
    "rmsprop+momentum": lambda options: rmsprop_problem(COUNT, 0.9, 1e-3, 0.9, False, options),
    "rmsproptf": lambda options: rmsprop_problem(COUNT, 0.9, 1e-3, 0.0, True, options),
    "rmsproptf+momentum": lambda options: rmsprop_problem(COUNT, 0.9, 1e-3, 0.9, True, options),
    "lion": lambda options: lion_problem(COUNT, (0.9, 0.99), options),
}
LR, DIVISOR, CLIP, SHARE = 0.01, 4.0, 0.7, 0.05


def data(seed=0):
    rng = np.random.default_rng(seed)
    parameters = rng.normal(size=COUNT).astype(np.float32)
    gradients = [rng.normal(size=COUNT).astype(np.float32) for _ in range(STEPS)]
    blocks = np.arange(-(-COUNT // 16))
    decay = np.where(blocks % 3 == 0, 0, 0.05).astype(np.float32)
    return parameters, gradients, decay, (1.0 + blocks % 2).astype(np.float32)


def run(kind, options=PLAIN):
    kernel = update(PROBLEMS[kind](options), TARGET)
    w, gradients, decay, rates = data()
    function = execute.compile_kernel(kernel)
    first = 1.0 if "tf" in kind else 0.0
    names = [param.name for param in kernel.params if param.access == "inout"]
    state = {name: np.full(COUNT, first if name == "second_moment" else 0.0, np.float32) for name in names}
    state |= {"parameters": w} | ({"average": w} if options.averaged else {})
    for step, gradient in enumerate(gradients, 1):
        known = {"lr": LR * step, "step": step, "share": SHARE, "divisor": DIVISOR}
        scalars = tuple(known[label] for label, _ in scalars_of(kernel.problem))
        operands = {**state, "gradients": gradient, "decay": decay}
        operands |= {"rates": rates} if options.rates else {}
        operands |= {"clip": np.array([CLIP], np.float32)} if options.clipped else {}
        found = execute.call(kernel, operands, scalars=scalars, function=function)
        state = {name: found[name] for name in state}
    return state


def formula(kind, options=PLAIN):
    """Parameters and their average after the steps, in float64."""
    w, gradients, decay, rates = data()
    w, decay, rates = w.astype(np.float64), np.repeat(decay, 16)[:COUNT].astype(float), np.repeat(rates, 16)[:COUNT]
    m, v, mean = np.zeros(COUNT), np.full(COUNT, 1.0 if "tf" in kind else 0.0), w
    for step, g in enumerate(gradients, 1):
        lr = LR * step * (rates if options.rates else 1.0)
        g = g.astype(np.float64) / (DIVISOR if options.divided else 1) * (CLIP if options.clipped else 1)
        if options.bound is not None:
            g = np.clip(g, -options.bound, options.bound)
        w, m, v = one(kind, w, g, m, v, lr, decay, step)
        mean = mean + SHARE * (w - mean)
    return w, mean


def one(kind, w, g, m, v, lr, decay, step):
    momentum = 0.0 if kind in ("sgd", "rmsprop", "rmsproptf") else 0.9
    if kind == "adamw":
        w = w * (1 - lr * decay)
    elif kind != "lion":
        g = g + decay * w
    if kind in ("sgd", "momentum", "nesterov"):
        m = momentum * m + g
        return w - lr * (g + momentum * m if kind == "nesterov" else m), m, v
    if kind in ("adam", "adamw"):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return w - lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8), m, v
    if kind == "lion":
        w = w * (1 - lr * decay) - lr * np.sign(0.9 * m + 0.1 * g)
        return w, 0.99 * m + 0.01 * g, v
    alpha, epsilon = (0.99, 1e-8) if kind == "rmsprop" else (0.9, 1e-3)
    v = alpha * v + (1 - alpha) * g * g
    if "tf" in kind:
        m = momentum * m + lr * g / np.sqrt(v + epsilon)
        return w - m, m, v
    m = momentum * m + g / (np.sqrt(v) + epsilon)
    return w - lr * m, m, v


@pytest.mark.parametrize("kind", PROBLEMS)
def test_is_the_formula(kind):
    np.testing.assert_allclose(run(kind)["parameters"], formula(kind)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [EVERYTHING, BOUNDED], ids=["everything", "bounded"])
@pytest.mark.parametrize("kind", ["nesterov", "adamw", "rmsproptf+momentum", "lion"])
def test_options_change_rate_and_gradient_and_keep_an_average(kind, options):
    found, (wanted, mean) = run(kind, options), formula(kind, options)
    np.testing.assert_allclose(found["parameters"], wanted, rtol=1e-5, atol=1e-6)
    if options.averaged:
        np.testing.assert_allclose(found["average"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["momentum", "lion"])
def test_a_gradient_that_is_no_number_is_told_by_what_it_updates(kind):
    kernel = update(PROBLEMS[kind](BOUNDED), TARGET)
    w, gradients, decay, _ = data()
    gradients[0][77] = np.nan
    operands = {"parameters": w, "momentum": np.zeros(COUNT, np.float32), "gradients": gradients[0], "decay": decay}
    found = execute.call(kernel, operands, scalars=(LR,), function=execute.compile_kernel(kernel))
    assert np.flatnonzero(~np.isfinite(found["parameters"])).tolist() == [77]


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adamw", "adam", "rmsprop", "rmsprop+momentum"])
def test_torch_takes_the_same_steps(kind):
    import torch

    parameters, gradients, decay, _ = data()
    groups = np.repeat(decay, 16)[:COUNT] > 0
    weights = [torch.tensor(parameters[groups == g].astype(np.float64), requires_grad=True) for g in (True, False)]
    make = {
        "momentum": lambda w, d: torch.optim.SGD([w], LR, momentum=0.9, weight_decay=d),
        "nesterov": lambda w, d: torch.optim.SGD([w], LR, momentum=0.9, nesterov=True, weight_decay=d),
        "adamw": lambda w, d: torch.optim.AdamW([w], LR, weight_decay=d),
        "adam": lambda w, d: torch.optim.Adam([w], LR, weight_decay=d),
        "rmsprop": lambda w, d: torch.optim.RMSprop([w], LR, weight_decay=d),
        "rmsprop+momentum": lambda w, d: torch.optim.RMSprop([w], LR, 0.9, 1e-3, d, momentum=0.9),
    }[kind]
    optimizers = [make(w, d) for w, d in zip(weights, (float(decay[1]), 0.0), strict=True)]
    for step, gradient in enumerate(gradients, 1):
        for w, optimizer, group in zip(weights, optimizers, (True, False), strict=True):
            optimizer.param_groups[0]["lr"] = LR * step
            w.grad = torch.tensor(gradient[groups == group].astype(np.float64))
            optimizer.step()
    wanted = np.empty(COUNT)
    for w, group in zip(weights, (True, False), strict=True):
        wanted[groups == group] = w.detach().numpy()
    np.testing.assert_allclose(run(kind)["parameters"], wanted, rtol=1e-5, atol=1e-6)


# -- what goes before and beside it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [5, 16, 16 * 256 * 3 + 16 * 7 + 3])
def test_the_norm_of_all_gradients_and_what_they_are_multiplied_by(elements):
    gradients = np.random.default_rng(1).normal(size=elements).astype(np.float32) * 1e30
    wanted = np.linalg.norm(gradients.astype(np.float64)) / 3
    found = []
    for threads in (1, 2, 5):
        target = dataclasses.replace(TARGET, threads=threads)
        kernel = gradient_norm(elements, wanted / 2, True, target)
        found.append(execute.call(kernel, {"gradients": gradients}, scalars=(3.0,)))
    assert float(found[0]["norm"][0]) == pytest.approx(wanted, rel=1e-6)
    assert float(found[0]["clip"][0]) == pytest.approx(0.5, rel=1e-6)
    for other in found[1:]:  # whatever the number of threads, to the bit
        np.testing.assert_array_equal(other["norm"], found[0]["norm"])


@pytest.mark.parametrize(("limit", "value", "factor"), [(1e9, 1.0, 1.0), (math.inf, 1.0, 1.0), (1.0, np.nan, np.nan)])
def test_small_gradients_are_left_alone_and_what_is_no_number_stays_none(limit, value, factor):
    gradients = np.full(40, value, np.float32)
    found = execute.call(gradient_norm(40, limit, False, TARGET), {"gradients": gradients})
    np.testing.assert_array_equal(found["clip"], np.array([factor], np.float32))


def test_gradients_are_added_up_and_the_first_ones_replace_what_is_there():
    kernel = accumulate(COUNT, TARGET)
    function = execute.compile_kernel(kernel)
    _, gradients, *_ = data()
    total = np.full(COUNT, np.nan, np.float32)
    for index, gradient in enumerate(gradients):
        operands = {"gradients": gradient, "accumulated": total}
        total = execute.call(kernel, operands, scalars=(int(index > 0), 0.5), function=function)["accumulated"]
    np.testing.assert_allclose(total, 0.5 * np.sum(gradients, 0, dtype=np.float64), rtol=1e-5, atol=1e-6)


def test_an_average_moves_by_its_share():
    kernel = average(COUNT, TARGET)
    a, (b, *_), *_ = data()
    found = execute.call(kernel, {"values": b, "average": a}, scalars=(0.25,))
    np.testing.assert_allclose(found["average"], 0.75 * a + 0.25 * b, rtol=1e-5, atol=1e-6)
