"""The numpy reference against torch's autograd, in float64."""

import numpy as np
import pytest

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.reference import run
from bnfuse.opset.spec import parse

try:
    import torch
except ImportError:  # these tests are deselected there, and counted
    torch = None
pytestmark = pytest.mark.torch

RNG = np.random.default_rng(0)
EXACT = 1e-12
CONVOLUTIONS = [
    {"kernel_shape": [1, 1], "strides": [2, 2], "pads": [0, 0, 0, 0], "dilations": [1, 1], "group": 1},
    {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2], "group": 2},
    {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1], "dilations": [2, 2], "group": 6},
]
POOLS = [(2, 2, 0), (3, 2, 1), (3, 3, 1), (2, 3, 0), (3, 1, 1)]


def leaf(values: np.ndarray):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def column(values):
    return values[None, :, None, None]


def assert_equal(actual: np.ndarray, expected, tolerance: float = EXACT) -> None:
    expected = expected.detach().numpy()
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * (np.linalg.norm(expected) or 1)


def torch_conv(x, weight, conv):
    top, left, bottom, right = conv["pads"]
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    return torch.nn.functional.conv2d(
        padded, weight, stride=conv["strides"], dilation=conv["dilations"], groups=conv["group"]
    )


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_convolution_and_gradients(conv):
    x, weight = (
        leaf(RNG.normal(size=(2, 6, 7, 9))),
        leaf(RNG.normal(size=(6, 6 // conv["group"], *conv["kernel_shape"]))),
    )
    y = torch_conv(x, weight, conv)
    dy = RNG.normal(size=y.shape)
    y.backward(torch.tensor(dy))
    operands = {"x": x.detach().numpy(), "weight": weight.detach().numpy()}
    assert_equal(run(parse("Conv"), operands, conv)["y"], y)
    gradients = run(parse("ConvGradBiasGrad"), {"dy": dy, **operands}, conv)
    assert_equal(gradients["dx"], x.grad)
    assert_equal(gradients["dweight"], weight.grad)
    np.testing.assert_allclose(gradients["dbias"], dy.sum(axis=(0, 2, 3)))


@pytest.mark.parametrize("kernel, stride, pad", POOLS)
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("include", [0, 1])
def test_average_pool_and_gradient(kernel, stride, pad, ceil, include):
    x = leaf(RNG.normal(size=(2, 3, 8, 7)))
    y = torch.nn.functional.avg_pool2d(x, kernel, stride, pad, bool(ceil), bool(include))
    check_pool("AveragePool", x, y, kernel, stride, pad, ceil_mode=ceil, count_include_pad=include)


@pytest.mark.parametrize("kernel, stride, pad", POOLS)
@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("dilation", [1, 2])
def test_max_pool_and_gradient(kernel, stride, pad, ceil, dilation):
    x = leaf(RNG.normal(size=(2, 3, 8, 7)))
    y = torch.nn.functional.max_pool2d(x, kernel, stride, pad, dilation, bool(ceil))
    check_pool("MaxPool", x, y, kernel, stride, pad, ceil_mode=ceil, dilations=[dilation] * 2)


def test_max_pool_of_minus_infinity_has_indices_inside():
    x = np.full((1, 1, 3, 3), -np.inf)
    window = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 0, 0], "dilations": [1, 1], "ceil_mode": 0}
    assert run(parse("MaxPool"), {"x": x}, window)["indices"].ravel().tolist() == [0, 1, 3, 4]


def check_pool(name, x, y, kernel, stride, pad, **attributes) -> None:
    attributes |= {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    dy = RNG.normal(size=y.shape)
    y.backward(torch.tensor(dy))
    forward = run(parse(name), {"x": x.detach().numpy()}, attributes)
    assert_equal(forward["y"], y)
    operands = {"dy": dy, "x": x.detach().numpy(), "indices": forward.get("indices")}
    assert_equal(run(parse(f"{name}Grad"), operands, attributes)["dx"], x.grad)


def test_global_average_pool_and_gradient():
    x = leaf(RNG.normal(size=(2, 3, 5, 4)))
    y = x.mean(dim=(2, 3), keepdim=True)
    check_pool("GlobalAveragePool", x, y, 1, 1, 0)


@pytest.mark.parametrize(
    "kind, apply",
    [
        ("Relu", lambda z: torch.relu(z)),
        ("Clip", lambda z: torch.clamp(z, -0.5, 0.75)),
        ("QuickGelu", lambda z: z * torch.sigmoid(1.702 * z)),
    ],
)
def test_activations_and_gradients(kind, apply):
    a, b = RNG.normal(size=(2, 4))
    x = RNG.normal(size=(2, 4, 5, 5))
    z = leaf(a[:, None, None] * x + b[:, None, None])
    dy, attributes = RNG.normal(size=x.shape), {"min": -0.5, "max": 0.75, "alpha": 1.702}
    y = apply(z)
    y.backward(torch.tensor(dy))
    operands = {"x": x, "a": a, "b": b}
    assert_equal(run(parse(f"Normalize{kind}Pointwise"), operands, attributes)["y"], y)
    gradient = run(parse(f"NormalizePointwiseGrad{kind}Grad"), {"dy": dy, **operands}, attributes)
    assert_equal(gradient["dx"], z.grad)


def test_residual_block_and_its_gradient():
    """y = relu(bn(x) + (skip_a*skip + skip_b)): the sum is masked by the stored result."""
    x, skip = leaf(RNG.normal(size=(2, 3, 4, 4))), leaf(RNG.normal(size=(2, 3, 4, 4)))
    a, b, skip_a, skip_b = (torch.tensor(values) for values in RNG.normal(size=(4, 3)))
    y = torch.relu(column(a) * x + column(b) + column(skip_a) * skip + column(skip_b))
    gradients = RNG.normal(size=(2, *y.shape))
    y.backward(torch.tensor(gradients.sum(axis=0)))
    operands = {"x": x, "skip": skip, "a": a, "b": b, "skip_a": skip_a, "skip_b": skip_b}
    operands = {name: value.detach().numpy() for name, value in operands.items()}
    stored = run(parse("NormalizeAddNormalizedReluPointwise"), operands, {})["y"]
    assert_equal(stored, y)
    masked = run(
        parse("PointwiseGradAddGradientReluGrad"), {"dy": gradients[0], "other": gradients[1], "x": stored}, {}
    )["dx"]
    assert_equal(operands["a"][:, None, None] * masked, x.grad)
    assert_equal(operands["skip_a"][:, None, None] * masked, skip.grad)


# BatchNorm, split


def batch_norm_problem(gamma: float = 1.0, ratio: float = 0.5, constant: bool = False):
    """x [8, 5, 6, 6] with |mean|/std = ratio, scale, bias."""
    x = RNG.normal(size=(8, 5, 6, 6)) + ratio
    if constant:
        x[:, 2] = 3.0
    return x, gamma * (1 + RNG.random(5)), RNG.normal(size=5)


PROBLEMS = {
    "ordinary": {},
    "gamma is zero": {"gamma": 0.0},
    "gamma is tiny": {"gamma": 1e-6},
    "a channel is constant": {"constant": True},
    "mean is a thousand deviations": {"ratio": 1e3},
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_split_batch_norm_is_batch_norm(problem):
    """relu(bn(x)) through the halves, forward and backward, with running statistics."""
    values, scale, bias = batch_norm_problem(**problem)
    x, gamma, beta = leaf(values), leaf(scale), leaf(bias)
    running = RNG.random((2, 5))
    z = torch.nn.functional.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-5)
    dy = RNG.normal(size=values.shape)
    torch.relu(z).backward(torch.tensor(dy))

    statistics = run(PLAIN_OPS["BatchNormStatistics"], {"x": values}, {})
    state = {"scale": scale, "bias": bias, "running_mean": running[0], "running_variance": running[1]}
    final = run(PLAIN_OPS["BatchNormFinalize"], {**state, **statistics}, {"epsilon": 1e-5, "momentum": 0.9})
    coefficients = {"a": final["a"], "b": final["b"], "inv_std": final["inv_std"], "mean": statistics["mean"]}
    loose = 1e-9 if "ratio" in problem else EXACT  # a mean of 1000 costs three of sixteen digits in x itself
    assert_equal(run(parse("NormalizeReluPointwise"), {"x": values, **coefficients}, {})["y"], torch.relu(z), loose)
    np.testing.assert_allclose(final["new_running_mean"], running[0] * 0.9 + values.mean(axis=(0, 2, 3)) * 0.1)
    np.testing.assert_allclose(final["new_running_variance"], running[1] * 0.9 + values.var(axis=(0, 2, 3)) * 0.1)

    reduced = run(parse("NormalizePointwiseGradReluGradReduce"), {"dy": dy, "x": values, **coefficients}, {})
    assert_equal(reduced["dbeta"], beta.grad, loose)
    assert_equal(reduced["dgamma"], gamma.grad, loose)
    apart = run(PLAIN_OPS["BatchNormGradReduce"], {"dz": reduced["dx"], "x": values, **coefficients}, {})
    np.testing.assert_allclose(apart["dgamma"], reduced["dgamma"], rtol=1e-12)

    terms = run(PLAIN_OPS["BatchNormGradTerms"], {**reduced, **coefficients}, {})
    span = {"count": 8 * 6 * 6, "start": 0, "stop": 5}
    ends = run(PLAIN_OPS["BatchNormGradFinalize"], {**terms, **coefficients}, span)
    own = {"grad_x": values, "grad_p": final["a"], "grad_q": ends["q"], "grad_w": ends["w"]}
    dx = run(parse("BatchNormGradPointwiseGrad"), {"dy": reduced["dx"], **own}, {})["dx"]
    assert np.linalg.norm(dx - x.grad.numpy()) <= loose * max(np.linalg.norm(x.grad.numpy()), np.linalg.norm(dy))


@pytest.mark.parametrize("shape", [(6, 3), (3, 4, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)], ids=str)
def test_whole_batch_norm_of_any_rank_and_its_gradient(shape):
    x, scale, bias = leaf(RNG.normal(size=shape)), leaf(RNG.normal(size=shape[1])), leaf(RNG.normal(size=shape[1]))
    running = RNG.random((2, shape[1]))
    tracked = [torch.tensor(values) for values in running]
    y = torch.nn.functional.batch_norm(x, *tracked, scale, bias, training=True, momentum=0.25, eps=1e-3)
    dy = RNG.normal(size=shape)
    y.backward(torch.tensor(dy))
    operands = {name: value.detach().numpy() for name, value in (("x", x), ("scale", scale), ("bias", bias))}
    state = dict(zip(("running_mean", "running_variance"), running, strict=True))
    results = run(PLAIN_OPS["BatchNorm"], {**operands, **state}, {"epsilon": 1e-3, "momentum": 0.75})
    assert_equal(results["y"], y)
    assert_equal(results["new_running_mean"], tracked[0])
    variance = operands["x"].var(axis=(0, *range(2, len(shape))))  # biased, where torch's running one is not
    np.testing.assert_allclose(results["new_running_variance"], 0.75 * running[1] + 0.25 * variance)
    saved = {name: results[name] for name in ("mean", "inv_std")}
    gradients = run(PLAIN_OPS["BatchNormGrad"], {"dy": dy, **operands, **saved}, {})
    for name, value in (("dx", x), ("dscale", scale), ("dbias", bias)):
        assert_equal(gradients[name], value.grad)


@pytest.mark.parametrize("shape", [(6, 3), (3, 4, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_gradient_of_a_weighted_cross_entropy_that_ignores_a_label(shape, kind):
    scores, weights = leaf(RNG.normal(size=shape)), RNG.random(shape[1])
    labels = RNG.integers(shape[1], size=(shape[0], *shape[2:]))
    labels.flat[1] = -100
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels), torch.tensor(weights), ignore_index=-100)
    loss.backward()
    of_rows = np.where(labels == -100, 0, weights[labels % shape[1]])
    log_prob = torch.log_softmax(scores.detach(), 1).numpy()
    operands = {"dlosses": of_rows / of_rows.sum(), "log_prob": log_prob, "labels": labels.astype(kind)}
    assert_equal(run(PLAIN_OPS["SoftmaxCrossEntropyGrad"], operands, {})["dscores"], scores.grad)


def test_batch_norms_that_share_channels_accumulate_one_gradient():
    """Two BNs of different epsilon over ranges of one map and a reader that is no BN: one buffer of gradients.

    The first BN reads channels 0 to 4, the second 2 to 5.
    """
    values = RNG.normal(size=(4, 5, 3, 3))
    x = leaf(values)
    ranges, epsilons = [(0, 4), (2, 5)], [1e-5, 1e-2]
    direct, scales = RNG.normal(size=values.shape), [RNG.normal(size=stop - start) for start, stop in ranges]
    arriving = [RNG.normal(size=(4, stop - start, 3, 3)) for start, stop in ranges]
    loss = (x * torch.tensor(direct)).sum()
    for (start, stop), epsilon, scale, dz in zip(ranges, epsilons, scales, arriving, strict=True):
        part = x[:, start:stop]
        z = torch.nn.functional.batch_norm(part, None, None, torch.tensor(scale), None, training=True, eps=epsilon)
        loss = loss + (z * torch.tensor(dz)).sum()
    loss.backward()

    mean, variance = values.mean(axis=(0, 2, 3)), values.var(axis=(0, 2, 3))
    total, terms = direct.copy(), {"beta_term": np.zeros(5), "gamma_term": np.zeros(5)}
    for (start, stop), epsilon, scale, dz in zip(ranges, epsilons, scales, arriving, strict=True):
        channels = {"acc_start": start, "acc_stop": stop}
        inv_std = 1 / np.sqrt(variance[start:stop] + epsilon)
        operands = {
            "dy": dz, "x": values[:, start:stop], "mean": mean[start:stop], "inv_std": inv_std,
            "acc": total, "acc_p": scale * inv_std,
        }  # fmt: skip
        results = run(parse("PointwiseGradReduceAccumulate"), operands, channels)
        total[:, start:stop] = results["dx"]
        coefficients = {"a": scale * inv_std, "inv_std": inv_std}
        accumulators = {"beta_acc": terms["beta_term"], "gamma_acc": terms["gamma_term"]}
        added = run(PLAIN_OPS["BatchNormGradTermsAccumulate"], {**results, **coefficients, **accumulators}, channels)
        for name, part in added.items():
            terms[name][start:stop] = part
    # the producer of channels 1 to 4 reads its range of the buffer
    ends = run(PLAIN_OPS["BatchNormGradFinalize"], {**terms, "mean": mean[1:4]}, {"count": 36, "start": 1, "stop": 4})
    own = {"grad_x": values[:, 1:4], "grad_p": np.ones(3), "grad_q": ends["q"], "grad_w": ends["w"]}
    dx = run(parse("SliceBatchNormGradPointwiseGrad"), {"dy": total, **own}, {"grad_start": 1, "grad_stop": 4})["dx"]
    assert_equal(dx, x.grad[:, 1:4])


def test_reduction_for_another_batch_norm_shares_the_gradient():
    dy, own, other = RNG.normal(size=(3, 2, 4, 5, 5))
    statistics = {"mean": np.arange(4.0), "inv_std": np.full(4, 2.0)}
    operands = {"dy": dy, "x": own, **statistics, "x_1": other, "mean_1": np.ones(4), "inv_std_1": np.full(4, 0.5)}
    results = run(parse("PointwiseGradReduceReduceOther"), operands, {})
    alone = {"dy": dy, "x": other, "mean": np.ones(4), "inv_std": np.full(4, 0.5)}
    assert np.array_equal(results["dbeta_1"], results["dbeta"])
    assert np.array_equal(results["dgamma_1"], run(parse("PointwiseGradReduce"), alone, {})["dgamma"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_of_the_operands_is_kept(dtype):
    x = RNG.normal(size=(1, 2, 4, 4)).astype(dtype)
    results = run(parse("QuickGeluConvStatistics"), {"x": x, "weight": np.ones((2, 2, 3, 3), dtype)}, {
        "alpha": 1.7, "dilations": [1, 1], "group": 1, "kernel_shape": [3, 3], "pads": [0] * 4, "strides": [1, 1],
    })  # fmt: skip
    assert {value.dtype for value in results.values()} == {np.dtype(dtype)}
