"""Forms in which passes meet: what each of them must not take for its own."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from random_modern import BATCH, CLASSES, SIZE, Drawn

from bnfuse.build import build_training_graph
from bnfuse.passes import rewrite
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


def check(forward: onnx.ModelProto, level: str = "icf", **options: object) -> ir.Model:
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
    return result.model


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_each_layer_scale_takes_the_sums_of_its_own_batch_norm(level):
    net = Network()
    x = net.conv("x", 4, 3)
    norms = [net.norm(x), net.norm(x)]
    net.nodes[-1].attribute.append(helper.make_attribute("epsilon", 0.5))
    y = net.put("Add", *(net.put("Mul", norm, net.scale(4)) for norm in norms))
    check(net.classified(net.block(y, 4)), level)


@pytest.mark.parametrize("width", [4, 6])
def test_a_matrix_that_is_read_both_ways(width):
    net = Network()
    p = net.put("Flatten", net.pooled(net.block("x", 4)))
    matrix = net.value(net.rng.standard_normal((4, width)))
    h = net.activate(net.norm(net.put("MatMul", p, matrix, width=width)))
    y = net.activate(net.norm(net.put("Gemm", h, matrix, width=4, transB=1)))
    check(net.with_logits(y, 4))


@pytest.mark.parametrize("first", [(0, 0), (2, 2)])
def test_pieces_without_channels(first):
    net = Network()
    x = net.block("x", 6)
    empty, piece = net.cut(x, *first), net.cut(x, first[0], first[0] + 2)
    check(net.classified(net.block(net.cat(empty, net.block(piece, 4), piece), 4)))


def test_two_graph_outputs_that_are_one_piece():
    net = Network()
    x = net.block("x", 6)
    outputs = {net.cut(x, 0, 2): (BATCH, 2, SIZE, SIZE), net.cut(x, 0, 2): (BATCH, 2, SIZE, SIZE)}
    outputs[net.block(net.cut(x, 2, 6), 4)] = (BATCH, 4, SIZE, SIZE)
    check(net.model(outputs), loss="none")


@pytest.mark.parametrize("level", ["bnff", "icf"])
def test_a_gate_whose_squeeze_is_no_mean(level):
    net = Network()
    y = net.block("x", 4)
    squeezed = net.put("ReduceSum", y, net.value([2, 3], np.int64), keepdims=1)
    gated = net.put("Mul", y, net.put("Sigmoid", squeezed))
    check(net.classified(net.block(gated, 4)), level)
