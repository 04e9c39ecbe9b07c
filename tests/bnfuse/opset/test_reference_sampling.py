"""BatchNorm from sampled, local and other statistics, composed of the numpy references, against torch's autograd."""

import numpy as np
import pytest
import torch_statistics as definition

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.reference import run
from bnfuse.opset.spec import parse

try:
    import torch
except ImportError:  # these tests are deselected there, and counted
    torch = None
pytestmark = pytest.mark.torch

EXACT = 1e-12
EPSILON, MOMENTUM = 1e-3, 0.9
SHAPE = (6, 4, 5, 7)


class Problem:
    """x, scale, bias, running statistics and dz: one BatchNorm and what arrives at it."""

    def __init__(self, seed: int = 0, shape=SHAPE) -> None:
        rng = np.random.default_rng(seed)
        c = shape[1]
        self.rng = rng
        self.x, self.dz = rng.normal(size=shape) + 0.5, rng.normal(size=shape)
        self.scale, self.bias = 1 + rng.random(c), rng.normal(size=c)
        self.running = {"running_mean": rng.random(c), "running_variance": rng.random(c)}

    def torch(self, statistics):
        """y, dx, dscale and dbias of the definition; `statistics` gives mean and variance of x."""
        x, scale, bias = (torch.tensor(v, requires_grad=True) for v in (self.x, self.scale, self.bias))
        y = definition.normalise(x, statistics(x), scale, bias, EPSILON)
        y.backward(torch.tensor(self.dz))
        found = {"y": y, "dx": x.grad, "dgamma": scale.grad, "dbeta": bias.grad}
        return {name: value.detach().numpy() for name, value in found.items()}

    def forward(self, statistics):
        operands = {"scale": self.scale, "bias": self.bias, **self.running, **statistics}
        made = op("BatchNormFinalize", operands, epsilon=EPSILON, momentum=MOMENTUM)
        y = run(parse("NormalizePointwise"), {"x": self.x, **made}, {})["y"]
        return made, y

    def terms(self, statistics, made):
        reduced = op("BatchNormGradReduce", {"dz": self.dz, "x": self.x, **statistics, **made})
        return reduced, op("BatchNormGradTerms", {**reduced, **made})


def op(name, operands, **attributes):
    return run(PLAIN_OPS[name], operands, attributes)


def assert_equal(found, expected):
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= EXACT * np.linalg.norm(value), name


def sampled(problem: Problem, parts, weights):
    """The reference's BatchNorm: parts are (statistics op, addition op, operands, attributes, elements)."""
    found = [op(kind, {"x": problem.x, **where}, **extent) for kind, _, where, extent, _ in parts]
    statistics = found[0]
    if len(found) == 2:
        operands = {**found[0], "mean_2": found[1]["mean"], "variance_2": found[1]["variance"]}
        made = op("MixStatistics", operands, weight=weights[0])
        statistics = {"mean": made["mixed_mean"], "variance": made["mixed_variance"]}
    made, y = problem.forward(statistics)
    reduced, terms = problem.terms(statistics, made)
    dx = run(parse("PointwiseGradScale"), {"dy": problem.dz, "acc_p": made["a"]}, {})["dx"]
    for (_, addition, where, extent, count), part, weight in zip(parts, found, weights, strict=True):
        ends = op("SampledGradFinalize", {**terms, "mean": part["mean"]}, count=count, weight=weight)
        dx = op(addition, {"acc": dx, "x": problem.x, **ends, **where}, **extent)["dx"]
    return {"y": y, "dx": dx, **reduced}


def box(offset, extent):
    where = {"offset": np.array(offset)}
    return ("SampledStatistics", "AddSampled", where, {"extent": extent}, int(np.prod(extent)))


def points(values):
    return ("PointStatistics", "AddAtPoints", {"points": values}, {}, len(values))


BOXES = {
    "the first samples": ((0, 0, 0), (2, 5, 7)),
    "a run of samples": ((3, 0, 0), (2, 5, 7)),
    "a rectangle": ((0, 1, 3), (6, 2, 3)),
    "a column": ((0, 0, 6), (6, 5, 1)),
    "two elements": ((5, 4, 6), (1, 1, 1)),
    "everything": ((0, 0, 0), (6, 5, 7)),
}


@pytest.mark.parametrize("offset, extent", BOXES.values(), ids=BOXES)
def test_statistics_of_a_box(offset, extent):
    problem = Problem()
    found = sampled(problem, [box(offset, extent)], [1.0])
    assert_equal(found, problem.torch(lambda x: definition.of_box(x, offset, extent)))


@pytest.mark.parametrize("count", [1, 2, 17, 6 * 5 * 7])
def test_statistics_of_points(count):
    problem = Problem()
    chosen = np.sort(problem.rng.choice(6 * 5 * 7, count, replace=False))
    found = sampled(problem, [points(chosen)], [1.0])
    assert_equal(found, problem.torch(lambda x: definition.of_points(x, chosen)))


@pytest.mark.parametrize("weight", [0.5, 0.25, 0.9])
@pytest.mark.parametrize("kind", ["box", "points", "the other rows"])
def test_a_mixture_with_virtual_samples(kind, weight):
    """Two virtual rows before four real ones; x_hat and p are those of the mixture, q and w each part's own."""
    problem = Problem()
    virtual = ((0, 0, 0), (2, 5, 7))
    if kind == "points":
        chosen = np.sort(problem.rng.choice(4 * 35, 9, replace=False)) + 2 * 35
        part, real = points(chosen), lambda x: definition.of_points(x, chosen)
    else:
        where = ((2, 2, 1), (4, 2, 3)) if kind == "box" else ((2, 0, 0), (4, 5, 7))
        part, real = box(*where), lambda x: definition.of_box(x, *where)
    found = sampled(problem, [box(*virtual), part], [weight, 1 - weight])
    expected = problem.torch(lambda x: definition.mixed(definition.of_box(x, *virtual), real(x), weight))
    assert_equal(found, expected)


def test_running_statistics_take_the_samples():
    problem = Problem()
    statistics = op("SampledStatistics", {"x": problem.x, "offset": np.array([1, 2, 0])}, extent=(2, 3, 4))
    made, _ = problem.forward(statistics)
    part = problem.x[1:3, :, 2:5, :4]
    for name, batch in (("mean", part.mean((0, 2, 3))), ("variance", part.var((0, 2, 3)))):
        expected = problem.running[f"running_{name}"] * MOMENTUM + batch * (1 - MOMENTUM)
        np.testing.assert_allclose(made[f"new_running_{name}"], expected, rtol=1e-14)


@pytest.mark.parametrize("first, rows, samples", [(0, 3, 3), (1, 2, 3), (0, 2, 2), (0, 1, 1), (0, 6, 6), (2, 1, 3)])
def test_statistics_of_groups(first, rows, samples):
    """Each group is normalised by itself; its first samples may be left out of its statistics."""
    problem = Problem()

    def by_group(x, scale, bias):
        groups = [x[start : start + samples] for start in range(0, 6, samples)]
        parts = [definition.moments(group[first : first + rows]) for group in groups]
        normalised = [definition.normalise(g, p, scale, bias, EPSILON) for g, p in zip(groups, parts, strict=True)]
        return torch.cat(normalised)

    x, scale, bias = (torch.tensor(v, requires_grad=True) for v in (problem.x, problem.scale, problem.bias))
    y = by_group(x, scale, bias)
    y.backward(torch.tensor(problem.dz))
    expected = {"y": y, "dx": x.grad, "dgamma": scale.grad, "dbeta": bias.grad}

    chosen = {"first": first, "rows": rows, "samples": samples}
    statistics = op("LocalStatistics", {"x": problem.x}, **chosen)
    operands = {"scale": problem.scale, "bias": problem.bias, **problem.running, **statistics}
    made = op("LocalFinalize", operands, epsilon=EPSILON, momentum=MOMENTUM)
    found = op("LocalNormalize", {"x": problem.x, **made}, samples=samples)
    reduced = op("LocalGradReduce", {"dz": problem.dz, "x": problem.x, **statistics, **made}, samples=samples)
    terms = op("BatchNormGradTerms", {**reduced, **made})
    ends = op("SampledGradFinalize", {**terms, **statistics}, count=rows * 35, weight=1.0)
    scaled = op("LocalScale", {"dz": problem.dz, "p": made["a"]}, samples=samples)["dx"]
    found |= op("LocalAddSampled", {"acc": scaled, "x": problem.x, **ends}, **chosen)
    found |= {name: value.sum(axis=0) for name, value in reduced.items()}
    assert_equal(found, {name: value.detach().numpy() for name, value in expected.items()})
    running = problem.running["running_mean"] * MOMENTUM + statistics["mean"].mean(axis=0) * (1 - MOMENTUM)
    np.testing.assert_allclose(made["new_running_mean"], running, rtol=1e-14)


@pytest.mark.parametrize("tied", [False, True], ids=["", "several elements attain the extremes"])
@pytest.mark.parametrize("kind", ["L1", "Range"])
def test_other_estimates_of_the_variance(kind, tied):
    problem = Problem()
    if tied:
        problem.x = np.round(problem.x * 2) / 2
    found = estimated(problem, kind)
    assert_equal(found, problem.torch({"L1": definition.l1, "Range": definition.of_range}[kind]))


@pytest.mark.parametrize("kind", ["L1", "Range"])
def test_other_estimates_where_a_channel_has_one_element(kind):
    problem = Problem(shape=(1, 3, 1, 1))
    found = estimated(problem, kind)
    np.testing.assert_allclose(found["y"].ravel(), problem.bias)
    assert all(np.isfinite(value).all() for value in found.values())
    assert np.abs(found["dx"]).max() < 1e-12  # a mean of one element takes all of the gradient


def estimated(problem: Problem, kind: str):
    statistics = op(f"{kind}Statistics", {"x": problem.x})
    made, y = problem.forward(statistics)
    reduced, terms = problem.terms(statistics, made)
    count = problem.x.size // problem.x.shape[1]
    ends = op(f"{kind}GradFinalize", {**terms, **statistics}, count=count)
    operands = {"dz": problem.dz, "x": problem.x, "p": made["a"], **statistics, **ends}
    return {"y": y, "dx": op(f"{kind}GradInput", operands)["dx"], **reduced}
