"""Networks that a test writes block by block, and the check of what their training graphs are rewritten to."""

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper
from random_modern import BATCH, CLASSES, SIZE, Drawn

from bnfuse.build import build_training_graph
from bnfuse.passes import rewrite
from bnfuse.passes.pipeline import Rewritten
from bnfuse.verifying.interpreter import run, wide, widened


class Network(Drawn):
    """A network that is written block by block."""

    def __init__(self) -> None:
        super().__init__(0)
        self.act = "Relu"

    def block(self, x: str, width: int) -> str:
        return self.activate(self.norm(self.conv(x, width, 3)))

    def scale(self, width: int) -> str:
        """Write a parameter for each channel."""
        drawn = self.put("Tanh", self.value(self.rng.uniform(0.5, 2, width)), width=width)
        return self.put("Reshape", drawn, self.value([1, width, 1, 1], np.int64), width=width)

    def cut(self, x: str, start: int, stop: int) -> str:
        ends = [self.value([each], np.int64) for each in (start, stop, 1)]
        return self.put("Slice", x, *ends, width=stop - start)

    def classified(self, x: str) -> onnx.ModelProto:
        pooled = self.put("Flatten", self.pooled(x))
        return self.with_logits(pooled, self.width[x])

    def with_logits(self, rows: str, width: int) -> onnx.ModelProto:
        weight = self.value(self.rng.standard_normal((CLASSES, width)))
        self.put("Gemm", rows, weight, self.value(np.zeros(CLASSES)), transB=1)
        self.nodes[-1].output[0] = "logits"
        return self.model({"logits": (BATCH, CLASSES)})

    def model(self, outputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (BATCH, 3, SIZE, SIZE))
        graph = helper.make_graph(self.nodes, "network", [x], made, self.values)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model)


def check(forward: onnx.ModelProto, level: str = "icf", **options: object) -> Rewritten:
    """Rewrite the training graph: valid, equal in float64, and a fixed point."""
    proto = build_training_graph(forward, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    feeds = {name: arrays.get(name, rng.standard_normal(shape)) for name, shape in shapes.items()}
    feeds |= {"labels": rng.integers(0, CLASSES, BATCH)} if "labels" in feeds else {}
    result = rewrite(ir.from_proto(proto), level=level)
    after = ir.to_proto(result.model)
    onnx.checker.check_model(after, full_check=True)
    expected, found = run(widened(proto), wide(feeds)), run(widened(after), wide(feeds))
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 1e-9 * max(np.linalg.norm(value), 1e-3), name
    assert [entry.name for entry in rewrite(result.model, level=level).report.passes if entry.changed] == []
    return result
