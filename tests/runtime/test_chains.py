"""Small operators one behind the other as one launch, on both targets, beside the same nodes one by one in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from lowered_graph import Graph, assert_close, kernels, shapes_of

from bnfuse.runtime.lowering import chains

N, C = 6, 37
BOTH = pytest.mark.parametrize("on", ["cpu", "gpu"])


def run(graph, on, monkeypatch):
    """The operators that are launched, and the results, held against the evaluator's."""
    wanted = graph.by_evaluator()
    made, found = graph.on_cpu(shapes_of(wanted)) if on == "cpu" else graph.on_gpu(shapes_of(wanted), monkeypatch)
    assert_close(found, wanted)
    return kernels(made.program)


def ints(*values):
    return np.array(values, np.int64)


AXES = (("first", ints(0)), ("flat", ints(0, -1)), ("share", np.array(1 / 49, np.float32)))
SUMS = tuple((name, (N, C)) for name in ("beta", "slope", "gamma", "tilt"))
GATE = Graph(
    """pooled = Mul(ds, share)
    s = Reshape(pooled, flat)
    f = Reshape(g, flat)
    t0 = Mul(beta, f)
    t1 = Mul(slope, s)
    t2 = Add(t0, t1)
    db = ReduceSum<keepdims = 0>(t2, first)
    t3 = Mul(gamma, f)
    t4 = Mul(tilt, s)
    t5 = Add(t3, t4)
    dg = ReduceSum<keepdims = 0>(t5, first)
    """,
    (("ds", (N, C, 1, 1)), ("g", (N, C, 1, 1)), *SUMS),
    AXES,
    ("pooled", "db", "dg"),
)


@BOTH
def test_what_a_gate_computes_by_image_and_channel_is_one_launch(on, monkeypatch):
    assert run(GATE, on, monkeypatch) == ["Chain"]


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        "a = Sigmoid(x)  b = Mul(a, vector)  c = Sub(b, column)  y = Where(positive, c, one)",
        "a = Equal(x, one)  b = Cast<to = 1>(a)  c = Mul(b, column)  y = Max(c, vector)",
        "a = Exp(vector)  b = Expand(a, rows)  y = Add(b, x)",
        "a = HardSigmoid(x)  b = Mul(a, a)  y = Add(b, x)",
        "a = Clip(x, low, one)  b = Neg(a)  y = Mul(b, vector)",
    ],
)
def test_operands_are_broadcast(body, on, monkeypatch):
    constants = (
        ("one", np.array(1, np.float32)),
        ("low", np.array(-0.5, np.float32)),
        ("positive", np.arange(N * C).reshape(N, C) % 3 > 0),
        ("rows", ints(N, C)),
    )
    used = tuple((name, array) for name, array in constants if name in body)
    inputs = tuple(pair for pair in (("x", (N, C)), ("vector", (C,)), ("column", (N, 1))) if pair[0] in body)
    assert "Chain" in run(Graph(body, inputs, used), on, monkeypatch)


@BOTH
def test_what_others_read_is_stored_and_is_there_in_time(on, monkeypatch):
    body = "a = Mul(x, z)  b = Add(a, z)  m = MatMul(b, w)  c = Sub(b, x)  d = Mul(c, a)  e = Softmax(d)  y = Mul(e, c)"
    graph = Graph(body, (("x", (N, C)), ("z", (N, C)), ("w", (C, C))), outputs=("y", "m"))
    assert run(graph, on, monkeypatch) == ["Chain", "Gemm", "Chain", "Softmax", "Mul"]


@BOTH
def test_formulas_do_not_grow_without_bounds(on, monkeypatch):
    """Each doubles what is before it."""
    names = [f"t{i}" for i in range(20)]
    body = "  ".join(f"{new} = Add({old}, {old})" for old, new in zip(["x", *names], [*names, "y"], strict=False))
    assert 2 <= len(run(Graph(body, (("x", (N, C)),)), on, monkeypatch)) < len(names) / 2


@BOTH
def test_a_sum_that_is_read_again_ends_the_chain(on, monkeypatch):
    body = "a = Mul(x, z)  b = ReduceMean<keepdims = 1>(a, first)  c = Sub(a, b)  y = Mul(c, z)"
    graph = Graph(body, (("x", (N, C)), ("z", (N, C))), AXES[:1])
    assert run(graph, on, monkeypatch) == ["Chain", "Chain"]


LONG = chains.FEW // 4


@pytest.mark.parametrize(
    ("body", "inputs", "launched"),
    [
        ("a = Mul(x, z)  y = Neg(a)", (("x", (5, LONG)), ("z", (5, LONG))), ["Mul", "Neg"]),  # many elements
        ("a = Mul(x, z)  y = Neg(a)", (("x", (2, 3, 4)), ("z", (2, 3, 4))), ["Mul", "Neg"]),  # more than two axes
        ("a = Neg(x)  b = Neg(z)  y = MatMul(a, b)", (("x", (4, 5)), ("z", (5, 4))), ["Neg", "Neg", "Gemm"]),
        ("a = Neg(x)  b = Neg(z)  y = MatMul(a, b)", (("x", (5, 5)), ("z", (5, 5))), ["Neg", "Neg", "Gemm"]),
        ("a = Neg(x)  y = ReduceSum<keepdims = 0>(a, last)", (("x", (4, 5)),), ["Neg", "ReduceSum"]),
        ("a = Neg(x)  y = Add(a, z)", (("x", (5,)), ("z", (4, 5))), ["Neg", "Add"]),  # fewer elements
    ],
)
def test_other_launches_stay_what_they_are(body, inputs, launched):
    graph = Graph(body, inputs, (("last", ints(1)),) if "last" in body else ())
    wanted = {name: value.shape for name, value in graph.by_evaluator().items()}
    assert kernels(graph.lowered(wanted).program) == launched
