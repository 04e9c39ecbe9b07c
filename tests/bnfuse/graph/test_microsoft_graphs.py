"""Whole graphs of onnxruntime-training in our dialect, and what is refused of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from microsoft_graphs import Arrays, converted, model_of, node, normal, pool_model, run, same
from onnx import TensorProto

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.io import load
from bnfuse.graph.microsoft import convert, is_foreign
from bnfuse.graph.training_graph import open_graph, without_dropout
from bnfuse.models import build_forward
from bnfuse.passes import rewrite

NETWORKS = {  # with batches so large that no statistics are of a few elements
    "densenet40": {"batch": 2, "depth": 1, "image": 16},
    "resnet20": {"batch": 4, "image": 16},
    "googlenet": {"batch": 2, "image": 64},
}


def of_onnxruntime(name: str) -> tuple[ir.Model, onnx.ModelProto, Arrays]:
    """A training graph of the zoo as we build it, as onnxruntime builds it, and what both are fed."""
    from ort_training import forward_of, training_gradients

    graph = open_graph(without_dropout(ir.from_proto(build_training_graph(build_forward(name, **NETWORKS[name])))))
    signature = graph.signature
    theirs = training_gradients(forward_of(ir.to_proto(graph.model), signature), signature.trainable, signature.loss)
    wanted = [value.name for value in theirs.graph.input]
    feeds = {**graph.state(), **draw_feeds(graph, np.random.default_rng(0))}
    return graph.model, theirs, {key: feeds[key] for key in wanted}


@pytest.mark.ort_training
@pytest.mark.parametrize("name", NETWORKS)
def test_training_graphs_of_onnxruntime(name):
    _, theirs, feeds = of_onnxruntime(name)
    found = converted(theirs)
    expected, results = run(theirs, feeds), run(found, feeds)
    for key, value in expected.items():
        # a ReLU that rounding opens moves a gradient by as much; a wrong conversion is wrong by far more
        assert np.linalg.norm(results[key] - value) <= 5e-3 * np.linalg.norm(value), key
    gone = {n.name for n in theirs.graph.node} - {n.name for n in found.graph.node}
    assert not {name for name in gone if "_Grad/" not in name}
    assert {e.key: e.value for e in found.metadata_props} == {e.key: e.value for e in theirs.metadata_props}


@pytest.mark.ort_training
@pytest.mark.parametrize("name", ["densenet40", "resnet20"])
def test_they_are_fused_as_ours_are(name):
    ours, theirs, _ = of_onnxruntime(name)
    fused = [rewrite(model) for model in (ours, ir.from_proto(theirs))]
    kinds = [Counter(n.op_type for n in each.model.graph if n.domain == "ai.bnfuse") for each in fused]
    assert kinds[0] == kinds[1]
    unfused = [[entry.half for entry in each.report.unfused] for each in fused]
    assert unfused[0] == unfused[1]


def small() -> ir.Model:
    """A graph of onnxruntime's operators."""
    return ir.from_proto(pool_model("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]})[0])


def test_a_graph_of_our_dialect_stays_what_it_is():
    model = convert(small())
    assert not is_foreign(model) and convert(model) is model


def test_the_graph_that_is_given_stays_as_it_was():
    model = small()
    before = ir.to_proto(model)
    assert convert(model) is not model
    assert ir.to_proto(model) == before


def test_a_graph_is_converted_where_it_is_read(tmp_path):
    proto = ir.to_proto(small())
    onnx.save(proto, tmp_path / "pool.onnx")
    for source in (proto, ir.from_proto(proto), tmp_path / "pool.onnx"):
        assert [n.domain for n in load(source).graph] == ["", "ai.bnfuse"]


def test_an_operator_that_is_not_read():
    feeds = {"x": normal(0, 2, 3)}
    model = model_of([node("BiasDropout", ["x"], ["y", "mask"])], feeds, ["y"], shapes={"y": [2, 3]})
    with pytest.raises(BnfuseError, match=r"^train.onnx: node 'y' \(BiasDropout\) is an operator of onnxruntime that"):
        convert(ir.from_proto(model), "train.onnx")


def test_a_convolution_of_three_dimensions():
    feeds = {"dy": normal(0, 1, 2, 2, 2, 2), "x": normal(1, 1, 2, 2, 2, 2), "w": normal(2, 2, 2, 1, 1, 1)}
    model = model_of([node("ConvGrad", list(feeds), ["dx", "dw"])], feeds, ["dx"], shapes={"dx": [1, 2, 2, 2, 2]})
    with pytest.raises(BnfuseError, match="is of a convolution of 3 dimensions"):
        convert(ir.from_proto(model))


def test_another_element_type():
    feeds = {"dy": normal(0, 2, 3, 4, 4).astype(np.float64), "x": normal(1, 2, 3, 4, 4).astype(np.float64)}
    nodes = [node("ReluGrad", ["dy", "x"], ["dx"])]
    model = model_of(nodes, feeds, ["dx"])
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    assert [n.op_type for n in converted(model).graph.node] == ["Greater", "Where"]
    nodes = [node("ConvGrad", ["dy", "x", "x"], ["dx", "dw"])]
    model = model_of(nodes, feeds, ["dx"])
    with pytest.raises(BnfuseError, match="reads 'dy', which is double: convert the model to float32"):
        convert(ir.from_proto(model))


@pytest.mark.parametrize("opset", [13, 15])
@pytest.mark.ort_training
def test_an_older_opset_is_raised_to_one_that_can_add_where_it_scatters(opset):
    model, feeds = pool_model("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]})
    model.opset_import[0].version = opset
    same(model, feeds)
    assert converted(model).opset_import[0].version == 16


def test_an_opset_in_which_nothing_is_written():
    model, _ = pool_model("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]})
    model.opset_import[0].version = 12
    with pytest.raises(BnfuseError, match="has opset 12, and its gradients are written in 16"):
        convert(ir.from_proto(model))
