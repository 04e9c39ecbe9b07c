"""Recurrences of a fixed number of steps are unrolled."""

from __future__ import annotations

import numpy as np
import pytest
from decomposed import after, by_onnxruntime, check_gradients, check_same, floats, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

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


@given(
    kind=st.sampled_from(["GRU", "LSTM", "RNN"]),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    lengths=st.tuples(*[st.integers(1, 4)] * 3),
    computed=st.booleans(),
    clip=st.sampled_from([0.0, 0.3]),
    linear=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_sequences_of_their_own_lengths_and_clipped_gates(kind, direction, lengths, computed, clip, linear):
    both, rows = 2 if direction == "bidirectional" else 1, GATES[kind] * 4
    feeds = {"x": floats(4, 3, 5), "l": np.array(lengths, np.float32)}
    values = {"w": floats(both, rows, 5, seed=1), "r": floats(both, rows, 4, seed=2), "h": floats(both, 3, 4, seed=3)}
    given_lengths = helper.make_node("Cast", ["l"], ["lengths"], to=6)
    if not computed:
        values["lengths"] = np.array(feeds.pop("l"), np.int32)
    attributes = {"direction": direction, "hidden_size": 4, **({"clip": clip} if clip else {})}
    if kind == "GRU":
        attributes["linear_before_reset"] = int(linear)
    outputs = ["y", "hn", "cn"] if kind == "LSTM" else ["y", "hn"]
    node = helper.make_node(kind, ["x", "w", "r", "", "lengths", "h"], outputs, name="it", **attributes)
    nodes = [given_lengths, node] if computed else [node]
    check_same(model_of(nodes, feeds, values, outputs=outputs), feeds, tolerance=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("lengths", [(4, 2, 1), (3, 3, 3)])
def test_gradients_of_padded_batches_are_torchs(lengths):
    order = np.r_[0:4, 12:16, 4:8, 8:12]  # ONNX has i, o, f, c, torch i, f, g, o
    wide = {name: floats(*shape, seed=i).astype(float) for i, (name, shape) in enumerate(SIZES.items())}

    def function(torch, x, w, r, b):
        layer = torch.nn.LSTM(5, 4).double()
        names = {"weight_ih_l0": w[0], "weight_hh_l0": r[0], "bias_ih_l0": b[0, :16], "bias_hh_l0": b[0, 16:]}
        own = {name: value[np.argsort(order)] for name, value in names.items()}
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
        found, _ = torch.func.functional_call(layer, own, (packed,))
        return torch.nn.utils.rnn.pad_packed_sequence(found, total_length=4)[0][:, None]

    node = helper.make_node("LSTM", ["x", "w", "r", "b", "l"], ["y"], name="it", hidden_size=4)
    check_gradients([node], wide, function, values={"l": np.array(lengths, np.int32)})


SIZES = {"x": (4, 3, 5), "w": (1, 16, 5), "r": (1, 16, 4), "b": (1, 32)}
