"""docs/ops.md, generated from the grammar:  python -m bnfuse.opset.pages > docs/ops.md"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator

from bnfuse.opset.spec import (
    ACTIVATION_ATTRIBUTES,
    BACKWARD_CORES,
    DOMAIN,
    EPILOGUE_OPERANDS,
    EPILOGUE_RESULTS,
    FORWARD_CORES,
    PLAIN_OPS,
    PROLOGUE_OPERANDS,
    VERSION,
    OpSpec,
    attribute_type,
    parse,
)


@dataclasses.dataclass(frozen=True)
class Text:
    """A step's formula and what there is to know about it."""

    formula: str
    about: str


PROLOGUE = {
    "Slice": Text(
        "dy <- dy[:, grad_start : grad_stop]",
        "Reads a range of the channels of dy: the gradient of a Concat's result serves each producer without a Split. "
        "What follows (grad_x among it) has the channels of the range.",
    ),
    "BatchNormGrad": Text(
        "dy <- grad_p*dy + grad_q*grad_x + grad_w",
        "The input gradient of the BatchNorm that follows the core in the forward graph, computed where it is read. "
        "grad_x is that BatchNorm's input, a map like dy; grad_p, grad_q, grad_w come from BatchNormFinalize (its a) "
        "and BatchNormGradFinalize.",
    ),
    "Normalize": Text(
        "x <- a*x + b",
        "The normalise half of a BatchNorm, with a and b from BatchNormFinalize. Gradients recompute it from x.",
    ),
    "Relu": Text("x <- max(x, 0)", "In a gradient it is recomputed for the weight gradient."),
    "Clip": Text("x <- min(max(x, min), max)", "ReLU6 and its like. In a gradient as Relu."),
    "QuickGelu": Text("x <- x*sigmoid(alpha*x)", "SiLU is alpha = 1. In a gradient as Relu."),
    "Add": Text("x <- x + skip", "A residual sum. skip has the shape of x."),
    "AddNormalized": Text(
        "x <- x + (skip_a*skip + skip_b)", "A residual sum whose second operand has a BatchNorm of its own."
    ),
}

CORES = {
    "Conv": Text("y = Conv(x, weight)", "As in ONNX, without its bias. Padding is zero after the prologue."),
    "MaxPool": Text("y, indices = MaxPool(x)", "indices are flat positions in x (NCHW), the first of equal maxima."),
    "AveragePool": Text("y = AveragePool(x)", "As in ONNX."),
    "GlobalAveragePool": Text("y = mean of x over H, W", "y has the shape [N, C, 1, 1]."),
    "Map": Text("y = x", "No core: stores what the prologue made, or takes statistics of it."),
    "ConvGrad": Text(
        "dx, dweight = gradients of Conv",
        "dweight reads the activated x. dx is the gradient at what the convolution read, before the epilogue.",
    ),
    "ConvGradInput": Text(
        "dx = input gradient of Conv",
        "x gives the shape, and is read where an epilogue step needs it.",
    ),
    "ConvGradWeight": Text("dweight = weight gradient of Conv", "BiasGrad is the only epilogue step it takes."),
    "MaxPoolGrad": Text(
        "dx = 0, then dx[indices] += dy", "indices are the forward operator's. The function body needs opset 16."
    ),
    "AveragePoolGrad": Text("dx = each dy, shared out over its window", "Exact for every pad, stride and ceil_mode."),
    "GlobalAveragePoolGrad": Text("dx = dy/(H*W), everywhere", "x gives the shape."),
    "MapGrad": Text("dx = dy", "No core. x is an operand only where an epilogue step reads it."),
}

EPILOGUE = {
    "Bias": Text("y <- y + bias", "The bias of a convolution."),
    "StoreInput": Text(
        "stored = x", "The x that the core read is also written, for a second reader. It has x's shape."
    ),
    "Statistics": Text(
        "mean, variance = those of y over N, H, W",
        "The statistics half of the BatchNorm that reads y. The variance is biased, never a difference of raw sums: it "
        "is right to 1e-5 where the mean is a thousand standard deviations.",
    ),
    "BiasGrad": Text("dbias = sum of dy over N, H, W", "dy as it is after the prologue."),
    "AddGradient": Text("dx <- dx + other", "The gradient of another reader of the same map, added before the mask."),
    "ReluGrad": Text(
        "dx <- dx * (z > 0)",
        "z is x after Normalize and before the activation; without Normalize it is x, which may then be the output of "
        "the Relu as well, because both have the same sign. The gradient at 0 is 0.",
    ),
    "ClipGrad": Text("dx <- dx * (min <= z <= max)", "The gradient at the bounds is 1."),
    "QuickGeluGrad": Text(
        "dx <- dx * s*(1 + alpha*z*(1 - s)), s = sigmoid(alpha*z)", "z is x after Normalize, before the activation."
    ),
    "Reduce": Text(
        "dbeta = sum of dx, dgamma = sum of dx*(x - mean)*inv_std, over N, H, W",
        "The reduction half of a BatchNorm's gradient. It reads dx after the mask.",
    ),
    "ReduceOther": Text(
        "dbeta_i = sum of dx, dgamma_i = sum of dx*(x_i - mean_i)*inv_std_i",
        "The same for another BatchNorm that shares dx, as the two of a residual sum do. Repeatable: i = 1, 2, ...",
    ),
    "Scale": Text("dx <- acc_p*dx", "The first term of a gradient that BatchNorms over the same channels add up."),
    "Accumulate": Text(
        "dx <- acc[:, acc_start : acc_stop] + acc_p*dx",
        "A later term of that gradient. The range has as many channels as dx; a runtime may update acc in place.",
    ),
}

PLAIN = {
    "BatchNormStatistics": Text(
        "mean, variance = those of x over N, H, W", "For a BatchNorm whose input no operator of ours writes."
    ),
    "BatchNormFinalize": Text(
        "inv_std = 1/sqrt(variance + epsilon); a = scale*inv_std; b = bias - mean*a; "
        "new_running = running*momentum + batch*(1 - momentum)",
        "From statistics to the coefficients of Normalize, and the running statistics. The running variance takes the "
        "biased batch variance, as onnxruntime's BatchNormInternal does.",
    ),
    "BatchNormGradReduce": Text(
        "dbeta = sum of dz, dgamma = sum of dz*(x - mean)*inv_std, over N, H, W",
        "For a gradient dz that no operator of ours writes.",
    ),
    "BatchNormGradTerms": Text(
        "beta_term = a*dbeta; gamma_term = a*inv_std*dgamma",
        "What one BatchNorm contributes to the input gradient of its channels.",
    ),
    "BatchNormGradTermsAccumulate": Text(
        "beta_term = beta_acc[acc_start : acc_stop] + a*dbeta; "
        "gamma_term = gamma_acc[acc_start : acc_stop] + a*inv_std*dgamma",
        "The same, added to what other BatchNorms over these channels contributed.",
    ),
    "BatchNormGradFinalize": Text(
        "q = -gamma_term[start : stop]/count; w = -beta_term[start : stop]/count - q*mean",
        "The coefficients of BatchNormGrad for the channels of one producer; count is N*H*W. With one BatchNorm the "
        "factor p is its a; where the factors were applied in Scale and Accumulate, p is one.",
    ),
}

INTRODUCTION = f"""# Operators of `{DOMAIN}`, version {VERSION}

<!-- Generated: python -m bnfuse.opset.pages > docs/ops.md -->

An operator is a core with the steps on its way in (its prologue) and on its way out (its epilogue), and its name is
the list of its steps: `NormalizeReluConvStatistics` computes Conv(relu(a*x + b), weight) and the statistics of the
result. Steps come in this order:

    forward    [Normalize] [Relu|Clip|QuickGelu] [Add|AddNormalized] [Relu|Clip|QuickGelu]
               Conv|MaxPool|AveragePool|GlobalAveragePool|Map
               [Bias] [StoreInput] [Statistics]
    backward   [Slice] [BatchNormGrad] [Normalize] [Relu|Clip|QuickGelu]
               ConvGrad|ConvGradInput|ConvGradWeight|MaxPoolGrad|AveragePoolGrad|GlobalAveragePoolGrad|MapGrad
               [BiasGrad] [AddGradient] [ReluGrad|ClipGrad|QuickGeluGrad] [Reduce] [ReduceOther]* [Scale|Accumulate]

The inputs of a node are, in order: dy and a MaxPool's indices (gradients only), x, the weight, the operands of the
prologue's steps, those of the epilogue's. Its outputs: y and indices, or dx and dweight, then the results of the
epilogue's steps. Maps (x, y, dy, dx, skip, other, acc, stored, grad_x, x_i) are float32 [N, C, H, W], indices int64,
weights [M, C/group, kH, kW]; all other tensors are float32 [C]. Every attribute is required.

In a file each operator is a model-local function of standard ONNX operators (`com.microsoft` ConvGrad where there is
a convolution's gradient), so that any runtime that knows these executes it. The functions need opset 13 or later.
"""


def render() -> str:
    """The page as text."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield INTRODUCTION
    yield from _steps("Prologue steps", PROLOGUE, PROLOGUE_OPERANDS, {})
    yield from _cores()
    yield from _steps("Epilogue steps", EPILOGUE, EPILOGUE_OPERANDS, EPILOGUE_RESULTS)
    yield "## Operators that are not composed of steps\n"
    for name, text in PLAIN.items():
        op = PLAIN_OPS[name]
        yield _entry(name, text, op.operands, op.results, op.attributes)


def _cores() -> Iterator[str]:
    yield "## Cores\n"
    for name, text in CORES.items():
        op = parse(name)
        assert op is not None
        yield _entry(name, text, op.operands, op.results, {**FORWARD_CORES, **BACKWARD_CORES}[name])


def _steps(
    title: str, texts: dict[str, Text], operands: dict[str, tuple[str, ...]], results: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    yield f"## {title}\n"
    for name, text in texts.items():
        if name == "ReduceOther":
            taken: tuple[str, ...] = ("x_i", "mean_i", "inv_std_i")
            given: tuple[str, ...] = ("dbeta_i", "dgamma_i")
        else:
            taken, given = operands.get(name, ()), results.get(name, ())
        yield _entry(name, text, taken, given, step_attributes(name))


def step_attributes(name: str) -> tuple[str, ...]:
    """The attributes that a step brings: those that the smallest operator with it has beyond its core's."""
    if name in ACTIVATION_ATTRIBUTES:
        return ACTIVATION_ATTRIBUTES[name]
    if name in ("Bias", "StoreInput", "Statistics", "Add", "AddNormalized"):
        return ()
    prologue, epilogue = ((name,), ()) if name in PROLOGUE else ((), (name,))
    return OpSpec(prologue, "MapGrad", epilogue).attributes


def _entry(name: str, text: Text, operands: Iterable[str], results: Iterable[str], attributes: Iterable[str]) -> str:
    lines = [
        f"### {name}\n",
        *(f"    {part}" for part in text.formula.split("; ")),
        "",
        textwrap.fill(text.about, 116),
        "",
    ]
    for title, names in (("Operands", operands), ("Results", results)):
        if listed := ", ".join(f"`{shown}` {shape_of(shown)}" for shown in names):
            lines.append(f"- {title}: {listed}")
    if listed := ", ".join(f"`{shown}` ({attribute_type(shown)})" for shown in attributes):
        lines.append(f"- Attributes: {listed}")
    return "\n".join(lines).rstrip() + "\n"


MAPS = ("x", "y", "dy", "dx", "dz", "skip", "other", "acc", "stored", "grad_x", "x_i")


def shape_of(name: str) -> str:
    """How the page writes a tensor's shape."""
    if name in ("weight", "dweight"):
        return "[M, C/group, kH, kW]"
    if name == "indices":
        return "[N, C, H, W] int64"
    return "[N, C, H, W]" if name in MAPS else "[C]"


if __name__ == "__main__":
    print(render(), end="")
