"""Networks of one pooling over any window, and what torch makes of them in float64.

    y = Pool(x + w),  loss = mean((y - labels)**2)

The gradient of w is that of the pooling's input; it has every y in it, so it judges the forward values too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
    """A pooling and the shape of its map; `auto_pad` takes the place of `pads`."""

    op: str
    shape: tuple[int, int, int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    dilations: tuple[int, int]
    ceil: bool
    include: bool
    auto_pad: str | None

    @property
    def is_max(self) -> bool:
        return self.op == "MaxPool"

    def model(self) -> onnx.ModelProto:
        given: dict[str, Any] = {"kernel_shape": self.kernel, "strides": self.strides, "ceil_mode": int(self.ceil)}
        given |= {"auto_pad": self.auto_pad} if self.auto_pad else {"pads": self.pads}
        if self.dilations != (1, 1):
            given["dilations"] = self.dilations
        if not self.is_max:
            given["count_include_pad"] = int(self.include)
        nodes = [
            helper.make_node("Add", ["x", "w"], ["s"], "add"),
            helper.make_node(self.op, ["s"], ["y"], "p", **given),
        ]
        weight = np.random.default_rng(1).standard_normal(self.shape).astype(np.float32)
        graph = helper.make_graph(
            nodes,
            "pooling",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(weight, "w")],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)

    def explicit_pads(self) -> tuple[int, ...]:
        """Those that auto_pad stands for: SAME covers the map by ceil(size / stride) windows."""
        if self.auto_pad is None:
            return self.pads
        if self.auto_pad == "VALID":
            return (0, 0, 0, 0)
        totals = [
            max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
            for size, s, d, k in zip(self.shape[2:], self.strides, self.dilations, self.kernel, strict=True)
        ]
        small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
        return (*small, *large) if self.auto_pad == "SAME_UPPER" else (*large, *small)


def draw(rng: np.random.Generator) -> Case:
    """Windows that fit, and some that do not; padding up to the kernel; sizes from 1."""
    pair = lambda low, high: tuple(int(v) for v in rng.integers(low, high + 1, 2))  # noqa: E731
    kernel = pair(1, 4)
    before = tuple(int(rng.integers(0, k)) if rng.random() < 0.7 else 0 for k in kernel)
    after = before if rng.random() < 0.5 else tuple(int(rng.integers(0, k)) for k in kernel)
    if rng.random() < 0.05:
        after = kernel
    auto = str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])) if rng.random() < 0.2 else None
    return Case(
        op=str(rng.choice(["MaxPool", "AveragePool"])),
        shape=(2, 2, *(pair(1, 4) if rng.random() < 0.2 else pair(3, 10))),
        kernel=kernel,
        strides=pair(1, 4),
        pads=(*before, *after),
        dilations=pair(1, 3) if rng.random() < 0.25 else (1, 1),
        ceil=bool(rng.random() < 0.6),
        include=bool(rng.random() < 0.5),
        auto_pad=auto,
    )


def loss_and_gradient(case: Case, x: Array, w: Array, labels: Array) -> tuple[float, Array]:
    """By torch in float64."""
    import torch

    weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    y = pooled(case, torch.tensor(x, dtype=torch.float64) + weight)
    loss = ((y - torch.tensor(labels, dtype=torch.float64)) ** 2).mean()
    loss.backward()
    return loss.item(), weight.grad.numpy()


def pooled(case: Case, x: Any) -> Any:
    """By torch's own pooling; where it has no such window (uneven padding, holes in averages), from the definition."""
    from torch.nn import functional

    pads = case.explicit_pads()
    even = pads[:2] == pads[2:] and all(2 * pad <= k for pad, k in zip(pads[:2], case.kernel, strict=True))
    if even and case.is_max:
        return functional.max_pool2d(x, case.kernel, case.strides, pads[:2], case.dilations, ceil_mode=case.ceil)
    if even and case.dilations == (1, 1):
        return functional.avg_pool2d(x, case.kernel, case.strides, pads[:2], case.ceil, case.include)
    return by_definition(case, x)


def by_definition(case: Case, x: Any) -> Any:
    """Every window's elements are gathered along both axes. A last window that starts behind the map is none."""
    import torch

    pads, taps, counted = case.explicit_pads(), [], []
    for axis, size in enumerate(case.shape[2:]):
        before, after, stride = pads[axis], pads[axis + 2], case.strides[axis]
        steps = np.arange(case.kernel[axis]) * case.dilations[axis]
        room = size + before + after - steps[-1] - 1
        starts = np.arange(0, room + 1 + (stride - 1 if case.ceil else 0), stride) - before
        if case.ceil and len(starts) > 1 and starts[-1] >= size:
            starts = starts[:-1]
        places = starts[:, None] + steps
        taps.append(places)
        counted.append((places < size + after) if case.include else (places >= 0) & (places < size))
    inside = [torch.tensor((t >= 0) & (t < size)) for t, size in zip(taps, case.shape[2:], strict=True)]
    index = [torch.tensor(t.clip(0, size - 1)) for t, size in zip(taps, case.shape[2:], strict=True)]
    found = x[:, :, index[0][:, None, :, None], index[1][None, :, None, :]]
    real = inside[0][:, None, :, None] & inside[1][None, :, None, :]
    if case.is_max:
        return found.masked_fill(~real, -torch.inf).amax((-2, -1))
    elements = torch.tensor(np.outer(counted[0].sum(1), counted[1].sum(1)))
    return found.masked_fill(~real, 0).sum((-2, -1)) / elements


# What the project makes of a case


TOLERANCE = 1e-5  # of the largest gradient


def judge(case: Case, seed: int, *, compiled: bool = False) -> str:
    """ "equal", "refused: why", or "WRONG: what": by onnxruntime, as rewritten in numpy, lowered for the CPU and a GPU;
    `compiled` for the CPU too.
    """
    from bnfuse.build import build
    from bnfuse.core.errors import BnfuseError

    try:
        model = build(case.model(), loss="mse").model
    except BnfuseError as error:
        return f"refused: {error}"
    labels = next(value for value in model.graph.input if value.name not in ("x", "w"))
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(case.shape).astype(np.float32) for _ in range(2))
    t = rng.standard_normal([d.dim_value for d in labels.type.tensor_type.shape.dim]).astype(np.float32)
    expected = loss_and_gradient(case, x, w, t)
    try:
        found = {
            "onnxruntime": by_onnxruntime(model, {"x": x, "w": w, labels.name: t}),
            "numpy": by_numpy(model, x, w, t),
        }
        lower_everywhere(model)
        if compiled:
            found["compiled"] = by_compiling(model, x, w, t)
    except BnfuseError as error:
        return f"WRONG: refused what build wrote: {error}"
    wrong = [name for name, result in found.items() if not are_equal(result, expected)]
    return f"WRONG: {', '.join(wrong)}" if wrong else "equal"


def are_equal(found: tuple[float, Array], expected: tuple[float, Array]) -> bool:
    return all(
        np.shape(f) == np.shape(e) and float(np.abs(f - e).max()) <= TOLERANCE * max(1.0, float(np.abs(e).max()))
        for f, e in zip(found, expected, strict=True)
    )


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Array]) -> tuple[float, Array]:
    import onnx_ir as ir

    from bnfuse.ort.oracle import OrtGraph

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found = OrtGraph(ir.from_proto(copy), name="pooling", threads=1).run(feeds, ["loss", "w_grad"])
    return float(found["loss"]), found["w_grad"]


def by_numpy(model: onnx.ModelProto, x: Array, w: Array, labels: Array) -> tuple[float, Array]:
    """The reference of `ai.bnfuse`, in float64."""
    from bnfuse.opset import reference

    node = next(node for node in model.graph.node if node.op_type in ("MaxPool", "AveragePool"))
    given = {"count_include_pad": 0} | {a.name: helper.get_attribute_value(a) for a in node.attribute}
    map_ = x.astype(np.float64) + w
    if node.op_type == "MaxPool":
        y, indices = reference.max_pool(map_, given)
    else:
        y = reference.average_pool(map_, given)
    dy = 2 * (y - labels) / y.size
    if node.op_type == "MaxPool":
        gradient = reference.max_pool_grad(dy, indices, map_.shape)
    else:
        gradient = reference.average_pool_grad(dy, map_.shape, given)
    return float(((y - labels) ** 2).mean()), gradient


def lower_everywhere(model: onnx.ModelProto) -> None:
    """To a program for the CPU and one for a GPU: refuses what has no kernel, and compiles nothing."""
    import onnx_ir as ir

    from bnfuse.graph.training_graph import open_graph
    from bnfuse.runtime.backends.resolve import resolve
    from bnfuse.runtime.compile import lower_graph

    for target in (resolve("cpu", 2), resolve("cuda:sm_90", precision="bf16")):
        lower_graph(open_graph(ir.from_proto(model)), target, None)


def by_compiling(model: onnx.ModelProto, x: Array, w: Array, labels: Array) -> tuple[float, Array]:
    import bnfuse

    step = bnfuse.compile(model, target="cpu", threads=2)
    step.load_state_dict({"w": w})
    return float(step(x, labels)), np.array(step.gradients()["w"])
