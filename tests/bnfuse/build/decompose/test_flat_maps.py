"""Maps of one and three dimensions are flattened once, not around each convolution."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from decomposed import by_onnxruntime, check_same, floats, model_of
from onnx import helper

SIZES = {1: (9,), 3: (4, 5, 6)}


def network(rank: int, extra: list[onnx.NodeProto], last: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """x -> Conv -> BN -> Relu -> extra -> Conv -> y."""
    feeds = {"x": floats(2, 3, *SIZES[rank])}
    values = {"w": floats(4, 3, *[3] * rank, seed=1), "v": floats(2, 4, *[1] * rank, seed=2), "b": floats(4, seed=3)}
    values |= {name: floats(4, seed=seed, low=0.5) for seed, name in enumerate(("s", "m", "q"), 4)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1] * (2 * rank)),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "q"], ["n", "nm", "nq"], "bn", training_mode=1),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        *extra,
        helper.make_node("Conv", [last, "v"], ["y"], "last"),
    ]
    return model_of(nodes, feeds, values, outputs=["y", "nm", "nq"], opset=17), feeds


EXTRA = {
    "nothing": ([], "r"),
    "a sum": ([helper.make_node("Add", ["r", "n"], ["a"], "add")], "a"),
    "a pooling": (None, "p"),
    "halves of a concatenation": (
        [
            helper.make_node("Neg", ["r"], ["g"], "neg"),
            helper.make_node("Concat", ["r", "g"], ["j"], "join", axis=1),
            helper.make_node("Split", ["j"], ["h", "k"], "cut", axis=1),
            helper.make_node("Mul", ["h", "k"], ["o"], "mul"),
        ],
        "o",
    ),
}


@pytest.mark.parametrize("rank", SIZES)
@pytest.mark.parametrize("name", EXTRA)
def test_what_is_between_convolutions_is_computed_of_flat_maps(rank, name):
    extra, last = EXTRA[name]
    if extra is None:
        extra = [helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2] * rank, strides=[2] * rank)]
    model, feeds = network(rank, extra, last)
    made = check_same(model, feeds, variables=["w", "v", "s", "b", "m", "q"], gone=[], tolerance=1e-5)
    shapes = {value.name: len(value.type.tensor_type.shape.dim) for value in made.graph.value_info}
    between = [
        n for n in made.graph.node if n.op_type in ("BatchNormalization", "Relu", "Add", "Neg", "Concat", "MaxPool")
    ]
    kept = [node for node in between if node.name in ("bn", "relu", "add", "neg", "join", "pool")]
    assert kept and all(shapes[node.output[0]] == 4 for node in kept)
    moved = [
        n.op_type for n in made.graph.node if n.op_type in ("Reshape", "Transpose") and n.input[0] not in ("w", "v")
    ]
    if rank == 1 and name != "halves of a concatenation":
        assert moved == ["Reshape", "Reshape"]  # the way in and the way out


def test_a_map_that_is_an_output_has_its_own_shape():
    model, feeds = network(1, [], "r")
    model.graph.output.append(helper.make_tensor_value_info("r", 1, None))
    made = check_same(model, feeds, variables=["w", "v"], gone=[], tolerance=1e-5)
    assert by_onnxruntime(made, feeds)[3].shape == (2, 4, 9)
