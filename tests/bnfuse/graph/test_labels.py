"""Classes of labels, as what reads them says."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.graph.labels import Classes, classes_of


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("l = SoftmaxCrossEntropyLoss (s, y)", Classes(5)),
        ("l = SoftmaxCrossEntropyLoss <ignore_index = 255> (s, y)", Classes(5, 255)),
        ("l = SoftmaxCrossEntropyLoss <ignore_index = 255> (s, y) m = SoftmaxCrossEntropyLoss (s, y)", Classes(5)),
        ("u = Unsqueeze (y, one) l = GatherElements <axis = 1> (s, u)", Classes(5)),
        ("l = Gather <axis = 0> (s, y)", Classes(4)),
        ("h = Where (c, y, y) l = Gather <axis = 1> (s, h)", Classes(5, exact=False)),
        ("l = OneHot (y, depth, off_on)", Classes(7, exact=False)),
        ("l = OneHot (y, depth, off_on) m = SoftmaxCrossEntropyLoss (s, y)", Classes(5)),
        ("f = Cast <to = 1> (y) l = Mul (f, f)", None),
    ],
)
def test_classes_are_those_of_the_readers(nodes, expected):
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[4, 5] s, int64[4] y, bool[4] c) => (float l)
        <int64[1] one = {{1}}, int64[1] depth = {{7}}, float[2] off_on = {{0, 1}}> {{ {nodes} }}"""
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    assert classes_of(graph, ["y", "s", "none"]) == ({} if expected is None else {"y": expected})
