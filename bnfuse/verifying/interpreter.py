"""A model computed in the type of its inputs: by onnx's evaluator, operators of ours by their numpy references.

Standard operators that onnx's evaluator computes otherwise than ONNX says, in float32, or not for all operands, are
written anew here. In float64 what two files compute parts by nothing but mistakes and their float32 constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from bnfuse.core.windows import resolved_pads, transposed_pads, transposed_size
from bnfuse.opset import reference
from bnfuse.opset.spec import DOMAIN, find

Arrays = dict[str, np.ndarray]


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> Arrays:
    """Compute the model's outputs, or the values of these names."""
    return Interpreter(model).run(feeds, outputs)


class Interpreter:
    """A model that is computed node by node, in the type of what it is fed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        own = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
        operators = [type(name, (Own,), {}) for name in sorted(own)]
        self.session = ReferenceEvaluator(model, new_ops=[*operators, *Written.__subclasses__()])
        self.has_bodies = any(node.need_context() for node in self.session.rt_nodes_)

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> Arrays:
        """Compute the model's outputs, or the values of these names."""
        names = list(outputs or self.session.output_names)
        nodes = self.session.rt_nodes_
        last = {name: index for index, node in enumerate(nodes) for name in (*node.input, *node.output)}
        last |= dict.fromkeys(("", *names), len(nodes))
        found: dict[str, Any] = {"": None, **self.session.rt_inits_, **feeds}
        with np.errstate(all="ignore"):
            for index, node in enumerate(nodes):
                context = {"context": found} if node.need_context() else {}
                found |= zip(node.output, node.run(*(found[name] for name in node.input), **context), strict=False)
                if not self.has_bodies:  # they read what no node's inputs tell
                    for name in {*node.input, *node.output}:
                        if last[name] == index:
                            del found[name]
        return {name: np.asarray(found[name]) for name in names}


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy the model with float64 for float32 in tensors, casts and types.

    Functions stay what they are: operators of ours are computed by their references, and `build` leaves no others.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        _widen(tensor)
    for attribute in (each for node in copy.graph.node for each in node.attribute):
        if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE
        if attribute.HasField("t"):
            _widen(attribute.t)
    del copy.graph.value_info[:]
    for value in (*copy.graph.input, *copy.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return copy


def wide(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Give float32 arrays as float64."""
    return {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in arrays.items()}


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        values = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


class _Plain(OpRun):
    def run(self, *args: Any, linked_attributes: Any = None, context: Any = None) -> Any:  # type: ignore[override]
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
    """Its mask by numpy's generator."""

    def _run(self, x: Any, ratio: Any = None, training: Any = None, seed: int = 0) -> Any:
        ratio = 0.5 if ratio is None else float(ratio)
        if training is None or not training:
            return x, np.ones(x.shape, bool)
        mask = np.random.default_rng(seed).random(x.shape) >= ratio
        return np.where(mask, x / (1 - ratio), 0), mask


class Mean(Written):
    """The evaluator's sums in float32."""

    def _run(self, *operands: Any) -> Any:
        return (np.asarray(sum(operands) / len(operands)),)


class Erf(Written):
    """The evaluator's is of float32."""

    def _run(self, x: Any) -> Any:
        return (reference.erf(x),)


class HardSwish(Written):
    """The evaluator's sixth is of float32."""

    def _run(self, x: Any) -> Any:
        return (x * np.clip(x + 3, 0, 6) / 6,)


class Gelu(Written):
    """The evaluator's constants and erf are of float32."""

    def _run(self, x: Any, approximate: bytes = b"none") -> Any:
        if approximate == b"tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + reference.erf(math.sqrt(0.5) * x)),)


def _places(shape: Sequence[int], indices: np.ndarray, axis: int) -> tuple[np.ndarray, ...]:
    places: list[Any] = list(np.indices(indices.shape))
    places[axis] = indices % shape[axis]
    return tuple(places)


class GatherElements(Written):
    """Negative indices count from the end."""

    def _run(self, x: Any, indices: Any, axis: int = 0) -> Any:
        return (x[_places(x.shape, indices, axis)],)


class ScatterElements(Written):
    """With a sum over equal places, for all ranks."""

    def _run(self, x: Any, indices: Any, updates: Any, axis: int = 0, reduction: bytes = b"none") -> Any:
        y, places = x.copy(), _places(x.shape, indices, axis)
        if reduction == b"add":
            np.add.at(y, places, updates)
        else:
            y[places] = updates
        return (y,)


class Conv(Written):
    """Tap by tap: the evaluator writes a dilated kernel out with its zeros, which may take gigabytes."""

    def _run(self, x: Any, weight: Any, bias: Any = None, **given: Any) -> Any:
        kernel, rank, group = weight.shape[2:], x.ndim - 2, given.get("group", 1)
        strides, dilations = (given.get(name) or [1] * rank for name in ("strides", "dilations"))
        pads = resolved_pads({**given, "kernel_shape": kernel}, x.shape[2:])
        x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
        reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
        out = [(size - r - 1) // s + 1 for size, r, s in zip(x.shape[2:], reach, strides, strict=True)]
        taps, y = np.moveaxis(weight, (0, 1), (-2, -1)), np.zeros((), x.dtype)
        for tap in np.ndindex(*kernel):
            first = [t * d for t, d in zip(tap, dilations, strict=True)]
            spaced = (slice(f, f + (o - 1) * s + 1, s) for f, o, s in zip(first, out, strides, strict=True))
            read = (slice(None), slice(None), *spaced)
            columns = x[read].reshape(x.shape[0], group, x.shape[1] // group, -1)
            y = y + taps[tap].reshape(group, -1, weight.shape[1]) @ columns
        y = y.reshape(x.shape[0], -1, *out)
        return (y if bias is None else y + bias.reshape(-1, *[1] * rank),)


class MaxPool(Written):
    """One or two dimensions, with the places of the maxima as ONNX counts them."""

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
    """One or two dimensions, with ceil_mode and dilations."""

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
    """Negative amounts cut; chosen axes."""

    def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: bytes = b"constant") -> Any:
        axes = list(range(x.ndim)) if axes is None else [int(axis) % x.ndim for axis in axes]
        cuts, added = [slice(None)] * x.ndim, [(0, 0)] * x.ndim
        for place, axis in enumerate(axes):
            before, after = int(pads[place]), int(pads[place + len(axes)])
            cuts[axis] = slice(max(0, -before), x.shape[axis] - max(0, -after))
            added[axis] = (max(0, before), max(0, after))
        given = {"constant_values": 0 if value is None else value} if mode == b"constant" else {}
        how: Any = mode.decode()
        return (np.pad(x[tuple(cuts)], added, mode=how, **given),)


class ConvTranspose(Written):
    """By the gradient of the convolution, with every attribute."""

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
