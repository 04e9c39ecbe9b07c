"""Local statistics: each group of samples is normalised on its own (micro-BN; [Chen18], section 4.3).

    y, rm', rv', mean, inv_std =        mean, variance = LocalStatistics(x)                       [G, C]
      BatchNorm(x, g, b, ...)           a, b', inv_std, rm', rv' = LocalFinalize(...)             [G, C]; rm', rv' [C]
                                    ->  y = LocalNormalize(x, a, b')
    dx, dg, db =                        db_l, dg_l = LocalGradReduce(dz, x, mean, inv_std)        [G, C]
      BatchNormGrad(dz, x,              db, dg = ReduceSum(db_l), ReduceSum(dg_l)                 over the groups
        g, mean, inv_std)               q, w = SampledGradFinalize(BatchNormGradTerms(...), mean)
                                        dx = LocalAddSampled(LocalScale(dz, a), x, q, w)          a*dz + q*x + w

With virtual samples a group begins with its own, and its statistics are those of the virtual rows, of the real rows
(`bn`), or of both (MixStatistics). The running statistics take the mean over the groups.

The halves stay kernels of their own, for what they do to a map differs from group to group; the ReLU and the pooling
around them are fused as the level says.

Refuses a BatchNorm whose input is not a static float32 map of rank 4: its statistics stay those of the whole batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.signature import GraphSignature
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.training_ops import batch_norm_constants
from bnfuse.passes.dialect.source_ops import is_batch_norm, is_map, sizes
from bnfuse.passes.fission.batch_norm import type_statistics
from bnfuse.passes.fission.batch_norm_grad import gradients_of, has_input_gradient
from bnfuse.passes.rewriter import Editor, FusionResult, is_unused
from bnfuse.passes.sampling.parts import effective_elements
from bnfuse.passes.sampling.sample import Sampled
from bnfuse.passes.sampling.spec import LayerSample, SamplePlan

MOST_NAMED = 1024  # the largest groups that an error proposes
WHY = "each group of samples has its own coefficients, which no fused operator takes"


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of rows: `virtual` ones in front, then `real` ones."""

    virtual: int
    real: int

    @property
    def samples(self) -> int:
        """Count the rows of a group."""
        return self.virtual + self.real


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of each group that a part of the statistics is taken from."""

    first: int
    count: int
    weight: float = 1.0

    def within(self, group: Group) -> dict[str, int]:
        """Give the attributes of an operator on these rows of each group."""
        return {"first": self.first, "rows": self.count, "samples": group.samples}


def check(plan: SamplePlan, samples: int, batch: int) -> None:
    """Raise BnfuseError unless groups of so many samples go with a batch and with what their statistics are from."""
    if samples < 1 or batch % samples:
        divisors = ", ".join(str(n) for n in range(1, min(batch, MOST_NAMED) + 1) if batch % n == 0)
        raise BnfuseError(
            f"local-bn {samples}: groups of {samples} do not divide the batch of {batch}: take {divisors}"
        )
    for spec in (plan.default, *(spec for _, spec in plan.by_glob)):
        if spec.kind not in (None, "bn"):
            raise BnfuseError(f"local-bn goes with sample specs bn, vdn:N and bn+vdn:N@W, not with '{spec.text}'")


def batch_of(model: ir.Model, signature: GraphSignature) -> int:
    """Read how many samples a step is given. Raises BnfuseError where that is not fixed."""
    (data,) = (value for value in model.graph.inputs if value.name == signature.data[0])
    size = data.shape[0] if data.shape else None
    if not isinstance(size, int):
        raise BnfuseError(f"input '{data.name}' has no fixed batch, so it has no groups: build with --batch")
    return size


class LocalBatchNorm(ir.passes.InPlacePass):
    """Give each group of samples its own statistics. `sampled` says afterwards what those of each BN are from."""

    def __init__(self, plan: SamplePlan, group: Group) -> None:
        super().__init__()
        self.plan, self.group = plan, group
        self.sampled: list[Sampled] = []

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place. Raises BnfuseError for a BatchNorm with one value per channel in each group."""
        editor = Editor(model, "local")
        for node in [node for node in model.graph if is_batch_norm(node)]:
            x = node.inputs[0]
            if not is_map(x):
                editor.refuse(
                    node, "its statistics are of the whole batch: its input is no static float32 map of rank 4"
                )
                continue
            spec = self.plan.of(node.name or "")
            parts = parts_of(spec, self.group)
            elements = [part.count * sizes(x)[2] * sizes(x)[3] for part in parts]
            if max(elements) == 1:
                why = "has one value per channel in each group: it has no variance. Use larger groups"
                raise at_node(node.name or "", node.op_type, f"{why}.")
            total = sum(elements)
            share = total / (self.group.real * sizes(x)[2] * sizes(x)[3])
            self.sampled.append(Sampled(node.name or "", spec.text, share, total))
            Localizer(editor, node, x, self.group, parts).run()
        return editor.result()


def parts_of(spec: LayerSample, group: Group) -> tuple[Rows, ...]:
    """Give the virtual rows, the real ones, or both with their weights."""
    virtual, real = Rows(0, spec.virtual), Rows(group.virtual, group.real)
    if not spec.virtual:
        return (real,)
    if spec.kind is None:
        return (virtual,)
    return (
        dataclasses.replace(virtual, weight=spec.weight),
        dataclasses.replace(real, weight=1 - spec.weight),
    )


class Localizer:
    """Put one BatchNorm and its gradients in terms of groups."""

    def __init__(self, editor: Editor, node: ir.Node, x: ir.Value, group: Group, parts: tuple[Rows, ...]) -> None:
        self.editor, self.node, self.x, self.group, self.parts = editor, node, x, group, parts

    def run(self) -> None:
        """Put the BatchNorm and its gradients in terms of groups; the nodes go."""
        gradients = gradients_of(self.node)
        self.require_unseen(gradients)
        found = [
            self.emit("LocalStatistics", {"x": self.x}, part.within(self.group), "statistics") for part in self.parts
        ]
        means = [part["mean"] for part in found]
        for mean in means:
            self.stay(mean)
        coefficients = self.forward(self.mixed(found))
        for node in gradients:
            self.backward(node, coefficients, means)
        self.editor.graph.remove(self.node, safe=True)

    def require_unseen(self, gradients: list[ir.Node]) -> None:
        """Raise BnfuseError where more than the gradient reads the statistics of the batch, [C]: they are gone."""
        for value in self.node.outputs[3:]:
            if value.is_graph_output() or any(use.node not in gradients for use in value.uses()):
                why = f"cannot have local statistics: '{value.name}', of the whole batch, is read elsewhere"
                raise at_node(self.node.name or "", self.node.op_type, f"{why}. Leave local-bn out.")

    def mixed(self, found: list[dict[str, ir.Value]]) -> dict[str, ir.Value]:
        """Give mean and variance, [G, C]: those of the one part, or of both by their weights."""
        if len(found) == 1:
            return found[0]
        operands = {**found[0], **{f"{name}_2": value for name, value in found[1].items()}}
        made = self.emit("MixStatistics", operands, {"weight": self.parts[0].weight}, "mix")
        return {name: made[f"mixed_{name}"] for name in ("mean", "variance")}

    def forward(self, statistics: dict[str, ir.Value]) -> dict[str, ir.Value]:
        """Insert finalize and normalise halves; gives the coefficients, [G, C], with the mean."""
        _, scale, bias, running_mean, running_variance = self.node.inputs
        y, new_mean, new_variance, *_ = self.node.outputs
        assert scale is not None and bias is not None and running_mean is not None and running_variance is not None
        type_statistics(self.node)
        operands = {"scale": scale, "bias": bias, **statistics}
        operands |= {"running_mean": running_mean, "running_variance": running_variance}
        keep = {"new_running_mean": new_mean, "new_running_variance": new_variance}
        made = self.emit("LocalFinalize", operands, batch_norm_constants(self.node, self.elements), "finalize", keep)
        operands = {"x": self.x, "a": made["a"], "b": made["b"]}
        normalised = self.emit("LocalNormalize", operands, self.samples, None, {"y": y})
        self.stay(normalised["y"])
        return {**made, "mean": statistics["mean"]}

    def backward(self, node: ir.Node, coefficients: dict[str, ir.Value], means: list[ir.Value]) -> None:
        """Put one gradient of the BatchNorm in terms of groups; `means` are those of each part, [G, C]."""
        dz = node.inputs[0]
        assert dz is not None
        operands = {"dz": dz, "x": self.x, "mean": coefficients["mean"], "inv_std": coefficients["inv_std"]}
        reduced = self.emit("LocalGradReduce", operands, self.samples, "reduce", of=node)
        self.stay(reduced["dbeta"])
        for name, value in zip(("dgamma", "dbeta"), node.outputs[1:], strict=False):
            if value.name and not is_unused(value):
                self.sum_over_groups(node, reduced[name], value)
        if has_input_gradient(node):
            self.input_gradient(node, dz, coefficients, reduced, means)
        self.editor.graph.remove(node, safe=True)

    def sum_over_groups(self, node: ir.Node, local: ir.Value, old: ir.Value) -> None:
        """Sum a parameter's gradient, [G, C], over the groups into the [C] that the graph had."""
        axes = self.editor.constant(f"{old.name}/axes", np.array([0], np.int64))
        (total,) = self.editor.standard("ReduceSum", [local, axes], 1, before=node, of=[self.node, node], keepdims=0)
        self.editor.take_over(old, total)

    def input_gradient(
        self,
        node: ir.Node,
        dz: ir.Value,
        coefficients: dict[str, ir.Value],
        reduced: dict[str, ir.Value],
        means: list[ir.Value],
    ) -> None:
        """Compute dx = a*dz + q*x + w, where q and w are 0 outside of each part's rows."""
        operands = {**reduced, "a": coefficients["a"], "inv_std": coefficients["inv_std"]}
        terms = self.emit("BatchNormGradTerms", operands, {}, "terms", of=node)
        scaled = self.emit("LocalScale", {"dz": dz, "p": coefficients["a"]}, self.samples, "scale", of=node)
        acc = scaled["dx"]
        self.stay(acc)
        for part, mean in zip(self.parts, means, strict=True):
            last = part is self.parts[-1]
            attributes = {"count": part.count * sizes(self.x)[2] * sizes(self.x)[3], "weight": part.weight}
            factors = self.emit("SampledGradFinalize", {**terms, "mean": mean}, attributes, "finalize", of=node)
            operands = {"acc": acc, "x": self.x, **factors}
            keep = {"dx": node.outputs[0]} if last else {}
            suffix = None if last else "sample"
            acc = self.emit("LocalAddSampled", operands, part.within(self.group), suffix, keep, of=node)["dx"]

    @property
    def elements(self) -> float:
        """Count the elements a channel that the statistics of a group are of."""
        height, width = sizes(self.x)[2:]
        return effective_elements([(part.count * height * width, part.weight) for part in self.parts])

    @property
    def samples(self) -> dict[str, int]:
        """Give the attribute that says how many rows a group has."""
        return {"samples": self.group.samples}

    def emit(
        self,
        op: str,
        operands: dict[str, ir.Value],
        attributes: dict[str, Any],
        suffix: str | None,
        keep: dict[str, ir.Value] | None = None,
        *,
        of: ir.Node | None = None,
    ) -> dict[str, ir.Value]:
        """Insert an operator in the place of the BatchNorm, or of its gradient; without a suffix it has its name."""
        at = of or self.node
        name = at.name if suffix is None else self.editor.fresh(f"{at.name}/{suffix}")
        nodes = [self.node] if of is None else [self.node, of]
        return self.editor.emit(PLAIN_OPS[op], operands, attributes, keep or {}, before=at, of=nodes, name=name)

    def stay(self, value: ir.Value) -> None:
        """Say of the operator that gives a value why it stays on its own."""
        producer = value.producer()
        assert producer is not None
        self.editor.refuse(producer, WHY)
