"""LSTM, GRU and RNN, unrolled: the number of steps is fixed with the shape of the input.

    all steps at once    X*W' + bias, [T*N, gates*H], then cut into steps
    each step            a Gemm of the state with R, added to what comes from the input, then the gates

Both directions, both layouts, initial states, peepholes, linear_before_reset and input_forget, clipped gates;
activations without parameters of their own. Where sequences have lengths of their own, steps beyond one leave the state
as it is and give zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .writer import Writer

ACTIVATIONS = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
DEFAULTS = {"GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One direction of the operator: its sizes and operands ([gates*H, ...]); bias and peephole may be missing."""

    steps: int
    batch: int
    hidden: int
    w: str
    r: str
    bias: tuple[str, str] | None  # of the input and of the state
    h: str  # initial states, [N, H]
    c: str
    peephole: str
    activations: tuple[str, ...]


Step = Callable[[Writer, Layer, str, str, str], tuple[str, str]]  # input part, h, c -> new h, new c


def recurrent(write: Writer) -> None:
    """Write LSTM, GRU or RNN, unrolled. Raises for activations with parameters."""
    node, given = write.node, write.given
    x, batch_first = node.input[0], bool(given.get("layout"))
    shape = write.shape(x)
    steps, batch = (shape[1], shape[0]) if batch_first else shape[:2]
    _check(write)
    if batch_first:
        x = write.transpose(x, [1, 0, 2])
    flat = write.add("Reshape", [x, write.ints("shape", [steps * batch, shape[2]])])
    direction = given.get("direction", b"forward").decode()
    layers = _layers(write, steps, batch, 2 if direction == "bidirectional" else 1, batch_first)
    masks = _masks(write, steps, batch)
    outputs, hs, cs = [], [], []
    for index, layer in enumerate(layers):
        backwards = direction == "reverse" or index == 1
        every, h, c = _unrolled(write, layer, flat, masks, backwards)
        outputs.append(every)
        hs.append(h)
        cs.append(c)
    _results(write, layers, outputs, hs, cs, batch_first)


def _masks(write: Writer, steps: int, batch: int) -> list[str]:
    """Tell for each step which sequences have it, [N, 1]; empty where all have. Lengths may be computed."""
    if not write.operand(4):
        return [""] * steps
    lengths = write.known(write.operand(4))
    if lengths is not None:
        own = [(lengths > t).reshape(batch, 1) for t in range(steps)]
        return ["" if mask.all() else write.constant("has_step", mask) for mask in own]
    column = write.add("Reshape", [write.operand(4), write.ints("column", [batch, 1])])
    return [write.add("Greater", [column, write.constant("step", np.array(t, np.int32))]) for t in range(steps)]


def _check(write: Writer) -> None:
    if write.given.get("activation_alpha") or write.given.get("activation_beta"):
        raise write.error("has activations with parameters: use those without (Sigmoid, Tanh, Relu).")


def _layers(write: Writer, steps: int, batch: int, directions: int, batch_first: bool) -> list[Layer]:
    kind, node = write.node.op_type, write.node
    hidden = write.shape(node.input[2])[2]
    names = [text.decode() for text in write.given.get("activations", [])] or list(DEFAULTS[kind]) * directions
    if odd := [name for name in names if name not in ACTIVATIONS]:
        raise write.error(f"has the activation {odd[0]}: there are {', '.join(ACTIVATIONS)}.")
    per = len(DEFAULTS[kind])
    weights, states = _parts(write, node.input[1], directions), _parts(write, node.input[2], directions)
    biases = _parts(write, write.operand(3), directions)
    first_h = _states(write, write.operand(5), directions, batch, hidden, batch_first)
    first_c = _states(write, write.operand(6), directions, batch, hidden, batch_first) if kind == "LSTM" else [""] * 2
    peepholes = _parts(write, write.operand(7), directions) if kind == "LSTM" else [""] * 2
    layers = []
    for i in range(directions):
        bias = None
        if biases[i]:
            half = [GATES[kind] * hidden] * 2
            of_input, of_state = write.several("Split", [biases[i], write.ints("halves", half)], 2, axis=0)
            bias = of_input, of_state
        activations = tuple(names[i * per : (i + 1) * per])
        layers.append(
            Layer(
                *(steps, batch, hidden, weights[i], states[i], bias),
                *(first_h[i], first_c[i], peepholes[i], activations),
            )
        )
    return layers


def _parts(write: Writer, name: str, directions: int) -> list[str]:
    """Give an operand for each direction, without the axis of directions."""
    if not name:
        return [""] * directions
    shape = write.shape(name)
    if directions == 1:
        return [write.reshape(name, shape[1:])]
    parts = write.several("Split", [name, write.ints("directions", [1] * directions)], directions, axis=0)
    return [write.reshape(part, shape[1:]) for part in parts]


def _states(write: Writer, name: str, directions: int, batch: int, hidden: int, batch_first: bool) -> list[str]:
    """Give the initial states, [N, H] each."""
    if not name:
        return [write.constant("zeros", np.zeros((batch, hidden), np.float32))] * directions
    if batch_first:
        if directions > 1:
            parts = write.several("Split", [name, write.ints("directions", [1] * directions)], directions, axis=1)
            return [write.reshape(part, [batch, hidden]) for part in parts]
        return [write.reshape(name, [batch, hidden])]
    return _parts(write, name, directions)


def _unrolled(
    write: Writer, layer: Layer, flat: str, masks: Sequence[str], backwards: bool
) -> tuple[list[str], str, str]:
    """Give the states of all steps in the order of time, and the last h and c."""
    kind = write.node.op_type
    if kind == "GRU" and layer.bias:  # the bias of the state stands inside the reset
        part = write.add("Gemm", [flat, layer.w, layer.bias[0]], transB=1)
    elif layer.bias:
        part = write.add("Gemm", [flat, layer.w, write.add("Add", [*layer.bias])], transB=1)
    else:
        part = write.add("Gemm", [flat, layer.w], transB=1)
    pieces = [part]
    if layer.steps > 1:
        lengths = write.ints("steps", [layer.batch] * layer.steps)
        pieces = write.several("Split", [part, lengths], layer.steps, axis=0)
    step, h, c = STEPS[kind], layer.h, layer.c
    every = [""] * layer.steps
    for t in reversed(range(layer.steps)) if backwards else range(layer.steps):
        new_h, new_c = step(write, layer, pieces[t], h, c)
        every[t] = new_h
        if masks[t]:
            every[t] = write.add("Where", [masks[t], new_h, write.number("zero", 0.0)])
            new_h = write.add("Where", [masks[t], new_h, h])
            new_c = write.add("Where", [masks[t], new_c, c]) if new_c else ""
        h, c = new_h, new_c
    return every, h, c


def _cut(write: Writer, x: str, hidden: int, parts: int) -> list[str]:
    return write.several("Split", [x, write.ints("gates", [hidden] * parts)], parts, axis=1)


def _activated(write: Writer, name: str, x: str) -> str:
    """Apply the activation of a gate, to what is clipped where the operator says so."""
    bound = write.given.get("clip")
    if bound:
        x = write.add("Clip", [x, write.number("low", -bound), write.number("high", bound)])
    return write.add(name, [x])


def _lstm(write: Writer, layer: Layer, piece: str, h: str, c: str) -> tuple[str, str]:
    f, g, k = layer.activations
    i, o, forget, cell = _cut(write, write.add("Gemm", [h, layer.r, piece], transB=1), layer.hidden, 4)
    peeps = [""] * 3
    if layer.peephole:
        peeps = write.several("Split", [layer.peephole, write.ints("peepholes", [layer.hidden] * 3)], 3, axis=0)
        i = write.add("Add", [i, write.add("Mul", [c, peeps[0]])])
        forget = write.add("Add", [forget, write.add("Mul", [c, peeps[2]])])
    i = _activated(write, f, i)
    if write.given.get("input_forget"):
        forget = write.add("Sub", [write.number("one", 1.0), i])
    else:
        forget = _activated(write, f, forget)
    c = write.add("Add", [write.add("Mul", [forget, c]), write.add("Mul", [i, _activated(write, g, cell)])])
    if layer.peephole:
        o = write.add("Add", [o, write.add("Mul", [c, peeps[1]])])
    return write.add("Mul", [_activated(write, f, o), write.add(k, [c])]), c


def _gru(write: Writer, layer: Layer, piece: str, h: str, c: str) -> tuple[str, str]:
    f, g = layer.activations
    hidden = layer.hidden
    two_and_one = write.ints("gates_and_candidate", [2 * hidden, hidden])
    if write.given.get("linear_before_reset"):
        state = [h, layer.r, *([layer.bias[1]] if layer.bias else [])]
        of_state = _cut(write, write.add("Gemm", state, transB=1), hidden, 3)
        of_input = _cut(write, piece, hidden, 3)
        z, r = (_activated(write, f, write.add("Add", [of_input[k], of_state[k]])) for k in (0, 1))
        candidate = write.add("Add", [of_input[2], write.add("Mul", [r, of_state[2]])])
    else:
        gates, last = write.several("Split", [layer.r, two_and_one], 2, axis=0)
        piece = write.add("Add", [piece, layer.bias[1]]) if layer.bias else piece
        first, second = write.several("Split", [piece, two_and_one], 2, axis=1)
        z, r = _cut(write, _activated(write, f, write.add("Gemm", [h, gates, first], transB=1)), hidden, 2)
        candidate = write.add("Gemm", [write.add("Mul", [r, h]), last, second], transB=1)
    candidate = _activated(write, g, candidate)
    moved = write.add("Mul", [z, write.add("Sub", [h, candidate])])
    return write.add("Add", [candidate, moved]), c


def _rnn(write: Writer, layer: Layer, piece: str, h: str, c: str) -> tuple[str, str]:
    return _activated(write, layer.activations[0], write.add("Gemm", [h, layer.r, piece], transB=1)), c


STEPS: dict[str, Step] = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}


def _results(
    write: Writer,
    layers: Sequence[Layer],
    outputs: Sequence[Sequence[str]],
    hs: Sequence[str],
    cs: Sequence[str],
    batch_first: bool,
) -> None:
    steps, batch, hidden = layers[0].steps, layers[0].batch, layers[0].hidden

    def joined(parts: Sequence[str], axis: int) -> str:
        return parts[0] if len(parts) == 1 else write.add("Concat", parts, axis=axis)

    for index, states in ((1, hs), (2, cs)):
        if write.has_result(index):
            shape = [batch, 1, hidden] if batch_first else [1, batch, hidden]
            axis = 1 if batch_first else 0
            write.give(joined([write.add("Reshape", [s, write.ints("shape", shape)]) for s in states], axis), index)
    if write.has_result(0):
        shape = [steps, 1, batch, hidden]
        every = [write.add("Reshape", [joined(part, 0), write.ints("shape", shape)]) for part in outputs]
        y = joined(every, 1)
        write.give(write.transpose(y, [2, 0, 1, 3]) if batch_first else y)
