"""Transposed convolutions, and their gradients: one launch each, but for depthwise ones on a GPU.

A GPU's depthwise kernels slide the steps of a Conv through registers and know no others, so there a depthwise
transposed convolution is the convolution whose gradient it is, between sweeps that do its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from bnfuse.opset.shapes import transposed_shape
from bnfuse.opset.spec import ACTIVATION_GRADS, OF_GRADIENT, OpSpec, masks_gated
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.cuda.weights import is_packed
from bnfuse.runtime.lowering.group_norm import group_norm_statistics
from bnfuse.runtime.lowering.norm import batch_norm_statistics
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.lowering.steps import composed, problem

Values = Mapping[str, ir.Value]
Attributes = Mapping[str, Any]


def lower_transposed(
    low: Lowering, node: ir.Node, spec: OpSpec, operands: Values, results: Values, attributes: Attributes
) -> None:
    """Lower an operator of the cores ConvTranspose, ConvTransposeGradInput and ConvTransposeGradWeight."""
    if not low.target.packs_weights or is_packed(low.shape(operands["weight"]), spec.core, attributes["group"]):
        composed(low, node, spec, operands, results, attributes)
        return
    Parts(low, node, spec, operands, results, attributes).lower()


class Parts:
    """A depthwise one in several launches."""

    def __init__(
        self, low: Lowering, node: ir.Node, spec: OpSpec, operands: Values, results: Values, attributes: Attributes
    ) -> None:
        self.low, self.node, self.spec = low, node, spec
        self.operands, self.results, self.attributes = operands, results, attributes

    def lower(self) -> None:
        """Lower the node."""
        if self.spec.core == "ConvTranspose":
            self.forward(self.entered())
        elif self.spec.core == "ConvTransposeGradInput":
            self.input_gradient(self.gradient())
        else:
            self.weight_gradient(self.gradient(), self.entered())

    def launch(self, spec: OpSpec, operands: Values, results: Values) -> None:
        """Launch an operator; of what is given it takes what it has."""
        taken = {name: operands[name] for name in spec.operands if name in operands}
        given = {name: results[name] for name in spec.results if name in results}
        composed(self.low, self.node, spec, taken, given, self.attributes)

    def value(self, name: str) -> ir.Value:
        """Make a value that the file does not name."""
        return ir.Value(name=f"{self.node.name}/{name}")

    def entered(self) -> ir.Value:
        """Give x after its prologue."""
        steps = tuple(step for step in self.spec.prologue if step not in OF_GRADIENT)
        if not steps:
            return self.operands["x"]
        made = self.value("entered")
        self.launch(OpSpec(steps, "Pointwise"), self.operands, {"y": made})
        return made

    def gradient(self) -> ir.Value:
        """Give dy after its prologue."""
        steps = tuple(step for step in self.spec.prologue if step in OF_GRADIENT)
        if not steps:
            return self.operands["dy"]
        made = self.value("gradient")
        self.launch(OpSpec(steps, "PointwiseGrad"), self.operands, {"dx": made})
        return made

    def forward(self, x: ir.Value) -> None:
        """Write y, which is dx of the convolution of which x is dy; then its bias, activation and statistics."""
        low, weight, epilogue = self.low, self.operands["weight"], self.spec.epilogue
        changed = bool({"Bias", "Relu"} & {*epilogue})
        y = self.value("spread") if changed else self.results["y"]
        spec, kernel = OpSpec((), "ConvGradInput"), low.shape(weight)
        refs: dict[str, Ref] = {"dy": low.map(x), "weight": low.dense(weight)}
        shape = transposed_shape(low.shape(x), kernel, self.attributes)
        assert shape is not None
        refs["dx"] = refs["x"] = low.new_map(y, tuple(map(int, shape)))  # type: ignore[arg-type]
        low.launch(registry.CONV_BACKWARD, (problem(low, spec, refs, self.attributes, kernel), low.target), refs)
        if changed:
            self.launch(OpSpec((), "Pointwise", epilogue), {**self.operands, "x": y}, self.results)
        elif "Statistics" in epilogue:
            found = {name: self.results[name] for name in ("mean", "variance") if name in self.results}
            batch_norm_statistics(low, {"x": y}, found, {})
        elif "ImageStatistics" in epilogue:
            found = {name: self.results[f"image_{name}"] for name in ("mean", "variance")}
            group_norm_statistics(low, self.node, {"x": y}, found, {})

    def input_gradient(self, dy: ir.Value) -> None:
        """Write dx, a convolution of dy; then its epilogue."""
        low, weight, epilogue = self.low, self.operands["weight"], self.spec.epilogue
        dx = self.value("unfinished") if epilogue else self.results["dx"]
        spec, kernel = OpSpec((), "Conv"), low.shape(weight)
        refs: dict[str, Ref] = {"x": low.map(dy), "weight": low.dense(weight)}
        refs["y"] = low.new_map(dx, low.shape(self.operands["x"]))
        low.launch(registry.CONV_FORWARD, (problem(low, spec, refs, self.attributes, kernel), low.target), refs)
        if epilogue:
            of_mask = ("Normalize", "Gate") if masks_gated(self.spec.prologue) else ("Normalize",)
            front = tuple(step for step in of_mask if step in self.spec.prologue)
            masked = bool({*ACTIVATION_GRADS} & {*epilogue})
            spec = OpSpec(front if masked else (), "PointwiseGrad", epilogue)
            self.launch(spec, {**self.operands, "dy": dx}, self.results)

    def weight_gradient(self, dy: ir.Value, x: ir.Value) -> None:
        """Write dweight, that of the convolution of dy that makes x; and the sum of dy."""
        operands = {"dy": x, "x": dy, "weight": self.operands["weight"]}
        self.launch(OpSpec((), "ConvGradWeight"), operands, self.results)
        if "BiasGrad" in self.spec.epilogue:
            sums = {"dx": self.value("summed"), "dbias": self.results["dbias"]}
            self.launch(OpSpec((), "PointwiseGrad", ("BiasGrad",)), {"dy": dy}, sums)
