"""Small ConvNeXts as exporters write them, Transposes around LayerNorm and Linear layers, and the same in torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bnfuse.graph.training_graph import open_graph
from bnfuse.verifying.interpreter import run, wide, widened

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class Net:
    """A stem of a strided convolution and a LayerNorm, blocks, a LayerNorm and a convolution of 2x2 in between."""

    batch: int = 2
    channels: int = 4
    size: tuple[int, int] = (11, 9)
    window: int = 3  # of the depthwise convolutions
    layer_scale: bool = True
    drop_path: bool = False  # a factor for each sample, an input
    transposed: bool = True  # matrices are Transposes of the parameters
    affine: bool = True
    blocks: tuple[int, ...] = (1, 1)  # of each stage

    @property
    def widths(self) -> list[int]:
        return [self.channels * (1 + stage) for stage in range(len(self.blocks))]

    def values(self) -> dict[str, np.ndarray]:
        """The parameters, by name."""
        rng = np.random.default_rng(5)
        shapes: dict[str, tuple[int, ...]] = {"stem": (self.channels, 3, 2, 2), "stem.b": (self.channels,)}
        before = self.channels
        for stage, (c, count) in enumerate(zip(self.widths, self.blocks, strict=True)):
            shapes |= {f"{stage}.norm.s": (before,), f"{stage}.norm.b": (before,)}
            if stage:
                shapes |= {f"{stage}.down": (c, before, 2, 2), f"{stage}.down.b": (c,)}
            before = c
            for at in (f"{stage}.{block}" for block in range(count)):
                shapes |= {f"{at}.dw": (c, 1, self.window, self.window), f"{at}.dw.b": (c,)}
                shapes |= {f"{at}.norm.s": (c,), f"{at}.norm.b": (c,)}
                up, down = (4 * c, c), (c, 4 * c)
                shapes |= {f"{at}.up": up if self.transposed else up[::-1], f"{at}.up.b": (4 * c,)}
                shapes |= {f"{at}.down": down if self.transposed else down[::-1], f"{at}.down.b": (c,)}
                shapes |= {f"{at}.gamma": (c, 1, 1)} if self.layer_scale else {}
        return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}

    def model(self) -> onnx.ModelProto:
        """The forward model."""
        nodes: list[onnx.NodeProto] = []

        def add(op: str, *inputs: str, **given: Any) -> str:
            name = f"{op.lower()}_{len(nodes)}"
            nodes.append(helper.make_node(op, list(inputs), [name], name, **given))
            return name

        def norm(x: str, at: str) -> str:
            operands = [f"{at}.s", f"{at}.b"] if self.affine else [f"{at}.one"]
            return add("LayerNormalization", x, *operands, axis=-1, epsilon=EPSILON)

        def norm_of_map(x: str, at: str) -> str:
            return add("Transpose", norm(add("Transpose", x, perm=LAST), at), perm=FIRST)

        def linear(x: str, at: str) -> str:
            weight = add("Transpose", at, perm=[1, 0]) if self.transposed else at
            return add("Add", add("MatMul", x, weight), f"{at}.b")

        x = add("Conv", "x", "stem", "stem.b", strides=[2, 2])
        for stage, count in enumerate(self.blocks):
            x = norm_of_map(x, f"{stage}.norm")
            if stage:
                x = add("Conv", x, f"{stage}.down", f"{stage}.down.b", strides=[2, 2])
            for at in (f"{stage}.{block}" for block in range(count)):
                y = add("Conv", x, f"{at}.dw", f"{at}.dw.b", pads=[self.window // 2] * 4, group=self.widths[stage])
                y = norm(add("Transpose", y, perm=LAST), f"{at}.norm")
                y = add("Transpose", linear(add("Gelu", linear(y, f"{at}.up")), f"{at}.down"), perm=FIRST)
                y = add("Mul", y, f"{at}.gamma") if self.layer_scale else y
                y = add("Mul", y, "kept") if self.drop_path else y
                x = add("Add", y, x)
        nodes.append(helper.make_node("Flatten", [add("GlobalAveragePool", x)], ["scores"], "scores"))
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [self.batch, 3, *self.size])]
        if self.drop_path:
            inputs.append(helper.make_tensor_value_info("kept", TensorProto.FLOAT, [self.batch, 1, 1, 1]))
        values = self.values()
        if not self.affine:
            values = {name: value for name, value in values.items() if ".norm." not in name}
            for stage, count in enumerate(self.blocks):
                width = self.widths[max(stage - 1, 0)]
                values[f"{stage}.norm.one"] = np.ones(width, np.float32)
                values |= {f"{stage}.{b}.norm.one": np.ones(self.widths[stage], np.float32) for b in range(count)}
        graph = helper.make_graph(
            nodes,
            "convnext",
            inputs,
            [helper.make_tensor_value_info("scores", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(value, name) for name, value in values.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def feeds(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Data and labels of a step."""
        rng = np.random.default_rng(seed)
        found = {"x": rng.normal(size=(self.batch, 3, *self.size)).astype(np.float32)}
        if self.drop_path:
            found["kept"] = (np.arange(self.batch).reshape(-1, 1, 1, 1) % 2 * 2).astype(np.float32)
        return found | {"labels": rng.integers(self.widths[-1], size=self.batch)}

    def by_torch(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The loss and all gradients in float64, by autograd."""
        import torch
        from torch.nn import functional

        values = {name: torch.tensor(value.astype(np.float64)) for name, value in self.values().items()}
        for value in values.values():
            value.requires_grad_()

        def norm(x: Any, at: str) -> Any:
            scale, bias = (values[f"{at}.s"], values[f"{at}.b"]) if self.affine else (None, None)
            return functional.layer_norm(x.permute(LAST), x.shape[1:2], scale, bias, EPSILON)

        def linear(x: Any, at: str) -> Any:
            return functional.linear(x, values[at] if self.transposed else values[at].T, values[f"{at}.b"])

        x = functional.conv2d(torch.tensor(feeds["x"].astype(np.float64)), values["stem"], values["stem.b"], 2)
        for stage, count in enumerate(self.blocks):
            x = norm(x, f"{stage}.norm").permute(FIRST)
            if stage:
                x = functional.conv2d(x, values[f"{stage}.down"], values[f"{stage}.down.b"], 2)
            for at in (f"{stage}.{block}" for block in range(count)):
                c, pad = self.widths[stage], self.window // 2
                y = functional.conv2d(x, values[f"{at}.dw"], values[f"{at}.dw.b"], padding=pad, groups=c)
                y = functional.gelu(linear(norm(y, f"{at}.norm"), f"{at}.up"))
                y = linear(y, f"{at}.down").permute(FIRST)
                y = y * values[f"{at}.gamma"] if self.layer_scale else y
                x = x + (y * torch.tensor(feeds["kept"].astype(np.float64)) if self.drop_path else y)
        loss = functional.cross_entropy(x.mean((2, 3)), torch.tensor(feeds["labels"]))
        loss.backward()
        found = {f"{name}_grad": value.grad.numpy() for name, value in values.items() if value.grad is not None}
        return {"loss": loss.detach().numpy(), **found}


def in_float64(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Loss and gradients of a training graph, rewritten or not, by the interpreter."""
    signature = open_graph(model).signature
    model = widened(model)
    known = {value.name for value in model.graph.input}
    state = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name in known}
    found = run(model, {**state, **wide(feeds)})
    return {name: found[name] for name in (str(signature.loss), *signature.gradients.values())}
