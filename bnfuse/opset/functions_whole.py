"""Bodies of the operators that a training graph has before any pass, a part of `functions.py`.

Maps are [N, C, ...] of any rank from 2 on: inside a body they are [N, C, the rest].
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from bnfuse.opset.body import Body

FLOAT, INT64 = int(ir.DataType.FLOAT), int(ir.DataType.INT64)
SUMMED = (0, 2)  # all but the channels of [N, C, the rest]


def folded(x: ir.Value, body: Body) -> ir.Value:
    """Give a map as [N, C, the rest]."""
    return body("Reshape", x, body.constant([0, 0, -1]))


def unfolded(x: ir.Value, like: ir.Value, body: Body) -> ir.Value:
    """Give [N, C, the rest] the shape of another map."""
    return body("Reshape", x, body("Shape", like))


def column(vector: ir.Value, body: Body) -> ir.Value:
    """Give [C] as [1, C, 1]."""
    return body("Reshape", vector, body.constant([1, -1, 1]))


def summed(x: ir.Value, body: Body) -> ir.Value:
    """Sum [N, C, the rest] to [C]."""
    return body("ReduceSum", x, body.constant(SUMMED), keepdims=0)


def elements(x: ir.Value, vector: ir.Value, body: Body) -> ir.Value:
    """Count the elements of a channel, as a float; `vector` has one value a channel."""
    return body("Cast", body("Div", body("Size", x), body("Size", vector)), to=FLOAT)


def running(name: str, batch: ir.Value, body: Body) -> ir.Value:
    """Give the running statistic `name` after the step, from that of the batch."""
    momentum = body.attribute("momentum")
    added = body("Mul", batch, body("Sub", body.constant(1.0), momentum))
    return body("Add", body("Mul", body[f"running_{name}"], momentum), added)


def unbiased(variance: ir.Value, count: ir.Value, body: Body) -> ir.Value:
    """Give the unbiased estimate of a variance over `count` elements, a float; the variance itself where that is at
    most 1."""
    one = body.constant(1.0)
    estimate = body("Div", body("Mul", variance, count), body("Sub", count, one))
    return body("Where", body("Greater", count, one), estimate, variance)


def _batch_norm(body: Body) -> tuple[ir.Value, ...]:
    """Two passes over x: a difference of raw sums would cancel where |mean| is large."""
    x = folded(body["x"], body)
    count = elements(x, body["scale"], body)
    mean = body("Div", summed(x, body), count)
    centred = body("Sub", x, column(mean, body))
    variance = body("Div", summed(body("Mul", centred, centred), body), count)
    inv_std = body.power(body("Add", variance, body.attribute("epsilon")), -0.5)
    scaled = body("Mul", centred, column(body("Mul", body["scale"], inv_std), body))
    y = unfolded(body("Add", scaled, column(body["bias"], body)), body["x"], body)
    corrected = body("Mul", count, body("Cast", body.attribute("unbiased"), to=FLOAT))
    estimate = unbiased(variance, corrected, body)
    return y, running("mean", mean, body), running("variance", estimate, body), mean, inv_std


def _batch_norm_grad(body: Body) -> tuple[ir.Value, ...]:
    """Compute dx = scale*inv_std*(dy - mean of dy - normalised*mean of dy*normalised)."""
    x, dy = folded(body["x"], body), folded(body["dy"], body)
    centred = body("Sub", x, column(body["mean"], body))
    normalised = body("Mul", centred, column(body["inv_std"], body))
    dbias, dscale = summed(dy, body), summed(body("Mul", dy, normalised), body)
    count = elements(x, body["scale"], body)
    shares = [column(body("Div", total, count), body) for total in (dbias, dscale)]
    own = body("Sub", body("Sub", dy, shares[0]), body("Mul", normalised, shares[1]))
    dx = body("Mul", own, column(body("Mul", body["scale"], body["inv_std"]), body))
    return unfolded(dx, body["x"], body), dscale, dbias


def of_channels(x: ir.Value, body: Body) -> ir.Value:
    """Give the mean over the channels of [N, C, the rest], as [N, 1, the rest]."""
    count = body("Cast", body("Size", body["scale"]), to=FLOAT)
    return body("Div", body("ReduceSum", x, body.constant((1,)), keepdims=1), count)


def _layer_norm(body: Body) -> tuple[ir.Value, ...]:
    x = folded(body["x"], body)
    mean = of_channels(x, body)
    centred = body("Sub", x, mean)
    variance = of_channels(body("Mul", centred, centred), body)
    inv_std = body.power(body("Add", variance, body.attribute("epsilon")), -0.5)
    scaled = body("Mul", body("Mul", centred, inv_std), column(body["scale"], body))
    y = unfolded(body("Add", scaled, column(body["bias"], body)), body["x"], body)
    shape = body("Shape", body["x"])
    batch = body.slice(shape, body.constant((0,)), body.constant((1,)), axis=0)
    rest = body.slice(shape, body.constant((2,)), body.constant((2**31 - 1,)), axis=0)
    pixels = body("Concat", batch, rest, axis=0)
    return y, body("Reshape", mean, pixels), body("Reshape", inv_std, pixels)


def _layer_norm_grad(body: Body) -> tuple[ir.Value, ...]:
    """Compute dx = inv_std*(g - mean of g - normalised*mean of g*normalised), g = dy*scale, means over the channels."""
    x, dy = folded(body["x"], body), folded(body["dy"], body)
    batch = body.slice(body("Shape", body["x"]), body.constant((0,)), body.constant((1,)), axis=0)
    form = body("Concat", batch, body.constant((1,)), body.constant((-1,)), axis=0)
    mean, inv_std = (body("Reshape", body[name], form) for name in ("mean", "inv_std"))
    normalised = body("Mul", body("Sub", x, mean), inv_std)
    g = body("Mul", dy, column(body["scale"], body))
    own = body(
        "Sub",
        body("Sub", g, of_channels(g, body)),
        body("Mul", normalised, of_channels(body("Mul", g, normalised), body)),
    )
    dx = unfolded(body("Mul", own, inv_std), body["x"], body)
    return dx, summed(body("Mul", dy, normalised), body), summed(dy, body)


def _softmax_cross_entropy_grad(body: Body) -> tuple[ir.Value, ...]:
    """Labels are compared with the classes: OneHot would count negative ones from the end."""
    rows = body.constant([0, 1, -1])
    labels, dlosses = (body("Reshape", body[name], rows) for name in ("labels", "dlosses"))
    count = body.slice(body("Shape", body["log_prob"]), body.constant([1]), body.constant([2]), axis=0)
    first, step = (body("Squeeze", body.constant([value]), body.constant([0])) for value in (0, 1))
    classes = column(body("Range", first, body("Squeeze", count, body.constant([0])), step), body)
    own = body("Cast", body("Equal", body("Cast", labels, to=INT64), classes), to=FLOAT)
    probabilities = body("Exp", folded(body["log_prob"], body))
    dscores = body("Mul", body("Sub", probabilities, own), dlosses)
    return (unfolded(dscores, body["log_prob"], body),)


WHOLE: dict[str, Callable[[Body], tuple[ir.Value, ...]]] = {
    "BatchNorm": _batch_norm,
    "BatchNormGrad": _batch_norm_grad,
    "LayerNorm": _layer_norm,
    "LayerNormGrad": _layer_norm_grad,
    "SoftmaxCrossEntropyGrad": _softmax_cross_entropy_grad,
}
