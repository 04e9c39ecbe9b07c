"""docs/ops.md, generated from the grammar:  python -m bnfuse.opset.pages > docs/ops.md"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import (
    BACKWARD_CORES,
    DOMAIN,
    EPILOGUE_OPERANDS,
    EPILOGUE_RESULTS,
    FORWARD_CORES,
    INTEGERS,
    LABELS,
    MAPS_LIKE_X,
    PLUS,
    PROLOGUE_OPERANDS,
    SHARED,
    VERSION,
    OpSpec,
    attribute_type,
    is_of_images,
    parse,
)
from bnfuse.opset.texts import (
    CORES,
    EPILOGUE,
    IMAGE_GATE,
    LOCAL,
    MASKED,
    PLAIN_SECTIONS,
    PROLOGUE,
    WHOLE,
    Text,
)

CHOICE = "|".join(ACTIVATIONS)
GRADIENT_CHOICE = "|".join(f"{name}Grad" for name in ACTIVATIONS)

INTRODUCTION = f"""# Operators of `{DOMAIN}`, version {VERSION}

<!-- Generated: python -m bnfuse.opset.pages > docs/ops.md -->

An operator is a core with the steps on its way in (its prologue) and on its way out (its epilogue), and its name is
the list of its steps: `NormalizeReluConvStatistics` computes Conv(relu(a*x + b), weight) and the statistics of the
result. Steps come in this order:

    forward    [Normalize] [[Where] {CHOICE}] [Gate]
               [[SkipActivation] [SkipGate] Add|AddNormalized [Plus|PlusNormalized]*] [{CHOICE}]
               {"|".join(FORWARD_CORES)}
               [Bias] [Relu] [StoreInput] [Statistics|ImageStatistics]
    backward   [Slice] [GateGrad] [[AddGrad] [ActivationGrad] BatchNormGrad [ActivationGrad]]
               [Normalize] [[Where] {CHOICE}] [Gate [{CHOICE}]] [[SkipActivation] [SkipGate] Add|AddNormalized]
               {"|".join(BACKWARD_CORES)}
               [BiasGrad] [AddGradient|AddGatedGradient] [AddBatchNormGrad]
               [[Where] {GRADIENT_CHOICE} [AddSkipGradient]]
               [Reduce] [[Part] ReduceOther|ReduceGated|ReduceActivationGrad|ReduceAddedActivationGrad]*
               [Scale|Accumulate|ImageReduce|ImageReduceOther|ImageGate|ImageGateActivation]

The inputs of a node are, in order: dy and a MaxPool's indices (gradients only), x, the weight or a Resample's rows and
columns, the operands of the prologue's steps, those of the epilogue's. Its outputs: y and indices, or dx and dweight,
then the results of the epilogue's steps. Maps (x, y, dy, dx, skip, other, other_dy, other_x, skip_grad, acc, stored,
grad_x, x_i) are float32 [N, C, H, W], gates (gate, skip_gate, grad_gate, other_gate, gate_i) [N, C, 1, 1] or [1, C, 1,
1], indices int64, weights [M, C/group, kH, kW]; what says where a sample lies is int64; all other tensors are float32
[C], or [G, C] for G groups of samples; sums of images (image_mean, image_sum, ...) are float32 [N, C].
Coefficients of Normalize, AddNormalized, BatchNormGrad and AddBatchNormGrad, and a_i and b_i, may be [N, C], of each
sample its own. Operators of training graphs before any pass take maps [N, C, ...] of any rank from 2 on. Every
attribute is required.

In a file each operator is a model-local function of standard ONNX operators alone, so that any runtime executes it. The
functions need opset 13 or later.
"""


def render() -> str:
    """Give the page as text."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield INTRODUCTION
    yield from _steps("Prologue steps", PROLOGUE, PROLOGUE_OPERANDS, {})
    yield from _cores()
    yield from _steps("Epilogue steps", EPILOGUE, EPILOGUE_OPERANDS, EPILOGUE_RESULTS)
    for title, texts in PLAIN_SECTIONS.items():
        yield f"## {title}\n"
        for name, text in texts.items():
            op = PLAIN_OPS[name]
            rows = "G" if texts is LOCAL else "N" if name.startswith("GroupNorm") else ""
            attributes = (*op.attributes, *op.defaults)
            yield _entry(
                name, text, op.operands, op.results, attributes, op.defaults, rows=rows, any_rank=texts is WHOLE
            )


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
    taken: tuple[str, ...]
    given: tuple[str, ...]
    for name, text in texts.items():
        if name in PLUS:
            taken, given = ("plus_i", "plus_a_i", "plus_b_i")[: 1 if name == "Plus" else 3], ()
        elif name in (*SHARED, MASKED):
            more = {"ReduceGated": ("gate_i",), MASKED: ("a_i", "b_i")}
            taken, given = ("x_i", "mean_i", "inv_std_i", *more.get(name, ())), ("dbeta_i", "dgamma_i")
        else:
            known = "ImageGate" if name == IMAGE_GATE else name
            taken, given = operands.get(known, ("part_i",) if name == "Part" else ()), results.get(known, ())
        yield _entry(name, text, taken, given, step_attributes(name))


def step_attributes(name: str) -> tuple[str, ...]:
    """Give the attributes that a step brings: those that the smallest operator with it has beyond its core's."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name].attributes
    alone = ("Bias", "StoreInput", "Statistics", "Gate", "Add", "AddNormalized", "Where", "SkipActivation")
    if name == "Part":
        return ("start_i",)
    if name in (*alone, *PLUS, "SkipGate", "AddGrad", "AddSkipGradient", "ImageStatistics", MASKED, IMAGE_GATE):
        return ()
    prologue, epilogue = ((name,), ()) if name in PROLOGUE else ((), (name,))
    return OpSpec(prologue, "PointwiseGrad", epilogue).attributes


def _entry(
    name: str,
    text: Text,
    operands: Iterable[str],
    results: Iterable[str],
    attributes: Iterable[str],
    defaults: Mapping[str, int | float] | None = None,
    *,
    rows: str = "",
    any_rank: bool = False,
) -> str:
    lines = [
        f"### {name}\n",
        *(f"    {part}" for part in text.formula.split("; ")),
        "",
        textwrap.fill(text.about, 116),
        "",
    ]
    for title, names in (("Operands", operands), ("Results", results)):
        if listed := ", ".join(f"`{shown}` {shape_of(shown, rows=rows, any_rank=any_rank)}" for shown in names):
            lines.append(f"- {title}: {listed}")
    left_out = {shown: f", {value:g} where left out" for shown, value in (defaults or {}).items()}
    shown_as = [f"`{shown}` ({attribute_type(shown)}{left_out.get(shown, '')})" for shown in attributes]
    if listed := ", ".join(shown_as):
        lines.append(f"- Attributes: {listed}")
    return "\n".join(lines).rstrip() + "\n"


GATES = ("gate", "skip_gate", "grad_gate", "other_gate", "gate_i")
MAPS = (*MAPS_LIKE_X, "y", "dy", "dx", "dz", "acc", "stored", "grad_x", "x_i", "plus_i", "log_prob", "dscores")


WIDE = (
    "scale",
    "bias",
    "running_mean",
    "running_variance",
    "new_running_mean",
    "new_running_variance",
    "dscale",
    "dbias",
)


def shape_of(name: str, *, rows: str = "", any_rank: bool = False) -> str:
    """How the page writes a tensor's shape; coefficients of groups of samples, or of each, have so many `rows`."""
    if name in LABELS:
        return "[N, ...] int64 or int32"
    if name == "dlosses":
        return "[N, ...]"
    if name in ("weight", "dweight"):
        return "[M, C/group, kH, kW]"
    if name == "indices":
        return "[N, C, H, W] int64"
    if name in INTEGERS:
        return "[3] int64" if name == "offset" else "[points] int64"
    if name in GATES:
        return "[N, C, 1, 1]"
    if is_of_images(name):
        return "[N, C]"
    if name in MAPS:
        return "[N, C, ...]" if any_rank else "[N, C, H, W]"
    return f"[{rows}, C]" if rows and name not in WIDE else "[C]"


if __name__ == "__main__":
    print(render(), end="")
