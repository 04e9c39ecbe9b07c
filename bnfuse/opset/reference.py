"""What every `ai.bnfuse` operator computes, in numpy: the oracle of the function bodies and of the kernels.

One short function per step, composed by `run` in the order of the name. Everything is computed in the dtype of
the operands (float64 operands make a float64 oracle). Maps are NCHW, weights OIHW, coefficients have one value
per channel. Convolutions are matrix products over unfolded windows (im2col).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnfuse.core.windows import axes_of, transposed_size
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.expressions import Algebra, Expression, interpret
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.reference_group import GROUP
from bnfuse.opset.reference_ranks import RANKS
from bnfuse.opset.reference_sampling import SAMPLING
from bnfuse.opset.reference_whole import WHOLE, running, unbiased
from bnfuse.opset.spec import (
    ACTIVATION_GRADS,
    ADDED_REDUCTIONS,
    CONV_GRADS,
    IMAGE_GATES,
    MASKED_REDUCTIONS,
    PLUS,
    SHARED,
    TRANSPOSED,
    WEIGHT_GRADS,
    OpSpec,
    applied,
    around_batch_norm_grad,
    further_terms,
    masks_gated,
    of_skip,
    parts_of,
    skip_activation,
)

Array = np.ndarray
Operands = Mapping[str, Array]
Attributes = Mapping[str, Any]

SUMMED = (0, 2, 3)  # N, H, W
OF_IMAGE = (2, 3)  # H, W


def run(op: OpSpec | PlainOp, operands: Operands, attributes: Attributes) -> dict[str, Array]:
    """Give the results of an operator by name, from its operands by name."""
    if isinstance(op, PlainOp):
        values = PLAIN[op.name](operands, attributes)
        return dict(zip(op.results, values, strict=True))
    results = (_backward if op.is_gradient else _forward)(op, operands, attributes)
    return {name: results[name] for name in op.results}


def per_channel(values: Array) -> Array:
    """[C] as [C, 1, 1], which meets a map channel by channel, and [N, C] as [N, C, 1, 1]."""
    return values[..., None, None]


# Forward


def _forward(op: OpSpec, operands: Operands, attributes: Attributes) -> dict[str, Array]:
    x = operands["x"]
    for step, of_some in applied(op.prologue):
        made = _prologue_step(step, x, operands, attributes, skip_activation(op.prologue))
        x = np.where(per_channel(operands["active"]) > 0, made, x) if of_some else made
    results: dict[str, Array] = {"stored": x}
    if op.core == "Conv":
        y = conv(x, operands["weight"], attributes)
    elif op.core == "ConvTranspose":
        y = conv_transpose(x, operands["weight"], attributes)
    elif op.core == "MaxPool":
        y, results["indices"] = max_pool(x, attributes)
    elif op.core == "AveragePool":
        y = average_pool(x, attributes)
    elif op.core == "Resample":
        y = operands["rows"] @ x @ operands["columns"].T
    elif op.core == "GlobalAveragePool":
        y = x.mean(axis=(2, 3), keepdims=True)
    else:
        y = x
    if "Bias" in op.epilogue:
        y = y + per_channel(operands["bias"])
    if "Relu" in op.epilogue:
        y = activation("Relu", y, attributes)
    if "Statistics" in op.epilogue:
        results["mean"], results["variance"] = statistics(y)
    if "ImageStatistics" in op.epilogue:
        results["image_mean"], results["image_variance"] = y.mean(axis=OF_IMAGE), y.var(axis=OF_IMAGE)
    results["y"] = y
    return results


def _prologue_step(
    step: str, x: Array, operands: Operands, attributes: Attributes, skip_kind: str | None = None
) -> Array:
    """One step of a prologue, on the map that the core reads; `skip_kind` is the activation of the skip."""
    if step == "Normalize":
        return per_channel(operands["a"]) * x + per_channel(operands["b"])
    if step == "Gate":
        return operands["gate"] * x
    if step in ("Add", "AddNormalized"):
        skip = operands["skip"]
        if step == "AddNormalized":
            skip = per_channel(operands["skip_a"]) * skip + per_channel(operands["skip_b"])
        skip = activation(skip_kind, skip, attributes) if skip_kind else skip
        x = x + (operands["skip_gate"] * skip if "skip_gate" in operands else skip)
        for name, a, b in further_terms(operands):
            plus = operands[name]
            x = x + (per_channel(operands[a]) * plus + per_channel(operands[b]) if a in operands else plus)
        return x
    return x if step in ("SkipGate", *PLUS) or of_skip(step) else activation(step, x, attributes)


def activation(kind: str, z: Array, attributes: Attributes) -> Array:
    """Compute an activation of z."""
    return formula(ACTIVATIONS[kind].value, attributes, z=z)


def activation_grad(kind: str, dx: Array, z: Array, attributes: Attributes) -> Array:
    """Give the gradient at z, from the gradient dx at activation(z)."""
    return formula(GRADIENTS[kind].gradient, attributes, z=z, d=dx)


def formula(expression: Expression, attributes: Attributes, **variables: Array) -> Array:
    """Evaluate a formula on arrays."""
    known = {**attributes, **variables}
    return np.asarray(interpret(expression, NUMPY, lambda leaf: known[leaf.name] if leaf.name else leaf.constant))


def sigmoid(z: Array) -> Array:
    """Compute 1/(1 + e**-z) without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * z))


_ERF = np.frompyfunc(math.erf, 1, 1)


def erf(z: Array) -> Array:
    """Compute the error function; numpy has none."""
    return np.asarray(_ERF(z)).astype(np.result_type(z))


def elu(z: Array) -> Array:
    """Compute z where z > 0, else e**z - 1."""
    return np.where(np.greater(z, 0), z, np.expm1(np.minimum(z, 0)))


NUMPY: Algebra = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "fma": lambda x, y, z: x * y + z,
    "absolute": np.abs,
    "sign": np.sign,
    "relu": lambda x: np.maximum(x, 0),
    "clamp": np.clip,
    "minimum": np.minimum,
    "exp": np.exp,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "erf": erf,
    "softplus": lambda z: np.logaddexp(z, np.zeros_like(z)),
    "elu": elu,
    "greater": np.greater,
    "at_least": np.greater_equal,
    "at_most": np.less_equal,
    "both": np.logical_and,
    "where": lambda condition, *parts: np.where(condition, *(np.asarray(p, np.result_type(*parts)) for p in parts)),
}


def statistics(y: Array) -> tuple[Array, Array]:
    """Mean and biased variance per channel, in two passes."""
    return y.mean(axis=SUMMED), y.var(axis=SUMMED)


# Backward


def _backward(op: OpSpec, operands: Operands, attributes: Attributes) -> dict[str, Array]:
    dy = operands["dy"]
    if "Slice" in op.prologue:
        dy = dy[:, attributes["grad_start"] : attributes["grad_stop"]]
    if "GateGrad" in op.prologue:
        dy = operands["grad_gate"] * dy
    if "BatchNormGrad" in op.prologue:
        dy = _own_batch_norm_grad(op, dy, operands, attributes)
    results: dict[str, Array] = {"dbias": dy.sum(axis=SUMMED)} if "BiasGrad" in op.epilogue else {}
    z = operands.get("x", dy)  # where x is no operand, no step reads z
    if "Normalize" in op.prologue:
        z = _prologue_step("Normalize", z, operands, attributes)
    if masks_gated(op.prologue):
        z = operands["gate"] * z
    act = z
    for kind in op.activations:
        act = activation(kind, z, attributes)
    if "Where" in op.prologue:
        act = np.where(per_channel(operands["active"]) > 0, act, z)
    if "Gate" in op.prologue and not masks_gated(op.prologue):
        act = operands["gate"] * act
    for step in op.prologue:
        if step in ("Add", "AddNormalized"):
            act = _prologue_step(step, act, operands, attributes, skip_activation(op.prologue))
    if op.weighs:
        ends = (act, dy) if op.is_transposed else (dy, act)
        results["dweight"] = conv_grad_weight(*ends, operands["weight"].shape, attributes)
    if op.core not in WEIGHT_GRADS:
        dx = _core_grad(op, dy, operands, attributes)
        results |= _epilogue(op, dx, z, operands, attributes)
    return results


def _own_batch_norm_grad(op: OpSpec, dy: Array, operands: Operands, attributes: Attributes) -> Array:
    """Give dy behind BatchNormGrad and the gradients of activations around it."""
    before, behind = around_batch_norm_grad(op.prologue)
    x = operands["grad_x"]
    dy = dy + operands["grad_other"] if "AddGrad" in op.prologue else dy
    if before:
        z = per_channel(operands["grad_a"]) * x + per_channel(operands["grad_b"])
        dy = activation_grad(before, dy, z, attributes)
    if behind is None:
        return batch_norm_grad(dy, "grad_", operands)
    read = activation(behind.removesuffix("Grad"), x, attributes)
    return activation_grad(behind, batch_norm_grad(dy, "grad_", {**operands, "grad_x": read}), x, attributes)


def _core_grad(op: OpSpec, dy: Array, operands: Operands, attributes: Attributes) -> Array:
    """Give the gradient at what the core read."""
    if op.core in TRANSPOSED:
        height, width = operands["x"].shape[2:]  # an output_padding of a stride or more makes further windows
        return conv(dy, operands["weight"], attributes)[:, :, :height, :width]
    if op.core in CONV_GRADS:
        return conv_grad_input(dy, operands["x"].shape, operands["weight"], attributes)
    if op.core == "MaxPoolGrad":
        return max_pool_grad(dy, operands["indices"], operands["x"].shape)
    if op.core == "AveragePoolGrad":
        return average_pool_grad(dy, operands["x"].shape, attributes)
    if op.core == "ResampleGrad":
        return np.asarray(operands["rows"].T @ dy @ operands["columns"])
    if op.core == "GlobalAveragePoolGrad":
        n, c, h, w = operands["x"].shape
        return np.broadcast_to(dy / (h * w), (n, c, h, w))
    return dy


def _epilogue(op: OpSpec, dx: Array, z: Array, operands: Operands, attributes: Attributes) -> dict[str, Array]:
    """Give the epilogue of a gradient: dx, and the reductions of BatchNorms over it."""
    results = {}
    other = 0
    for step in op.epilogue:
        if step == "AddGradient":
            dx = dx + operands["other"]
        elif step == "AddGatedGradient":
            dx = dx + operands["other_gate"] * operands["other"]
        elif step == "AddBatchNormGrad":
            dx = dx + batch_norm_grad(operands["other_dy"], "other_", operands)
        elif step == "AddSkipGradient":
            dx = dx + operands["skip_grad"]
        elif step in ACTIVATION_GRADS:
            masked = activation_grad(step, dx, z, attributes)
            dx = np.where(per_channel(operands["masked"]) > 0, masked, dx) if "Where" in op.epilogue else masked
        elif step == "Reduce":
            results["dbeta"], results["dgamma"] = reduce(dx, operands["x"], operands["mean"], operands["inv_std"])
        elif step in SHARED:
            other += 1
            x = operands[f"x_{other}"]
            if other in parts_of(op.epilogue):
                x = _extended(x, attributes[f"start_{other}"], dx.shape[1])
            shared = operands[f"gate_{other}"] * dx if step == "ReduceGated" else dx
            if step in MASKED_REDUCTIONS:
                a, b = (per_channel(operands[f"{name}_{other}"]) for name in "ab")
                whole = dx + operands[f"other_{other}"] if step in ADDED_REDUCTIONS else dx
                shared = activation_grad(MASKED_REDUCTIONS[step], whole, a * x + b, attributes)
            if other in parts_of(op.epilogue):
                shared = np.where(per_channel(operands[f"part_{other}"]) > 0, shared, 0)
            sums = reduce(shared, x, operands[f"mean_{other}"], operands[f"inv_std_{other}"])
            results[f"dbeta_{other}"], results[f"dgamma_{other}"] = sums
        elif step == "Scale":
            dx = per_channel(operands["acc_p"]) * dx
        elif step == "Accumulate":
            written = operands["acc"][:, attributes["acc_start"] : attributes["acc_stop"]]
            dx = written + per_channel(operands["acc_p"]) * dx
        elif step in ("ImageReduce", "ImageReduceOther"):
            read = operands["x" if step == "ImageReduce" else "reduced_x"]
            results["image_sum"], results["image_dot"] = dx.sum(axis=OF_IMAGE), (dx * read).sum(axis=OF_IMAGE)
        elif step in IMAGE_GATES:
            results |= _image_gate(IMAGE_GATES[step], dx, operands, attributes)
    return {"dx": dx, **results}


def _image_gate(kind: str | None, dx: Array, operands: Operands, attributes: Attributes) -> dict[str, Array]:
    """Sum over each image what the gradient of a gate and of the BatchNorm before it take of dx, [N, C] each."""
    x = operands["gated_x"]
    mean, inv_std, a, b = (per_channel(operands[f"gated_{name}"]) for name in ("mean", "inv_std", "a", "b"))
    z, normalised = a * x + b, (x - mean) * inv_std
    value = activation(kind, z, attributes) if kind else z
    slope = activation_grad(f"{kind}Grad", np.ones_like(z), z, attributes) if kind else np.ones_like(z)
    summed = {
        "image_gate": dx * value,
        "image_beta": dx * slope,
        "image_gamma": dx * slope * normalised,
        "image_slope": slope,
        "image_tilt": slope * normalised,
    }
    return {name: values.sum(axis=OF_IMAGE) for name, values in summed.items()}


def _extended(x: Array, start: int, channels: int) -> Array:
    """Put zeros around the channels of a map, so that they stand from `start` on in so many."""
    return np.pad(x, ((0, 0), (start, channels - start - x.shape[1]), (0, 0), (0, 0)))


def batch_norm_grad(dz: Array, prefix: str, operands: Operands) -> Array:
    """Compute p*dz + q*x + w, the input gradient of a BN; the names of the other operands begin with `prefix`."""
    p, q, w = (per_channel(operands[f"{prefix}{name}"]) for name in "pqw")
    return p * dz + q * operands[f"{prefix}x"] + w


def reduce(dz: Array, x: Array, mean: Array, inv_std: Array) -> tuple[Array, Array]:
    """Sum: dbeta = sum dz and dgamma = sum dz*(x - mean)*inv_std, over N, H, W."""
    normalised = (x - per_channel(mean)) * per_channel(inv_std)
    return dz.sum(axis=SUMMED), (dz * normalised).sum(axis=SUMMED)


# Convolution


def conv(x: Array, weight: Array, attributes: Attributes) -> Array:
    """y[n, m, p] = sum over c, i, j of weight[m, c, i, j] * x[n, c, window p at i, j]."""
    columns, (h, w) = _columns(x, attributes)
    out = weight.shape[0]
    kernels = weight.reshape(attributes["group"], out // attributes["group"], -1)
    return (kernels @ columns).reshape(x.shape[0], out, h, w)


def conv_grad_weight(dy: Array, x: Array, shape: tuple[int, ...], attributes: Attributes) -> Array:
    """Compute the gradient at the weight, of `shape` OIHW."""
    columns, _ = _columns(x, attributes, dy.shape[2:])
    return (_by_group(dy, attributes) @ columns.swapaxes(-1, -2)).sum(axis=0).reshape(shape)


def conv_grad_input(dy: Array, shape: tuple[int, ...], weight: Array, attributes: Attributes) -> Array:
    """Compute the gradient at the input, of `shape` NCHW."""
    group = attributes["group"]
    kernels = weight.reshape(group, weight.shape[0] // group, -1)
    columns = kernels.swapaxes(-1, -2) @ _by_group(dy, attributes)  # [N, group, C/group * kernel, pixels]
    columns = columns.reshape(*shape[:2], *attributes["kernel_shape"], *dy.shape[2:])
    return fold(columns.transpose(0, 1, 4, 5, 2, 3), shape, attributes)


def conv_transpose(x: Array, weight: Array, attributes: Attributes) -> Array:
    """Compute the transposed convolution: the input gradient, at x, of the convolution that has this weight."""
    size = transposed_size(attributes, x.shape[2:], attributes["output_padding"])
    return conv_grad_input(x, (x.shape[0], weight.shape[1] * attributes["group"], *size), weight, attributes)


def _columns(x: Array, attributes: Attributes, out: tuple[int, ...] | None = None) -> tuple[Array, tuple[int, int]]:
    """Unfold x to [N, group, C/group * kernel, output pixels]; gives the output's height and width too.

    There are `out` of them; by default as many as windows fit.
    """
    found = windows(x, attributes)
    found = found if out is None else found[:, :, : out[0], : out[1]]
    n, _, h, w = found.shape[:4]
    return found.transpose(0, 1, 4, 5, 2, 3).reshape(n, attributes["group"], -1, h * w), (h, w)


def _by_group(dy: Array, attributes: Attributes) -> Array:
    n, out, h, w = dy.shape
    return dy.reshape(n, attributes["group"], out // attributes["group"], h * w)


# Windows, shared by convolutions and pools


def window_counts(extent: tuple[int, ...], attributes: Attributes) -> tuple[int, int]:
    """Output height and width."""
    rows, columns = axes_of(attributes, extent)
    ceil = bool(attributes.get("ceil_mode"))
    return rows.count(ceil), columns.count(ceil)


def windows(x: Array, attributes: Attributes, fill: float = 0) -> Array:
    """Give a read-only view [N, C, OH, OW, KH, KW] of the padded x."""
    out = window_counts(x.shape[2:], attributes)
    padded = _pad(x, _overhangs(x.shape[2:], attributes), attributes, fill)
    n, c, h, w = padded.strides
    (stride_h, stride_w), (dilation_h, dilation_w) = attributes["strides"], _dilations(attributes)
    return np.lib.stride_tricks.as_strided(
        padded,
        (*x.shape[:2], *out, *attributes["kernel_shape"]),
        (n, c, h * stride_h, w * stride_w, h * dilation_h, w * dilation_w),
        writeable=False,
    )


def fold(found: Array, shape: tuple[int, ...], attributes: Attributes) -> Array:
    """Give the adjoint of `windows`: sums [N, C, OH, OW, KH, KW] into a map of `shape`."""
    out = (found.shape[2], found.shape[3])
    (stride_h, stride_w), (dilation_h, dilation_w) = attributes["strides"], _dilations(attributes)
    padded = _pad(np.zeros(shape, found.dtype), _overhangs(shape[2:], attributes), attributes, 0)
    for i in range(found.shape[4]):
        for j in range(found.shape[5]):
            rows = slice(i * dilation_h, i * dilation_h + (out[0] - 1) * stride_h + 1, stride_h)
            columns = slice(j * dilation_w, j * dilation_w + (out[1] - 1) * stride_w + 1, stride_w)
            padded[:, :, rows, columns] += found[:, :, :, :, i, j]
    top, left = attributes["pads"][:2]
    return padded[:, :, top : top + shape[2], left : left + shape[3]]


def _dilations(attributes: Attributes) -> tuple[int, ...]:
    return tuple(attributes.get("dilations", (1, 1)))


def _overhangs(extent: tuple[int, ...], attributes: Attributes) -> list[int]:
    """Rows and columns that the last window needs beyond the padded map (ceil_mode only)."""
    return [axis.overhang(bool(attributes.get("ceil_mode"))) for axis in axes_of(attributes, extent)]


def _pad(x: Array, overhang: list[int], attributes: Attributes, fill: float) -> Array:
    top, left, bottom, right = attributes["pads"]
    return np.pad(x, ((0, 0), (0, 0), (top, bottom + overhang[0]), (left, right + overhang[1])), constant_values=fill)


# Pools


def max_pool(x: Array, attributes: Attributes) -> tuple[Array, Array]:
    """Give the maxima, and the flat NCHW index in x of each (the first of equal ones)."""
    found = windows(x, attributes, fill=-np.inf)
    found = found.reshape(*found.shape[:4], -1)
    places = windows(np.arange(x.size, dtype=np.int64).reshape(x.shape), attributes, fill=-1)
    places = places.reshape(*places.shape[:4], -1)
    # padding never wins: where all values are equal to it, the first real one is taken
    winner = np.where(places < 0, -np.inf, found).argmax(axis=-1)[..., None]
    first_real = (places >= 0).argmax(axis=-1)[..., None]
    winner = np.where(np.take_along_axis(places, winner, -1) < 0, first_real, winner)
    return np.take_along_axis(found, winner, -1)[..., 0], np.take_along_axis(places, winner, -1)[..., 0]


def max_pool_grad(dy: Array, indices: Array, shape: tuple[int, ...]) -> Array:
    """Add dy up at the flat indices of the maxima, into a map of `shape`."""
    dx = np.zeros(shape, dy.dtype)
    np.add.at(dx.reshape(-1), indices.reshape(-1), dy.reshape(-1))
    return dx


def average_pool(x: Array, attributes: Attributes) -> Array:
    """Compute the averages over windows."""
    return windows(x, attributes).sum(axis=(4, 5)) / _window_elements(x.shape[2:], attributes).astype(x.dtype)


def average_pool_grad(dy: Array, shape: tuple[int, ...], attributes: Attributes) -> Array:
    """Share each dy out over its window, into a map of `shape`."""
    share = dy / _window_elements(shape[2:], attributes).astype(dy.dtype)
    return fold(np.broadcast_to(share[..., None, None], (*dy.shape, *attributes["kernel_shape"])), shape, attributes)


def _window_elements(extent: tuple[int, ...], attributes: Attributes) -> Array:
    """[1, 1, OH, OW]: the elements each window averages; padding as count_include_pad says, overhang never."""
    inside = np.ones((1, 1, *extent))
    if not attributes["count_include_pad"]:
        return windows(inside, attributes).sum(axis=(4, 5))
    bare = {**attributes, "pads": (0, 0, 0, 0), "ceil_mode": 0}
    out = window_counts(extent, attributes)
    overhang = _overhangs(extent, attributes)
    counted = _pad(inside, [0, 0], attributes, 1)
    counted = np.pad(counted, ((0, 0), (0, 0), (0, overhang[0]), (0, overhang[1])))
    return windows(counted, bare)[:, :, : out[0], : out[1]].sum(axis=(4, 5))


# Operators that are not composed of steps


def _finalize(operands: Operands, attributes: Attributes) -> tuple[Array, ...]:
    inv_std = 1 / np.sqrt(operands["variance"] + attributes["epsilon"])
    a = operands["scale"] * inv_std
    batch = {"mean": operands["mean"], "variance": unbiased(operands["variance"], attributes.get("elements", 0.0))}
    new = (running(operands, name, value, attributes) for name, value in batch.items())
    return a, operands["bias"] - operands["mean"] * a, inv_std, *new


def _terms(operands: Operands) -> tuple[Array, Array]:
    a = operands["a"]
    return a * operands["dbeta"], a * operands["inv_std"] * operands["dgamma"]


def _terms_accumulate(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    channels = slice(attributes["acc_start"], attributes["acc_stop"])
    beta_term, gamma_term = _terms(operands)
    return operands["beta_acc"][channels] + beta_term, operands["gamma_acc"][channels] + gamma_term


def _grad_finalize(operands: Operands, attributes: Attributes) -> tuple[Array, Array]:
    channels = slice(attributes["start"], attributes["stop"])
    q = -operands["gamma_term"][channels] / attributes["count"]
    return q, -operands["beta_term"][channels] / attributes["count"] - q * operands["mean"]


PLAIN: dict[str, Callable[[Operands, Attributes], tuple[Array, ...]]] = {
    "BatchNormStatistics": lambda operands, _: statistics(operands["x"]),
    "BatchNormFinalize": _finalize,
    "BatchNormGradReduce": lambda operands, _: reduce(*(operands[name] for name in ("dz", "x", "mean", "inv_std"))),
    "BatchNormGradTerms": lambda operands, _: _terms(operands),
    "BatchNormGradTermsAccumulate": _terms_accumulate,
    "BatchNormGradFinalize": _grad_finalize,
    **WHOLE,
    **SAMPLING,
    **GROUP,
    **RANKS,
}
