"""Networks with one random operator or a few in a residual branch, written as text."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

import bnfuse
from bnfuse.build import build_training_graph

BATCH, CLASSES = 4, 5
CONSTANTS = {
    "rows": np.zeros((BATCH, 1, 1, 1), np.float32),
    "ones": np.ones((BATCH, 1, 1, 1), np.float32),
    "keeps": np.full((BATCH, 1, 1, 1), 0.75, np.float32),
    "uneven": np.array([0.5, 0.75, 0.25, 1], np.float32).reshape(BATCH, 1, 1, 1),
    "keep": np.float32(0.75),
    "drop": np.float32(0.25),
    "inverse": np.float32(1 / 0.75),
    "half": np.float32(0.5),
    "zero": np.float32(0),
    "one": np.float32(1),
    "tenth": np.float32(0.1),
    "yes": np.array(True),
}
DROP_PATH = """
    u = RandomUniformLike(rows)
    kept = Less(u, keep)
    mask = Cast<to = 1>(kept)
    scaled = Div(mask, keep)
    d = Mul(x, scaled)
"""


def forward_model(body: str = DROP_PATH) -> onnx.ModelProto:
    """relu(bn(conv(image))) + d(x), pooled and classified: `body` makes `d` of the map `x`, [4, 8, 8, 8]."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[{BATCH},3,8,8] image) => (float[{BATCH},{CLASSES}] logits) {{
            stem = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(image, w0)
            n1, rm1, rv1 = BatchNormalization<training_mode = 1>(stem, g1, b1, m1, v1)
            r1 = Relu(n1)
            y1 = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(r1, w1)
            x, rm2, rv2 = BatchNormalization<training_mode = 1>(y1, g2, b2, m2, v2)
            {body}
            joined = Add(r1, d)
            last = Relu(joined)
            pooled = GlobalAveragePool(last)
            flat = Flatten(pooled)
            logits = Gemm<transB = 1>(flat, fc, fb)
        }}""")
    rng = np.random.default_rng(0)
    shapes = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "fc": (CLASSES, 8), "fb": (CLASSES,)}
    arrays = {name: rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for name, shape in shapes.items()}
    for index in (1, 2):
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, 8), f"b{index}": rng.standard_normal(8) / 10}
        arrays |= {f"m{index}": rng.standard_normal(8) / 10, f"v{index}": rng.uniform(0.5, 1.5, 8)}
    read = {name for node in model.graph.node for name in node.input}
    for name, array in {**{k: v.astype(np.float32) for k, v in arrays.items()}, **CONSTANTS}.items():
        if name in read:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    for node in model.graph.node:
        node.name = f"{node.output[0]}/{node.op_type}"
    return model


def training_graph(body: str = DROP_PATH) -> onnx.ModelProto:
    return build_training_graph(forward_model(body))


def step_of(model: onnx.ModelProto, level: str = "icf", lr: float = 0.0) -> bnfuse.Step:
    rewritten = bnfuse.rewrite(model, level=level)
    return bnfuse.compile(rewritten, optimizer=bnfuse.SGD(lr=lr, momentum=0.9), threads=1)


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(seed).standard_normal((BATCH, 3, 8, 8), dtype=np.float32)
    return images, np.arange(BATCH) % CLASSES
