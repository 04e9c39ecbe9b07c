"""Small networks as text, their training graphs, and what a rewritten graph must still compute."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from bnfuse.build import build_training_graph
from bnfuse.opset.schemas import check_model
from bnfuse.opset.spec import find, is_unfused
from bnfuse.passes import Rewritten, rewrite

Feeds = dict[str, np.ndarray]


def forward_model(body: str, opset: int = 17, seed: int = 0) -> onnx.ModelProto:
    """A classifier from its body, a line per node: `bn(x)`, or `conv(x, 8, k=3)` with 8 output channels and weights.

    The map `out` at the end is pooled and classified.
    """
    return _Network(seed, opset).parse(body)


class _Network:
    def __init__(self, seed: int, opset: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.values: list[onnx.TensorProto] = []
        self.channels = {"x": 3}

    def parse(self, body: str) -> onnx.ModelProto:
        for line in filter(None, (line.strip() for line in body.splitlines())):
            result, call = (part.strip() for part in line.split(" = ", 1))
            name, arguments = re.fullmatch(r"(\w+)\((.*)\)", call).groups()  # type: ignore[union-attr]
            plain = [part.strip() for part in arguments.split(",") if "=" not in part]
            options = dict(part.strip().split("=") for part in arguments.split(",") if "=" in part)
            results = [part.strip() for part in result.split(",")]
            getattr(self, name)(
                *(results if name != "cut" else (results,)),
                *plain,
                **{key: int(value) for key, value in options.items()},
            )
        self.node("GlobalAveragePool", ["out"], "pooled")
        self.node("Flatten", ["pooled"], "flat")
        weight = self.parameter("fc/weight", self.rng.standard_normal((5, self.channels["out"])))
        self.node("Gemm", ["flat", weight, self.parameter("fc/bias", np.zeros(5))], "logits", transB=1)
        helper = onnx.helper
        x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3, 8, 8])
        logits = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, [2, 5])
        graph = helper.make_graph(self.nodes, "network", [x], [logits], self.values)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def node(self, op: str, inputs: list[str], result: str, more: tuple[str, ...] = (), **attributes: object) -> None:
        self.nodes.append(onnx.helper.make_node(op, inputs, [result, *more], name=result, **attributes))
        self.channels.setdefault(result, self.channels.get(inputs[0], 0) if inputs else 0)

    def parameter(self, name: str, value: np.ndarray) -> str:
        if name not in {tensor.name for tensor in self.values}:
            self.values.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def conv(self, y: str, x: str, out: str, w: int = 0, k: int = 1, s: int = 1, g: int = 1, bias: int = 0) -> None:
        shape = (int(out), self.channels[x] // g, k, k)
        scale = np.sqrt(2 / np.prod(shape[1:]))
        inputs = [x, self.parameter(f"{f'shared{w}' if w else y}/weight", self.rng.standard_normal(shape) * scale)]
        if bias:
            inputs.append(self.parameter(f"{y}/bias", self.rng.standard_normal(int(out))))
        self.channels[y] = int(out)
        pads = [k // 2] * 4
        self.node("Conv", inputs, y, kernel_shape=[k, k], strides=[s, s], pads=pads, group=g)

    def up(
        self, y: str, x: str, out: str, k: int = 2, s: int = 2, p: int = 0, more: int = 0, g: int = 1, bias: int = 0
    ) -> None:
        weight = self.rng.standard_normal((self.channels[x], int(out) // g, k, k)) / np.sqrt(self.channels[x])
        inputs = [x, self.parameter(f"{y}/weight", weight)]
        if bias:
            inputs.append(self.parameter(f"{y}/bias", self.rng.standard_normal(int(out))))
        self.channels[y] = int(out)
        window = {"kernel_shape": [k, k], "strides": [s, s], "pads": [p] * 4, "output_padding": [more] * 2, "group": g}
        self.node("ConvTranspose", inputs, y, **window)

    def bn(self, y: str, x: str, zero: int = 0, eps: int = 5) -> None:
        c = self.channels[x]
        scale = np.zeros(c) if zero else 1 + 0.3 * self.rng.standard_normal(c)
        inputs = [
            x,
            self.parameter(f"{y}/scale", scale),
            self.parameter(f"{y}/bias", 0.3 * self.rng.standard_normal(c)),
        ]
        inputs += [self.parameter(f"{y}/mean", np.zeros(c)), self.parameter(f"{y}/var", np.ones(c))]
        more = (f"{y}/new_mean", f"{y}/new_var")
        self.node("BatchNormalization", inputs, y, more, training_mode=1, epsilon=10.0**-eps, momentum=0.9)

    def gn(self, y: str, x: str, groups: int = 1) -> None:
        """Normalise each sample by groups of channels, written out as torch's exporter does; 0: a channel each."""
        c = self.channels[x]
        affine = [1 + 0.3 * self.rng.standard_normal(c), 0.3 * self.rng.standard_normal(c)]
        if not groups:
            scale, bias = (self.parameter(f"{y}/{name}", v) for name, v in zip(("scale", "bias"), affine, strict=True))
            self.node("InstanceNormalization", [x, scale, bias], y)
            return
        for name, shape in ((f"{y}/groups", [0, groups, -1]), (f"{y}/axes", [1, 2])):
            self.integers(name, *shape)
        for name, value in ((f"{y}/ones", 1), (f"{y}/zeros", 0)):
            self.node("Constant", [], name, value=onnx.numpy_helper.from_array(np.full(groups, value, np.float32)))
        self.node("Reshape", [x, f"{y}/groups"], f"{y}/wide")
        self.node("InstanceNormalization", [f"{y}/wide", f"{y}/ones", f"{y}/zeros"], f"{y}/flat")
        self.node("Shape", [x], f"{y}/shape")
        self.channels[f"{y}/flat"] = c
        self.node("Reshape", [f"{y}/flat", f"{y}/shape"], f"{y}/plain")
        last = f"{y}/plain"
        for kind, name, value, result in (("Mul", "scale", affine[0], f"{y}/scaled"), ("Add", "bias", affine[1], y)):
            parameter = self.parameter(f"{y}/{name}", value)
            self.node("Unsqueeze", [parameter, f"{y}/axes"], f"{y}/{name}/aligned")
            self.node(kind, [last, f"{y}/{name}/aligned"], result)
            last = result
        self.channels[y] = c

    def relu(self, y: str, x: str) -> None:
        self.node("Relu", [x], y)

    def relu6(self, y: str, x: str) -> None:
        self.node("Clip", [x, self.parameter("clip/min", np.array(0)), self.parameter("clip/max", np.array(6))], y)

    def silu(self, y: str, x: str) -> None:
        self.node("Sigmoid", [x], f"{y}/sigmoid")
        self.node("Mul", [x, f"{y}/sigmoid"], y)

    def sigmoid(self, y: str, x: str, hard: int = 0) -> None:
        self.node("HardSigmoid" if hard else "Sigmoid", [x], y, **({"alpha": 1 / 6} if hard else {}))

    def elu(self, y: str, x: str) -> None:
        self.node("Elu", [x], y)

    def hardswish(self, y: str, x: str) -> None:
        self.node("HardSwish", [x], y)

    def zero(self, y: str, x: str) -> None:
        self.node("Constant", [], f"{y}/zero", value=onnx.numpy_helper.from_array(np.array(0, np.float32)))
        self.node("Add", [x, f"{y}/zero"], y)

    def sub(self, y: str, a: str, b: str) -> None:
        self.node("Sub", [a, b], y)

    def mean(self, y: str, x: str, reduce: int = 0) -> None:
        if reduce:
            self.node("ReduceMean", [x], y, axes=[-1, -2])
        else:
            self.node("GlobalAveragePool", [x], y)

    def expand(self, y: str, x: str, size: str) -> None:
        shape = np.array([2, self.channels[x], int(size), int(size)], np.int64)
        self.node("Constant", [], f"{y}/shape", value=onnx.numpy_helper.from_array(shape))
        self.node("Expand", [x, f"{y}/shape"], y)

    def scale(self, y: str, x: str) -> None:
        self.channels[y] = self.channels[x]
        shape = onnx.numpy_helper.from_array(np.array([1, -1, 1, 1]))
        self.node("Constant", [], f"{y}/shape", value=shape)
        gamma = self.parameter(f"{y}/gamma", self.rng.standard_normal(self.channels[x]))
        self.node("Tanh", [gamma], f"{y}/bounded")  # a plain parameter becomes one of the BatchNorm in front
        self.node("Reshape", [f"{y}/bounded", f"{y}/shape"], f"{y}/factor")
        self.node("Mul", [x, f"{y}/factor"], y)

    def mul(self, y: str, a: str, b: str) -> None:
        self.channels[y] = self.channels[a]
        self.node("Mul", [a, b], y)

    def drop(self, y: str, x: str, divide: int = 0) -> None:
        """A drop path that has drawn already: a factor for each of two samples; 1 and 2 divide before and after it."""
        factor = onnx.numpy_helper.from_array(np.array([0.5, 2], np.float32).reshape(2, 1, 1, 1))
        self.node("Constant", [], f"{y}/factor", value=factor)
        keep = self.parameter(f"{y}/keep", np.array(0.8))
        scaled = f"{y}/scaled"
        if divide == 1:
            self.node("Div", [x, keep], scaled)
        else:
            self.node("Mul", [x, f"{y}/factor"], y if not divide else scaled)
        if divide:
            self.node(*(("Mul", [scaled, f"{y}/factor"]) if divide == 1 else ("Div", [scaled, keep])), y)
        self.channels[y] = self.channels[x]

    def add(self, y: str, a: str, b: str) -> None:
        self.node("Add", [a, b], y)

    def cat(self, y: str, *xs: str) -> None:
        self.channels[y] = sum(self.channels[x] for x in xs)
        self.node("Concat", list(xs), y, axis=1)

    def resize(self, y: str, x: str, h: int = 2, w: int = 2, mode: int = 0) -> None:
        kind = ("nearest", "linear", "cubic")[mode]
        rule = {"coordinate_transformation_mode": "half_pixel" if mode else "asymmetric", "nearest_mode": "floor"}
        scales = self.parameter(f"{y}/scales", np.array([1, 1, h, w]))
        self.node("Resize", [x, "", scales], y, mode=kind, **rule)

    def reflect(self, y: str, x: str) -> None:
        self.values.append(onnx.numpy_helper.from_array(np.array([0, 0, 1, 2, 0, 0, 1, 0]), f"{y}/pads"))
        self.node("Pad", [x, f"{y}/pads"], y, mode="reflect")

    def shuffle(self, y: str, x: str, g: int = 2, w: int = 8) -> None:
        c = self.channels[x]
        for name, shape in ((f"{y}/groups", [0, g, c // g, -1, w]), (f"{y}/whole", [0, c, -1, w])):
            self.values.append(onnx.numpy_helper.from_array(np.array(shape), name))
        self.node("Reshape", [x, f"{y}/groups"], f"{y}/wide")
        self.node("Transpose", [f"{y}/wide"], f"{y}/turned", perm=[0, 2, 1, 3, 4])
        self.node("Reshape", [f"{y}/turned", f"{y}/whole"], y)
        self.channels[y] = c

    def cut(self, ys: list[str], x: str, *sizes: str) -> None:
        """Give the pieces of x of so many channels each."""
        self.channels |= {y: int(size) for y, size in zip(ys, sizes, strict=True)}
        lengths = self.integers(f"{ys[0]}/lengths", *map(int, sizes))
        self.node("Split", [x, lengths], ys[0], tuple(ys[1:]), axis=1)

    def part(self, y: str, x: str, start: str, stop: str) -> None:
        """Give channels [start, stop) of x, by a Slice."""
        bounds = {"starts": start, "ends": stop, "axes": 1, "steps": 1}
        names = [self.integers(f"{y}/{name}", int(value)) for name, value in bounds.items()]
        self.channels[y] = len(range(self.channels[x])[int(start) : int(stop)])
        self.node("Slice", [x, *names], y)

    def integers(self, name: str, *values: int) -> str:
        self.values.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def maxpool(self, y: str, x: str, k: int = 2, s: int = 2) -> None:
        self.node("MaxPool", [x], y, kernel_shape=[k, k], strides=[s, s], pads=[(k - 1) // 2] * 4)

    def avgpool(self, y: str, x: str, k: int = 2, s: int = 2, p: int = 0, count: int = 0) -> None:
        pads = {"kernel_shape": [k, k], "strides": [s, s], "pads": [p] * 4, "count_include_pad": count}
        self.node("AveragePool", [x], y, **pads)


def feeds_for(model: onnx.ModelProto, seed: int = 1) -> Feeds:
    """Random data and labels, and the file's own values for everything else."""
    rng = np.random.default_rng(seed)
    feeds = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    feeds = {value.name: feeds[value.name] for value in model.graph.input if value.name in feeds}
    (shape,) = ([d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input if v.name == "x")
    feeds["x"] = rng.standard_normal(shape).astype(np.float32)
    feeds["labels"] = rng.integers(0, 5, shape[0])
    return feeds


def run(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """All outputs through onnxruntime, which updates running statistics in the arrays it is given: hence the copies."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {k: v.copy() for k, v in feeds.items()}), strict=True))


@pytest.fixture
def training() -> Callable[..., ir.Model]:
    """The training graph of a network given as text."""

    def build(body: str, train: list[str] | None = None, shape: tuple[int, ...] | None = None, **more: int) -> ir.Model:
        forward = forward_model(body, **more)
        if shape is not None:
            for value, dims in ((forward.graph.input[0], shape), (forward.graph.output[0], (shape[0], 5))):
                for dim, size in zip(value.type.tensor_type.shape.dim, dims, strict=True):
                    dim.dim_value = size
        return ir.from_proto(build_training_graph(forward, train=train or ["*"]))

    return build


@pytest.fixture(name="ort")
def ort_fixture() -> Callable[[ir.Model, Feeds], Feeds]:
    """All outputs through onnxruntime, with data and values of `feeds_for` and what else is fed."""

    def evaluate(model: ir.Model, more: Feeds) -> Feeds:
        proto = ir.to_proto(model)
        return run(proto, {**feeds_for(proto), **more})

    return evaluate


@pytest.fixture
def rewritten() -> Callable[..., Rewritten]:
    """Rewrite a graph and check what holds of every rewrite: it is valid, computes the same, and is a fixed point."""

    def check(model: ir.Model, level: str = "icf", tolerance: float = 2e-4, **options: object) -> Rewritten:
        before = ir.to_proto(model)
        result = rewrite(model, level=level, **options)  # type: ignore[arg-type]
        assert ir.to_proto(model) == before, "the model that was given has changed"
        after = ir.to_proto(result.model)
        check_model(after)
        if level != "none":
            onnx.checker.check_model(after, full_check=True)
        assert [v.name for v in after.graph.output] == [v.name for v in before.graph.output]
        feeds = feeds_for(before)
        expected, found = run(before, feeds), run(after, feeds)
        floor = 1e-3 * max(float(np.linalg.norm(v)) for k, v in expected.items() if k.endswith("_grad"))
        for name, value in expected.items():
            error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + floor)
            assert error <= tolerance, f"{name} is off by {error:.1e}"
        again = rewrite(result.model, level=level, **options)  # type: ignore[arg-type]
        assert [entry.name for entry in again.report.passes if entry.changed] == []
        for node in result.model.graph:
            of_a_pass = node.domain == "ai.bnfuse" and not is_unfused(find(node.op_type))
            assert not of_a_pass or {"bnfuse.sources", "bnfuse.pass"} <= {*node.metadata_props}
        return result

    return check


@pytest.fixture
def ops() -> Callable[[Rewritten], list[str]]:
    """The op types of a graph, sorted, without the classifier's, the loss's and the coefficients'."""
    quiet = re.compile(
        r"BatchNorm(Finalize|GradTerms\w*|GradFinalize)|Gemm|Shape|Reshape|Flatten|ReduceSum|Identity|Expand|Softmax.*"
    )

    def kinds(result: Rewritten) -> list[str]:
        nodes = [n for n in result.model.graph if not (n.name or "").startswith("loss/")]
        return sorted(n.op_type for n in nodes if not quiet.fullmatch(n.op_type))

    return kinds


@pytest.fixture
def network() -> Callable[..., onnx.ModelProto]:
    """The forward model of a network given as text."""
    return forward_model


@pytest.fixture
def onnxruntime() -> Callable[..., Feeds]:
    """All outputs of a training graph of these networks through onnxruntime, for one batch."""
    return lambda model, **more: run(model, {**feeds_for(model), **more})
