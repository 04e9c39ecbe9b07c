"""Random networks of the blocks that people train: gates, branches, cross-stage parts, every activation."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH, CLASSES, SIZE = 2, 5, 8
SIMPLE = ("Relu", "HardSwish", "Elu", "Sigmoid", "Mish")


class Drawn:
    """A network that is drawn block by block. Maps are [2, C, H, W]. `groups`: most norms are GroupNorms then."""

    def __init__(self, seed: int, groups: bool = False) -> None:
        self.groups = groups
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.values: list[onnx.TensorProto] = []
        self.width = {"x": 3}
        self.size = SIZE
        self.act = self.random.choice(["Relu", "Relu", "Silu", "LeakyRelu", "HardSwish", "Gelu", "Relu6", "any"])

    def put(self, op: str, *inputs: str, width: int | None = None, **attributes: object) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        self.width[name] = self.width[inputs[0]] if width is None else width
        return name

    def value(self, value: object, dtype: type = np.float32) -> str:
        name = f"value{len(self.values)}"
        self.values.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def conv(self, x: str, width: int, k: int = 1, group: int = 1, bias: bool = False) -> str:
        shape = (width, self.width[x] // group, k, k)
        inputs = [x, self.value(self.rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:])))]
        inputs += [self.value(self.rng.standard_normal(width))] if bias else []
        return self.put("Conv", *inputs, width=width, kernel_shape=[k, k], pads=[k // 2] * 4, group=group)

    def norm(self, x: str) -> str:
        c = self.width[x]
        if self.groups and self.random.random() < 0.75:
            return self.group_norm(x)
        drawn = [self.rng.uniform(0.5, 1.5, c), self.rng.standard_normal(c) / 4]
        drawn += [self.rng.standard_normal(c) / 10, self.rng.uniform(0.5, 1.5, c)]
        return self.put("BatchNormalization", x, *map(self.value, drawn), training_mode=1)

    def group_norm(self, x: str) -> str:
        c = self.width[x]
        groups = self.random.choice([k for k in range(1, c + 1) if c % k == 0])
        kind, more = ("InstanceNormalization", {}) if groups == c else ("GroupNormalization", {"num_groups": groups})
        drawn = [self.rng.uniform(0.5, 1.5, groups), self.rng.standard_normal(groups) / 4]
        return self.put(kind, x, *map(self.value, drawn), **more)

    def activate(self, x: str, kind: str | None = None) -> str:
        kind = kind or self.act
        if kind == "any":
            kind = self.random.choice([*SIMPLE, "Silu", "LeakyRelu", "Gelu", "Relu6", "none"])
        if kind == "none":
            return x
        if kind == "Silu":
            return self.put("Mul", x, self.put("Sigmoid", x))
        if kind == "Relu6":
            return self.put("Clip", x, self.value(0.0), self.value(6.0))
        more = {"LeakyRelu": {"alpha": 0.1}, "Gelu": {"approximate": self.random.choice(["none", "tanh"])}}
        return self.put(kind, x, **more.get(kind, {}))

    def layer(self, x: str, width: int | None = None, act: bool = True) -> str:
        """Draw convolution, BatchNorm, activation."""
        width = width or self.random.choice([3, 4, 6])
        depthwise = self.random.random() < 0.25
        k = 3 if depthwise else self.random.choice([1, 3])
        y = self.conv(x, self.width[x], k, self.width[x]) if depthwise else self.conv(x, width, k)
        y = self.norm(y)
        y = self.activate(y) if act else y
        return self.conv_to(y, width) if self.width[y] != width else y

    def conv_to(self, x: str, width: int) -> str:
        return self.norm(self.conv(x, width))

    def cat(self, *xs: str) -> str:
        return self.put("Concat", *xs, axis=1, width=sum(self.width[x] for x in xs))

    def split(self, x: str, *widths: int) -> list[str]:
        names = [f"part{len(self.nodes)}_{i}" for i in range(len(widths))]
        lengths = self.value(widths, np.int64)
        self.nodes.append(helper.make_node("Split", [x, lengths], names, name=names[0], axis=1))
        self.width |= dict(zip(names, widths, strict=True))
        return names

    # blocks

    def plain(self, x: str) -> str:
        return self.layer(x)

    def part(self, x: str) -> str:
        """Draw a cross-stage part: half of the channels go around."""
        y = self.layer(x, 6)
        around, through = self.split(y, 2, 4)
        for _ in range(self.random.choice([1, 2])):
            through = self.layer(through, 4)
        return self.layer(self.cat(*self.random.sample([around, through], 2)))

    def one_shot(self, x: str) -> str:
        """Draw layers that are all concatenated in the end, and perhaps what they began with."""
        found = [x]
        for _ in range(self.random.choice([2, 3])):
            found.append(self.layer(found[-1], 3))
        return self.layer(self.cat(*found[self.random.choice([0, 1]) :]))

    def scales(self, x: str) -> str:
        """Draw Res2Net's chain of parts."""
        parts = self.split(self.layer(x, 6), 2, 2, 2)
        found = [parts[0]]
        for part in parts[1:]:
            joined = self.put("Add", found[-1], part) if self.random.random() < 0.6 else part
            found.append(self.layer(joined, 2))
        return self.norm(self.conv(self.cat(*found), 6))

    def ghost(self, x: str) -> str:
        y = self.activate(self.norm(self.conv(x, 3)))
        cheap = self.norm(self.conv(y, 3, 3, 3))
        cheap = self.activate(cheap) if self.random.random() < 0.5 else cheap
        return self.cat(y, cheap)

    def gated(self, x: str) -> str:
        """Draw squeeze and excitation."""
        y = self.layer(x)
        c = self.width[y]
        pooled = self.random.choice([self.pooled, self.mean])(y)
        hidden = self.activate(self.conv(pooled, 2, bias=True), "Relu")
        gate = self.put(self.random.choice(["Sigmoid", "HardSigmoid"]), self.conv(hidden, c, bias=True))
        scaled = self.put("Mul", *self.random.sample([y, gate], 2), width=c)
        return self.layer(scaled) if self.random.random() < 0.6 else self.around(x, scaled)

    def pooled(self, x: str) -> str:
        return self.put("GlobalAveragePool", x)

    def mean(self, x: str) -> str:
        return self.put("ReduceMean", x, self.value([2, 3], np.int64), keepdims=1)

    def around(self, x: str, y: str) -> str:
        """Draw a residual sum."""
        if self.width[x] != self.width[y]:
            x = self.conv_to(x, self.width[y])
        y = self.put("Add", *self.random.sample([x, y], 2))
        return self.activate(y) if self.random.random() < 0.7 else y

    def residual(self, x: str) -> str:
        return self.around(x, self.norm(self.conv(self.layer(x), 4, 3)))

    def before(self, x: str) -> str:
        """Draw pre-activation: the sum is not activated."""
        y = self.activate(self.norm(x))
        return self.put("Add", self.conv(y, self.width[x], 3), x)

    def parallel(self, x: str) -> str:
        """Draw RepVGG's branches, with or without the identity's BatchNorm."""
        c = self.width[x]
        y = self.put("Add", self.norm(self.conv(x, c, 3)), self.norm(self.conv(x, c)))
        y = self.put("Add", y, self.norm(x)) if self.random.random() < 0.7 else y
        return self.activate(y)

    def mixed(self, x: str) -> str:
        """Draw a BatchNorm behind the activation."""
        return self.norm(self.activate(self.conv(x, 4, 3, bias=True)))

    def mixer(self, x: str) -> str:
        """Draw ConvMixer's block: the BatchNorms behind the activations, and a skip past the depthwise convolution."""
        y = self.norm(self.activate(self.conv(x, self.width[x], 3, self.width[x], bias=True)))
        y = self.put("Add", *self.random.sample([x, y], 2)) if self.random.random() < 0.7 else y
        return self.norm(self.activate(self.conv(y, self.random.choice([4, 6]), bias=True)))

    def many(self, x: str) -> str:
        """Draw MobileOne's branches: as many convolutions as there are, some of them missing."""
        x = self.layer(x)
        y = self.norm(x) if self.random.random() < 0.7 else self.put("Add", self.norm(x), self.value(0.0))
        for _ in range(self.random.choice([2, 3, 4])):
            branch = self.norm(self.conv(x, self.width[x], self.random.choice([1, 3])))
            branch = self.activate(branch) if self.random.random() < 0.2 else branch
            y = self.put("Add", *self.random.sample([y, branch], 2))
        return self.activate(y)

    def halves(self, x: str) -> str:
        """Draw selective kernels on the halves of a map, beside a skip."""
        x = self.around(x, self.norm(self.conv(self.layer(x), 6)))
        found = [self.layer(part, 3) for part in self.split(x, 3, 3)]
        y = self.put("Add", *found) if self.random.random() < 0.5 else self.cat(*found)
        return self.around(x, self.norm(self.conv(y, 6)))

    def twice(self, x: str) -> str:
        """Draw two activations one behind the other, and a BatchNorm behind a BatchNorm."""
        y = self.activate(self.activate(self.norm(self.conv(x, 4))), self.random.choice(SIMPLE))
        y = self.norm(self.norm(y)) if self.random.random() < 0.5 else y
        return self.layer(y)

    def shuffled(self, x: str) -> str:
        y = self.cat(self.layer(x, 4), self.layer(x, 4))
        n = self.size
        y = self.put("Reshape", y, self.value([BATCH, 2, 4, n, n], np.int64))
        y = self.put("Transpose", y, perm=[0, 2, 1, 3, 4])
        y = self.put("Reshape", y, self.value([BATCH, 8, n, n], np.int64), width=8)
        first, second = self.split(y, 4, 4)
        return self.cat(first, self.layer(second, 4))

    def pool(self, x: str) -> str:
        if self.size < 4:
            return self.plain(x)
        self.size //= 2
        return self.put(self.random.choice(["MaxPool", "AveragePool"]), x, kernel_shape=[2, 2], strides=[2, 2])

    def enlarged(self, x: str) -> str:
        """Draw a small map that is enlarged again, and concatenated with the large one."""
        if self.size < 4:
            return self.plain(x)
        y = self.layer(self.put("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), 3)
        scales = self.value([1, 1, 2, 2])
        nodes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        y = self.put("Resize", y, "", scales, width=3, **nodes)
        return self.layer(self.cat(y, x))

    def padded(self, x: str) -> str:
        y = self.put("Pad", self.layer(x), self.value([0, 0, 1, 0, 0, 0, 1, 2], np.int64))
        weight = self.value(self.rng.standard_normal((4, self.width[y], 3, 3)) / np.sqrt(9 * self.width[y]))
        return self.norm(self.put("Conv", y, weight, width=4, kernel_shape=[3, 3]))


BLOCKS: tuple[Callable[[Drawn, str], str], ...] = (
    *(Drawn.plain, Drawn.part, Drawn.one_shot, Drawn.scales, Drawn.ghost, Drawn.gated, Drawn.residual, Drawn.before),
    *(Drawn.parallel, Drawn.mixed, Drawn.shuffled, Drawn.pool, Drawn.enlarged, Drawn.padded),
    *(Drawn.mixer, Drawn.many, Drawn.halves, Drawn.twice),
)


def modern_network(seed: int, blocks: int = 4, groups: bool = False) -> onnx.ModelProto:
    """Draw a classifier: a layer, some blocks, and what was not read concatenated, pooled and classified."""
    drawn = Drawn(seed, groups)
    x = drawn.layer("x")
    for _ in range(blocks):
        x = drawn.random.choice(BLOCKS)(drawn, x)
    pooled = drawn.put("Flatten", drawn.pooled(x))
    weight = drawn.value(drawn.rng.standard_normal((CLASSES, drawn.width[x])))
    drawn.put("Gemm", pooled, weight, drawn.value(np.zeros(CLASSES)), transB=1)
    drawn.nodes[-1].output[0] = "logits"
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [BATCH, 3, SIZE, SIZE])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [BATCH, CLASSES])
    graph = helper.make_graph(drawn.nodes, "modern", [image], [logits], drawn.values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
