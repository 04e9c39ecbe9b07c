"""Graphs with operators of ours in the dtype of their inputs: onnx's evaluator, ours by their numpy references.

Standard operators that onnx's evaluator computes otherwise than ONNX says, in float32, or not for all operands, are
written anew here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from bnfuse.core.windows import transposed_pads, transposed_size
from bnfuse.opset import reference
from bnfuse.opset.spec import DOMAIN, find


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """What the graph computes: its outputs, or the values of these names."""
    own = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    operators = [type(name, (Own,), {}) for name in sorted(own)]
    session = ReferenceEvaluator(model, new_ops=[*operators, *Written.__subclasses__()])
    names = list(outputs or session.output_names)
    with np.errstate(all="ignore"):
        found = session.run(names, feeds)
    return {name: np.asarray(value) for name, value in zip(names, found, strict=True)}


class _Plain(OpRun):
    def run(self, *args: Any, linked_attributes: Any = None, context: Any = None) -> Any:
        attributes = {a.name: helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        return self._run(*args, **attributes)


class Own(_Plain):
    """An operator of ours."""

    op_domain = DOMAIN

    def _run(self, *args: Any, **attributes: Any) -> Any:
        spec = find(self.onnx_node.op_type)
        assert spec is not None
        return tuple(reference.run(spec, dict(zip(spec.operands, args, strict=True)), attributes).values())


class Written(_Plain):
    """A standard operator."""

    op_domain = ""


class Dropout(Written):
    def _run(self, x: Any, ratio: Any = None, training: Any = None, seed: int = 0) -> Any:
        ratio = 0.5 if ratio is None else float(ratio)
        if training is None or not training:
            return x, np.ones(x.shape, bool)
        mask = np.random.default_rng(seed).random(x.shape) >= ratio
        return np.where(mask, x / (1 - ratio), 0), mask


class Mean(Written):
    def _run(self, *operands: Any) -> Any:
        return (np.asarray(sum(operands) / len(operands)),)


class Erf(Written):
    def _run(self, x: Any) -> Any:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


def _places(shape: Sequence[int], indices: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
    places = list(np.indices(indices.shape))
    places[axis] = indices % shape[axis]
    return tuple(places)


class GatherElements(Written):
    def _run(self, x: Any, indices: Any, axis: int = 0) -> Any:
        return (x[_places(x.shape, indices, axis)],)


class ScatterElements(Written):
    def _run(self, x: Any, indices: Any, updates: Any, axis: int = 0, reduction: bytes = b"none") -> Any:
        y, places = x.copy(), _places(x.shape, indices, axis)
        if reduction == b"add":
            np.add.at(y, places, updates)
        else:
            y[places] = updates
        return (y,)


class MaxPool(Written):
    def _run(self, x: Any, **attributes: Any) -> Any:
        rank = x.ndim - 2
        ones = [1] * rank
        window = {"strides": ones, "dilations": ones, "pads": [0] * 2 * rank, "ceil_mode": 0, **attributes}
        if rank == 2:
            return reference.max_pool(x, window)
        flat = {key: (1, *window[key]) for key in ("kernel_shape", "strides", "dilations")}
        pads = (0, window["pads"][0], 0, window["pads"][1])
        y, indices = reference.max_pool(x[:, :, None], {**window, **flat, "pads": pads})
        return y[:, :, 0], indices[:, :, 0]


class AveragePool(Written):
    def _run(self, x: Any, **attributes: Any) -> Any:
        rank = x.ndim - 2
        ones = [1] * rank
        window = {"strides": ones, "dilations": ones, "pads": [0] * 2 * rank, "ceil_mode": 0, "count_include_pad": 0}
        window |= attributes
        if rank == 2:
            return (reference.average_pool(x, window),)
        flat = {key: (1, *window[key]) for key in ("kernel_shape", "strides", "dilations")}
        pads = (0, window["pads"][0], 0, window["pads"][1])
        return (reference.average_pool(x[:, :, None], {**window, **flat, "pads": pads})[:, :, 0],)


class Pad(Written):
    def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: bytes = b"constant") -> Any:
        axes = list(range(x.ndim)) if axes is None else [int(axis) % x.ndim for axis in axes]
        cuts, added = [slice(None)] * x.ndim, [(0, 0)] * x.ndim
        for place, axis in enumerate(axes):
            before, after = int(pads[place]), int(pads[place + len(axes)])
            cuts[axis] = slice(max(0, -before), x.shape[axis] - max(0, -after))
            added[axis] = (max(0, before), max(0, after))
        given = {"constant_values": 0 if value is None else value} if mode == b"constant" else {}
        return (np.pad(x[tuple(cuts)], added, mode=mode.decode(), **given),)


class ConvTranspose(Written):
    def _run(self, x: Any, weight: Any, bias: Any = None, **given: Any) -> Any:
        rank = x.ndim - 2
        window = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank, "group": 1, **given}
        window["kernel_shape"] = weight.shape[2:]
        more, sizes = given.get("output_padding", [0] * rank), given.get("output_shape")
        auto = given.get("auto_pad", b"NOTSET").decode()
        window["pads"] = transposed_pads(window, x.shape[2:], sizes, more, auto)
        sizes = sizes or transposed_size(window, x.shape[2:], more)
        shape = (x.shape[0], weight.shape[1] * window["group"], *sizes)
        y = reference.conv_grad_input(x, shape, weight, window)
        return (y if bias is None else y + bias.reshape(-1, *[1] * rank),)
