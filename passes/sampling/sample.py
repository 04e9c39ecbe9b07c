"""Sampled statistics: a BatchNorm learns its mean and variance from a part of the batch ([Chen18]; docs/maths.md).

    y, rm', rv', mean, inv_std =        mean, variance = SampledStatistics(x, offset)         the sample only
      BatchNorm(x, g, b, ...)           a, b', inv_std, rm', rv' = BatchNormFinalize(...)
                                    ->  y  = NormalizePointwise(x, a, b')
    dx, dg, db =                        db, dg = BatchNormGradReduce(dz, x, mean, inv_std)    over all elements
      BatchNormGrad(dz, x,              q, w   = SampledGradFinalize(BatchNormGradTerms(...), mean)
        g, mean, inv_std)               s      = PointwiseGradScale(dz, a)                    a*dz
                                        dx     = AddSampled(s, x, q, w, offset)               + q*x + w in the sample

The offset is an input of the graph, drawn once an epoch; where the sample stays in one place it is a constant. Points
are sampled by PointStatistics and AddAtPoints. A mixture with virtual samples has MixStatistics of two parts, and an
AddSampled for each.

Refuses a BatchNorm whose input is not a static float32 map of rank 4: its statistics stay full.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import at_node
from bnfuse.graph.sampling import METADATA_KEY, Box, Points, Sampling, sampling_of
from bnfuse.graph.signature import METADATA_KEY as ROLES_KEY
from bnfuse.graph.signature import GraphSignature
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.passes.dialect.source_ops import is_batch_norm, is_map, sizes
from bnfuse.passes.fission.batch_norm import finalize_and_normalize, type_statistics
from bnfuse.passes.fission.batch_norm_grad import SCALED, emit_terms, gradients_of, has_input_gradient
from bnfuse.passes.rewriter import Editor, FusionResult
from bnfuse.passes.sampling.parts import Part, effective_elements, parts_of
from bnfuse.passes.sampling.spec import LayerSample, SamplePlan


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A BatchNorm's statistics: the spec, how many elements a channel they are taken from, and the share that is.

    `ratio` is of the elements of the real samples, so virtual ones can bring it above 1.
    """

    node: str
    spec: str
    ratio: float
    elements: int


@dataclasses.dataclass(frozen=True)
class Placed:
    """A part of the batch with the value that says where it is."""

    part: Part
    where: ir.Value

    @property
    def operands(self) -> dict[str, ir.Value]:
        """Give the operand that says where the part is, by its name."""
        return {"points" if self.part.extent is None else "offset": self.where}

    @property
    def attributes(self) -> dict[str, Any]:
        """Give the attributes of an operator on the part."""
        return {} if self.part.extent is None else {"extent": self.part.extent}


class Sample(ir.passes.InPlacePass):
    """Take the statistics of BatchNorms from parts of the batch; `virtual` samples are at its front already.

    `sampled` says afterwards what was done.
    """

    def __init__(self, plan: SamplePlan, signature: GraphSignature, *, virtual: int = 0) -> None:
        super().__init__()
        self.plan, self.signature, self.virtual = plan, signature, virtual
        self.sampled: list[Sampled] = []

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place. Raises BnfuseError for a BatchNorm whose sample has one value per channel."""
        editor = Editor(model, "sample")
        places: dict[str, Box | Points] = {}
        for node in [node for node in model.graph if is_batch_norm(node)]:
            spec = self.plan.of(node.name or "")
            if spec.kind in ("l1bn", "rbn") or (spec.kind == "bn" and not self.virtual):
                continue
            x = node.inputs[0]
            if not is_map(x):
                editor.refuse(node, "its statistics stay full: its input is not a float32 map of rank 4, static")
                continue
            parts = parts_of(spec, sizes(x), self.virtual)
            assert parts is not None
            if max(part.elements for part in parts) == 1:
                why = f"has one value per channel in its sample {spec.text}: it has no variance"
                raise at_node(node.name or "", node.op_type, f"{why}. Take a larger sample.")
            placed = [place(editor, node, part, places) for part in parts]
            self.sampled.append(report_of(node, spec, parts, sizes(x), self.virtual))
            sample(editor, node, placed)
        if places:
            record(model, self.signature, places)
        return editor.result()


def report_of(
    node: ir.Node, spec: LayerSample, parts: tuple[Part, ...], shape: tuple[int, ...], virtual: int
) -> Sampled:
    """Describe what a BatchNorm over a map [N, C, H, W] takes its statistics from."""
    n, _, h, w = shape
    elements = sum(part.elements for part in parts)
    return Sampled(node.name or "", spec.text, elements / ((n - virtual) * h * w), elements)


def place(editor: Editor, node: ir.Node, part: Part, places: dict[str, Box | Points]) -> Placed:
    """Make the value that says where a part is: a new input of the graph, or a constant."""
    if not part.drawn:
        assert isinstance(part.place, Box)
        return Placed(part, editor.constant(f"{node.name}/offset", np.array(part.place.low, np.int64)))
    points = isinstance(part.place, Points)
    name = editor.fresh(f"{node.name}/{'points' if points else 'offset'}")
    count = part.place.count if isinstance(part.place, Points) else 3
    value = ir.Value(name=name, shape=ir.Shape([count]), type=ir.TensorType(ir.DataType.INT64))
    editor.graph.inputs.append(value)
    places[name] = part.place
    return Placed(part, value)


def record(model: ir.Model, signature: GraphSignature, places: dict[str, Box | Points]) -> None:
    """Write what the graph draws into its metadata."""
    known = sampling_of(model)
    drawn = Sampling({**known.places, **places}, known.virtual)
    model.metadata_props[METADATA_KEY] = drawn.to_json()
    signature = dataclasses.replace(signature, offsets=(*signature.offsets, *places))
    model.metadata_props[ROLES_KEY] = signature.to_json()


def sample(editor: Editor, node: ir.Node, parts: list[Placed]) -> None:
    """Put a BatchNorm and its gradients in terms of the parts that it takes its statistics from."""
    x = node.inputs[0]
    assert x is not None
    gradients = gradients_of(node)
    type_statistics(node)
    saved_mean = {} if len(parts) > 1 else {"mean": node.outputs[3]}
    found = [statistics(editor, node, x, part, saved_mean) for part in parts]
    means = [part["mean"] for part in found]
    mixed = found[0]
    if len(found) == 2:
        operands = {**found[0], "mean_2": means[1], "variance_2": found[1]["variance"]}
        made = editor.emit(
            PLAIN_OPS["MixStatistics"], operands, {"weight": parts[0].part.weight}, {"mixed_mean": node.outputs[3]},
            before=node, of=[node], name=editor.fresh(f"{node.name}/mix"),
        )  # fmt: skip
        mixed = {name: made[f"mixed_{name}"] for name in ("mean", "variance")}
    elements = effective_elements([(placed.part.elements, placed.part.weight) for placed in parts])
    coefficients = finalize_and_normalize(editor, node, mixed, elements)
    for gradient in gradients:
        sample_gradient(editor, node, gradient, coefficients["a"], parts, means)


def statistics(
    editor: Editor, node: ir.Node, x: ir.Value, part: Placed, keep: dict[str, ir.Value]
) -> dict[str, ir.Value]:
    """Compute mean and variance, [C] each, of one part of a map; `keep` are old values that they take over."""
    op = PLAIN_OPS["PointStatistics" if part.part.extent is None else "SampledStatistics"]
    return editor.emit(
        op, {"x": x, **part.operands}, part.attributes, keep, before=node, of=[node],
        name=editor.fresh(f"{node.name}/statistics"),
    )  # fmt: skip


def sample_gradient(
    editor: Editor, norm: ir.Node, node: ir.Node, a: ir.Value, parts: list[Placed], means: list[ir.Value]
) -> None:
    """Put the halves of a sampled BatchNorm's gradient in the place of `node`.

    `a` is scale/std and `means` are those of the parts, [C] each.
    """
    of = [norm, node]
    terms = emit_terms(editor, node, a, of)
    if has_input_gradient(node):
        dz, x = node.inputs[:2]
        dx = node.outputs[0]
        assert dz is not None and x is not None
        made = editor.emit(
            SCALED, {"dy": dz, "acc_p": a}, {}, {}, before=node, of=of, name=editor.fresh(f"{node.name}/scale")
        )
        acc = made["dx"]
        for index, (part, mean) in enumerate(zip(parts, means, strict=True)):
            last = index + 1 == len(parts)
            attributes = {"count": part.part.elements, "weight": part.part.weight}
            coefficients = editor.emit(
                PLAIN_OPS["SampledGradFinalize"], {**terms, "mean": mean}, attributes, {}, before=node, of=of,
                name=editor.fresh(f"{node.name}/finalize"),
            )  # fmt: skip
            op = PLAIN_OPS["AddAtPoints" if part.part.extent is None else "AddSampled"]
            operands = {"acc": acc, "x": x, **coefficients, **part.operands}
            name = node.name if last else editor.fresh(f"{node.name}/sample")
            added = editor.emit(
                op, operands, part.attributes, {"dx": dx} if last else {}, before=node, of=of, name=name
            )
            acc = added["dx"]
    editor.graph.remove(node, safe=True)
