"""Model-local functions that would never end, or fill the memory, once they are written out."""

from __future__ import annotations

import time

import onnx
import onnx.helper as h
import pytest

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph import io
from bnfuse.graph.wellformed import MAX_NODES, check_functions

OPSETS = [h.make_opsetid("", 17), h.make_opsetid("my", 1)]


def calling(name: str, *callees: str) -> onnx.FunctionProto:
    """y = name(x), which calls the callees one after the other."""
    values = ["x", *(f"v{i}" for i in range(1, len(callees))), "y"]
    nodes = [
        h.make_node(callee, [before], [after], domain="" if callee == "Relu" else "my")
        for callee, before, after in zip(callees, values[:-1], values[1:], strict=True)
    ]
    return h.make_function("my", name, ["x"], ["y"], nodes, OPSETS)


def model(*functions: onnx.FunctionProto, calls: str = "f0") -> onnx.ModelProto:
    x, y = (h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = h.make_graph([h.make_node(calls, ["x"], ["y"], name="call", domain="my")], "calls", [x], [y])
    return h.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=8)


def doubling(levels: int) -> onnx.ModelProto:
    """2**levels nodes, from as many functions as levels."""
    functions = [calling(f"f{i}", f"f{i + 1}", f"f{i + 1}") for i in range(levels)]
    return model(*functions, calling(f"f{levels}", "Relu"))


def in_subgraph(callee: str) -> onnx.NodeProto:
    def branch(name: str) -> onnx.GraphProto:
        node = h.make_node(callee, ["x"], [f"{name}_y"], domain="my")
        return h.make_graph([node], name, [], [h.make_tensor_value_info(f"{name}_y", onnx.TensorProto.FLOAT, [2, 3])])

    return h.make_node("If", ["x"], ["y"], then_branch=branch("a"), else_branch=branch("b"))


def test_functions_within_the_bound_are_left_alone():
    check_functions(doubling(10))


@pytest.mark.parametrize("levels", [26, 64])
def test_functions_that_double_are_counted_and_not_written_out(levels, tmp_path):
    made = doubling(levels)
    path = tmp_path / "doubling.onnx"
    path.write_bytes(made.SerializeToString())
    begin = time.perf_counter()
    for read in (
        lambda: io.load(path),
        lambda: io.load(made),
        lambda: build_training_graph(made),
        lambda: bnfuse.inspect(path),
    ):
        with pytest.raises(BnfuseError, match=f"{MAX_NODES} are the most"):
            read()
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize(
    "functions",
    [
        [calling("f0", "f0")],
        [calling("f0", "Relu", "f1"), calling("f1", "f0")],
        [h.make_function("my", "f0", ["x"], ["y"], [in_subgraph("f0")], OPSETS)],
        [calling("f0", "Relu"), calling("unused", "unused")],
    ],
    ids=["itself", "each other", "in a subgraph", "never called"],
)
def test_a_function_that_calls_itself_is_refused(functions):
    with pytest.raises(BnfuseError, match=r"^calls: function '\w+' calls itself: export the model without it$"):
        io.load(model(*functions))


def test_a_chain_of_functions_too_deep_to_follow_is_refused():
    chain = [calling(f"f{i}", f"f{i + 1}") for i in range(3000)]
    with pytest.raises(BnfuseError, match="functions deep: export the model without it"):
        io.load(model(*chain, calling("f3000", "Relu")))
