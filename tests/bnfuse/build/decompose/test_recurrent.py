"""Recurrences of a fixed number of steps are unrolled."""

from __future__ import annotations

import numpy as np
import pytest
from decomposed import after, by_onnxruntime, check_same, floats, ints, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from bnfuse.core.errors import BnfuseError

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


@given(
    kind=st.sampled_from(["GRU", "LSTM", "RNN"]),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    steps=st.integers(1, 4),
    optional=st.fixed_dictionaries(
        {key: st.booleans() for key in ("bias", "lengths", "initial", "peephole", "option")}
    ),
    results=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_direction_and_operand(kind, direction, steps, optional, results):
    batch, inputs, hidden, rows = 2, 3, 4, GATES[kind] * 4
    both = 2 if direction == "bidirectional" else 1
    feeds = {"x": floats(steps, batch, inputs)}
    values = {"w": floats(both, rows, inputs, seed=1), "r": floats(both, rows, hidden, seed=2)}
    names = ["x", "w", "r", "", "", "", "", ""]
    if optional["bias"]:
        names[3], values["b"] = "b", floats(both, 2 * rows, seed=3)
    if optional["lengths"]:
        names[4], values["lengths"] = "lengths", np.full(batch, steps, np.int32)
    if optional["initial"]:
        names[5], values["h"] = "h", floats(both, batch, hidden, seed=4)
        if kind == "LSTM":
            names[6], values["c"] = "c", floats(both, batch, hidden, seed=5)
    if optional["peephole"] and kind == "LSTM":
        names[7], values["p"] = "p", floats(both, 3 * hidden, seed=6)
    while not names[-1]:
        names.pop()
    attrs = {"hidden_size": hidden, "direction": direction}
    if kind == "GRU" and optional["option"]:
        attrs["linear_before_reset"] = 1
    if kind == "RNN" and optional["option"]:
        attrs["activations"] = ["Relu"] * both
    outputs = ["y", "last_h", "last_c"][: min(results, 3 if kind == "LSTM" else 2)]
    node = helper.make_node(kind, names, outputs, name="it", **attrs)
    variables = [name for name in "wrbp" if name in values]
    check_same(model_of([node], feeds, values, outputs=outputs), feeds, variables=variables)


def swapped(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(0, 1))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_batch_first_is_the_same_with_axes_swapped(kind, direction):
    """onnxruntime knows the other layout alone."""
    both, rows = 2 if direction == "bidirectional" else 1, GATES[kind] * 4
    x, h = floats(3, 2, 5), floats(both, 2, 4, seed=3)
    values = {"w": floats(both, rows, 5, seed=1), "r": floats(both, rows, 4, seed=2)}
    found = {}
    for layout, feeds in ((0, {"x": x, "h": h}), (1, {"x": swapped(x), "h": swapped(h)})):
        node = helper.make_node(
            kind, ["x", "w", "r", "", "", "h"], ["y", "hn"], hidden_size=4, direction=direction, layout=layout
        )
        found[layout] = by_onnxruntime(after(model_of([node], feeds, values, outputs=["y", "hn"])), feeds)
    np.testing.assert_array_equal(found[1][0], found[0][0].transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(found[1][1], swapped(found[0][1]))


def test_sequences_of_several_lengths_are_refused():
    feeds = {"x": floats(3, 2, 5)}
    values = {"w": floats(1, 16, 5), "r": floats(1, 16, 4), "l": ints(2, 3).astype(np.int32)}
    model = model_of(
        [helper.make_node("LSTM", ["x", "w", "r", "", "l"], ["y"], name="it", hidden_size=4)], feeds, values
    )
    with pytest.raises(BnfuseError, match=r"^node 'it' \(LSTM\) has sequences of several lengths"):
        check_same(model, feeds)
