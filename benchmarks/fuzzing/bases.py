"""The inputs that mutations begin with: made once, in a folder, with the commands themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper
from PIL import Image

from bnfuse.cli import main

BATCH, CLASSES = 4, 3

# Everything that passes and kernels look at, in few nodes: a concatenation, a sum, pools, dropout, a constant operand.
DENSE = """
<ir_version: 8, opset_import: ["" : 17]>
dense (float[4,1,8,8] x) => (float[4,3] logits) {
    c0 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w0)
    n0, m0, v0 = BatchNormalization <training_mode = 1> (c0, s0, b0, rm0, rv0)
    r0 = Relu (n0)
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r0, w1)
    t1 = Concat <axis = 1> (c0, c1)
    n1, m1, v1 = BatchNormalization <training_mode = 1, epsilon = 0.001> (t1, s1, b1, rm1, rv1)
    r1 = Relu (n1)
    c2 = Conv (r1, w2)
    p2 = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (c2)
    g = GlobalAveragePool (p2)
    f = Flatten <axis = 1> (g)
    logits = Gemm <transB = 1> (f, wh, bh)
}
"""
RESIDUAL = """
<ir_version: 8, opset_import: ["" : 17]>
residual (float[4,1,8,8] x) => (float[4,3] logits) {
    c0 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x, w0)
    n0, m0, v0 = BatchNormalization <training_mode = 1> (c0, s0, b0, rm0, rv0)
    r0 = Relu (n0)
    q0 = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [1, 1]> (r0)
    c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (q0, w1)
    n1, m1, v1 = BatchNormalization <training_mode = 1> (c1, s1, b1, rm1, rv1)
    a1 = Add (n1, q0)
    h1 = Clip (a1, low, high)
    d1 = Dropout (h1, ratio, on)
    shape = Constant <value_ints = [4, 64]> ()
    f = Reshape (d1, shape)
    logits = Gemm <transB = 1> (f, wh, bh)
}
"""


def weights(seed: int, **shapes: tuple[int, ...]) -> list[TensorProto]:
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal(shape, dtype=np.float32) / 2 for name, shape in shapes.items()}
    return [onnx.numpy_helper.from_array(value, name) for name, value in drawn.items()]


def norm(index: int, channels: int) -> list[TensorProto]:
    values = {"s": 1.0, "b": 0.1, "rm": 0.0, "rv": 1.0}
    arrays = {f"{name}{index}": np.full(channels, value, np.float32) for name, value in values.items()}
    return [onnx.numpy_helper.from_array(value, name) for name, value in arrays.items()]


def forward_models() -> dict[str, onnx.ModelProto]:
    dense, residual = onnx.parser.parse_model(DENSE), onnx.parser.parse_model(RESIDUAL)
    dense.graph.initializer.extend(weights(0, w0=(4, 1, 3, 3), w1=(2, 4, 3, 3), w2=(4, 6, 1, 1), wh=(3, 4), bh=(3,)))
    dense.graph.initializer.extend([*norm(0, 4), *norm(1, 6)])
    residual.graph.initializer.extend(weights(1, w0=(4, 1, 3, 3), w1=(4, 4, 3, 3), wh=(3, 64), bh=(3,)))
    residual.graph.initializer.extend([*norm(0, 4), *norm(1, 4)])
    for name, value in (("low", 0.0), ("high", 6.0), ("ratio", 0.25)):
        residual.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    residual.graph.initializer.append(helper.make_tensor("on", TensorProto.BOOL, [], [True]))
    for model in (dense, residual):
        for index, node in enumerate(model.graph.node):
            node.name = f"{node.op_type.lower()}_{index}"
    return {"dense": dense, "residual": residual}


def make_bases(folder: Path) -> None:
    """Into the folder: forward, training and rewritten graphs, a compiled step, a run with its checkpoints, data."""
    for name, model in forward_models().items():
        onnx.save(model, folder / f"{name}-forward.onnx")
        train, fused = folder / f"{name}.onnx", folder / f"{name}-fused.onnx"
        command("build", f"{folder / name}-forward.onnx", "-o", str(train))
        command("rewrite", str(train), "-o", str(fused))
    command(
        "rewrite", f"{folder}/residual.onnx", "-o", f"{folder}/residual-sampled.onnx", "--sample", "fs:1/4+vdn:1@0.5"
    )
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    labels = (np.arange(20) % CLASSES).astype(np.int64)
    np.savez(folder / "data.npz", x=images, y=labels, x_test=images[:8], y_test=labels[:8])
    for index, image in enumerate(images):
        place = folder / "photos" / "abc"[index % CLASSES]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(place / f"{index:02}.png")
    fused = f"{folder}/dense-fused.onnx"
    command("compile", fused, "-o", f"{folder}/step.bnf", "--optimizer", "adamw", "--threads", "1")
    data, logged = f"{folder}/data.npz", f"{folder}/run/run.jsonl"
    options = ("--epochs", "2", "--threads", "1", "--save", f"{folder}/run", "--metrics", logged, "--log-every", "2")
    command("train", fused, "--data", data, *options)


def command(*arguments: str) -> None:
    if main(list(arguments)):
        raise SystemExit(f"bnfuse {' '.join(arguments)} failed: there is nothing to mutate")
