"""Gradients of small graphs in float64: by bnfuse.autodiff and an interpreter, and by torch's autograd.

    check([node("Mul", "a b", "y")], {"a": floats(2, 3), "b": floats(3)}, lambda torch, a, b: a * b)

The gradients are those of the sum of all outputs, each times a seed, which is an input of the graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from bnfuse.autodiff import differentiate
from bnfuse.opset.spec import DOMAIN
from bnfuse.verifying.interpreter import run

Arrays = dict[str, np.ndarray]
Nodes = Sequence[onnx.NodeProto]

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


def floats(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).uniform(low, high, shape))


def apart(*shape: int, seed: int = 0, step: float = 0.1) -> np.ndarray:
    """Numbers of which no two are nearer than `step`, in any order, around 0 but not at it."""
    count = int(np.prod(shape))
    order = np.random.default_rng(seed).permutation(count)
    return ((order - count / 2 + 0.25) * step).reshape(shape)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def node(op_type: str, inputs: str, outputs: str, name: str = "", domain: str = "", **attributes: Any) -> Any:
    """A node; operands are names between spaces, `-` where one is left out."""
    named = ([part.replace("-", "") for part in names.split()] for names in (inputs, outputs))
    return helper.make_node(op_type, *named, name=name or op_type.lower(), domain=domain, **attributes)


# Differentiating


@dataclasses.dataclass
class Differentiated:
    """A graph with its gradients, and all that it computes."""

    model: ir.Model
    values: Arrays
    gradients: dict[str, str]  # of what -> the name of its gradient

    @property
    def proto(self) -> onnx.ModelProto:
        return ir.to_proto(self.model)

    def gradient(self, name: str) -> np.ndarray:
        return self.values[self.gradients[name]]

    def operators(self) -> list[str]:
        """Of the nodes that the gradient added."""
        return [n.op_type for n in self.model.graph if "/grad" in str(n.name) or str(n.name).endswith("_grad")]


def forward_model(
    nodes: Nodes, feeds: Arrays, constants: Mapping[str, np.ndarray], outputs: Sequence[str], opset: int
) -> onnx.ModelProto:
    """The graph, in which every value has its type and static shape."""
    inputs = [info(name, value) for name, value in feeds.items()]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    made = [name for each in nodes for name in each.output if name]
    graph = helper.make_graph(list(nodes), "g", inputs, [helper.make_value_info(n, onnx.TypeProto()) for n in made])
    graph.initializer.extend(tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    found = run(model, feeds, made)
    del model.graph.output[:]
    model.graph.output.extend(info(name, found[name]) for name in outputs)
    model.graph.value_info.extend(info(name, value) for name, value in found.items() if name not in outputs)
    return model


def info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def differentiated(
    nodes: Nodes,
    feeds: Arrays,
    *,
    constants: Mapping[str, np.ndarray] | None = None,
    wanted: Sequence[str] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 21,
    seed: int = 1,
) -> Differentiated:
    """Differentiate all outputs with respect to all inputs of floats, or those that are wanted."""
    model = ir.from_proto(forward_model(nodes, feeds, constants or {}, outputs, opset))
    wanted = [name for name, value in feeds.items() if value.dtype.kind == "f"] if wanted is None else wanted
    starts, given = {}, dict(feeds)
    for place, value in enumerate(model.graph.outputs):
        start = ir.Value(name=f"seed_{value.name}", shape=value.shape, type=value.type)
        model.graph.inputs.append(start)
        starts[str(value.name)] = start
        dtype = value.dtype.numpy()
        given[str(start.name)] = floats(*[int(size) for size in value.shape], seed=seed + place).astype(dtype)
    found = differentiate(model, wanted, starts, file="model.onnx")
    model.graph.outputs.extend(value for value in found.values() if value not in model.graph.outputs)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    names = [*(v.name for v in model.graph.outputs), *(v.name for n in model.graph for v in n.outputs if v.name)]
    values = given | run(proto, given, list(dict.fromkeys(names)))
    for value in (v for n in model.graph for v in n.outputs):
        if value.name and value.shape is not None:  # what the engine states is true
            assert tuple(value.shape) == values[value.name].shape, value.name
            assert value.dtype == ir.DataType.from_numpy(values[value.name].dtype), value.name
    return Differentiated(model, values, {name: str(value.name) for name, value in found.items()})


def check(
    nodes: Nodes,
    feeds: Arrays,
    function: Callable[..., Any],
    *,
    tolerance: float = 1e-10,
    forward: bool = True,
    **given: Any,
) -> Differentiated:
    """Gradients of the graph are those of `function(torch, *inputs)`, its outputs are (`forward`) the graph's."""
    found = differentiated(nodes, feeds, **given)
    expected, results = by_autograd(function, feeds, found)
    for name, value in results.items() if forward else ():
        close(found.values[name], value, tolerance, name)
    for name, value in expected.items():
        close(found.gradient(name), value, tolerance, f"the gradient of {name}")
    return found


def by_autograd(function: Callable[..., Any], feeds: Arrays, found: Differentiated) -> tuple[Arrays, Arrays]:
    """Gradients of the same seeds, and what the function gives."""
    torch = single_threaded_torch()
    tensors = {name: torch.tensor(value) for name, value in feeds.items()}
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.is_floating_point())
    made = function(torch, *tensors.values())
    made = made if isinstance(made, tuple) else (made,)
    names = [str(v.name).removeprefix("seed_") for v in found.model.graph.inputs if str(v.name).startswith("seed_")]
    total = sum((torch.tensor(found.values[f"seed_{n}"]) * y).sum() for n, y in zip(names, made, strict=True))
    leaves = [tensors[name] for name in found.gradients]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    expected = {
        name: np.zeros(leaf.shape) if value is None else value.numpy()
        for name, leaf, value in zip(found.gradients, leaves, gradients, strict=True)
    }
    return expected, {name: y.detach().numpy() for name, y in zip(names, made, strict=True)}


@functools.cache
def single_threaded_torch() -> Any:
    import torch

    torch.set_num_threads(1)
    return torch


def check_by_differences(nodes: Nodes, feeds: Arrays, *, tolerance: float = 1e-7, **given: Any) -> Differentiated:
    """Gradients are those of central differences, element by element."""
    found = differentiated(nodes, feeds, **given)
    proto, step = found.proto, 1e-5
    starts = {n: v for n, v in found.values.items() if n.startswith("seed_")}

    def loss(changed: Arrays) -> float:
        results = run(proto, {**changed, **starts}, [name.removeprefix("seed_") for name in starts])
        return float(sum((results[name.removeprefix("seed_")] * seed).sum() for name, seed in starts.items()))

    for name in found.gradients:
        expected = np.zeros(feeds[name].shape)
        for place in np.ndindex(feeds[name].shape):
            moved = [feeds[name].copy(), feeds[name].copy()]
            moved[0][place] += step
            moved[1][place] -= step
            above, below = (loss({**feeds, name: value}) for value in moved)
            expected[place] = (above - below) / (2 * step)
        close(found.gradient(name), expected, tolerance, f"the gradient of {name}")
    return found


def close(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {found.shape}, not {expected.shape}"
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what)


# Shapes


@st.composite
def shapes(draw: st.DrawFn, least: int = 1, most: int = 4, size: int = 4) -> tuple[int, ...]:
    """Odd and even sizes, batches of 1."""
    return tuple(draw(st.lists(st.integers(1, size), min_size=least, max_size=most)))


@st.composite
def broadcast(draw: st.DrawFn, count: int = 2, most: int = 4) -> list[tuple[int, ...]]:
    """Shapes that broadcast to one another's."""
    whole = draw(shapes(0, most))
    found = []
    for _ in range(count):
        kept = draw(st.integers(0, len(whole)))
        found.append(tuple(1 if draw(st.booleans()) else size for size in whole[len(whole) - kept :]))
    return found


@st.composite
def axes(draw: st.DrawFn, rank: int, least: int = 0) -> list[int]:
    """Some of the axes, in any order, from the front or from the back."""
    chosen = draw(st.lists(st.integers(0, rank - 1), unique=True, min_size=min(least, rank), max_size=rank))
    return [axis - rank if draw(st.booleans()) else axis for axis in chosen]
