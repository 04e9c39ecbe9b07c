"""Gradients of what moves elements: shapes, slices, paddings, blocks."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check, differentiated, few, floats, ints, many, node, seeds, shapes
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch


@few
@given(shapes(2), seeds)
def test_other_shapes_of_the_same_elements(shape, seed):
    feeds = {"x": floats(*shape, seed=seed)}
    nodes = [
        node("Reshape", "x shape", "a"),
        node("Flatten", "x", "b", axis=1),
        node("Unsqueeze", "x front", "c"),
        node("Squeeze", "c front", "d"),
    ]
    constants = {"shape": ints(-1), "front": ints(0, -1)}

    def function(torch, x):
        return x.reshape(-1), x.flatten(1), x[None, ..., None], x * 1

    check(nodes, feeds, function, constants=constants, outputs=("a", "b", "c", "d"))


@few
@given(st.permutations(range(4)), seeds)
def test_transpositions(order, seed):
    x = floats(2, 3, 1, 4, seed=seed)
    check([node("Transpose", "x", "y", perm=list(order))], {"x": x}, lambda torch, x: x.permute(order))


def test_a_transposition_without_an_order_reverses_the_axes():
    check([node("Transpose", "x", "y")], {"x": floats(2, 3, 4)}, lambda torch, x: x.permute(2, 1, 0))


@pytest.mark.parametrize(
    ("shape", "wide"), [((3, 1), (2, 3, 4)), ((1,), (3,)), ((), (2, 2)), ((2, 3), (2, 3)), ((1, 3), (5, 1))]
)
def test_expand(shape, wide):
    def function(torch, x):
        return x.expand(torch.broadcast_shapes(x.shape, wide))

    check([node("Expand", "x wide", "y")], {"x": floats(*shape)}, function, constants={"wide": ints(*wide)})


@few
@given(shapes(), seeds, st.data())
def test_tile(shape, seed, data):
    repeats = [data.draw(st.integers(1, 3)) for _ in shape]
    nodes, constants = [node("Tile", "x repeats", "y")], {"repeats": ints(*repeats)}
    check(nodes, {"x": floats(*shape, seed=seed)}, lambda torch, x: x.tile(repeats), constants=constants)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("lengths", [(2,), (1, 3), (2, 1, 4)])
def test_concat(axis, lengths):
    feeds = {}
    for i, length in enumerate(lengths):
        shape = [2, 3, 2]
        shape[axis] = length
        feeds[f"x{i}"] = floats(*shape, seed=i)
    nodes = [node("Concat", " ".join(feeds), "y", axis=axis)]
    check(nodes, feeds, lambda torch, *x: torch.cat(x, axis))


@pytest.mark.parametrize(
    ("lengths", "count"),
    [((2, 3, 1), 3), (None, 2), (None, 3), (None, 4), ((6,), 1), ((0, 6), 2)],
    ids=str,
)
@pytest.mark.parametrize("read", ["all", "first", "last"])
def test_split(lengths, count, read):
    names = [f"y{i}" for i in range(count)]
    used = {"all": names, "first": names[:1], "last": names[-1:]}[read]
    constants = {} if lengths is None else {"lengths": ints(*lengths)}
    attributes = {"num_outputs": count} if lengths is None else {}
    operands = "x" if lengths is None else "x lengths"

    def function(torch, x):
        part = -(-6 // count)
        sizes = lengths or [max(0, min(part, 6 - i * part)) for i in range(count)]
        parts = dict(zip(names, x.split(list(sizes), 1), strict=True))
        return tuple(parts[name] for name in used)

    nodes = [node("Split", operands, " ".join(names), axis=1, **attributes)]
    check(nodes, {"x": floats(2, 6, 3)}, function, constants=constants, outputs=used)


def test_split_leaves_out_a_part_that_nothing_names():
    nodes = [node("Split", "x lengths", "a - c", axis=0)]
    feeds, constants = {"x": floats(6, 2)}, {"lengths": ints(1, 2, 3)}
    check(nodes, feeds, lambda torch, x: (x[:1], x[3:]), constants=constants, outputs=("a", "c"))


@st.composite
def slices(draw, size: int):
    bound = st.one_of(st.integers(-size - 2, size + 2), st.sampled_from([2**31 - 1, -(2**31), 2**62]))
    step = draw(st.sampled_from([-3, -2, -1, 1, 1, 2, 3]))
    start, end = draw(bound), draw(bound)
    taken = range(size)[slice(start, None if step < 0 and end < -size else end, step)]
    return (start, end, step) if len(taken) else ((size, -size - 1, step) if step < 0 else (0, size, step))


@many
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), seeds, st.data())
def test_slices_of_any_steps(shape, seed, data):
    at = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    cuts = [data.draw(slices(shape[axis])) for axis in at]
    starts, ends, steps = zip(*cuts, strict=True)
    named = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in at]
    constants = {"starts": ints(*starts), "ends": ints(*ends), "axes": ints(*named), "steps": ints(*steps)}

    def function(torch, x):
        for axis, (start, end, step) in zip(at, cuts, strict=True):
            size = shape[axis]
            taken = range(size)[slice(start, None if step < 0 and end < -size else end, step)]
            x = x.index_select(axis, torch.tensor(list(taken)))
        return x

    nodes = [node("Slice", "x starts ends axes steps", "y")]
    check(nodes, {"x": floats(*shape, seed=seed)}, function, constants=constants)


def test_a_slice_of_the_first_axes_names_none():
    constants = {"starts": ints(1, 0), "ends": ints(3, 2)}
    nodes = [node("Slice", "x starts ends", "y")]
    check(nodes, {"x": floats(4, 3, 2)}, lambda torch, x: x[1:3, :2], constants=constants)


def test_a_slice_of_steps_of_one_is_padded_and_nothing_else():
    constants = {"starts": ints(1), "ends": ints(3), "axes": ints(1)}
    found = differentiated([node("Slice", "x starts ends axes", "y")], {"x": floats(2, 4)}, constants=constants)
    assert found.operators() == ["Pad"]


@many
@given(shapes(), seeds, st.data())
def test_padding_with_a_constant_and_cropping(shape, seed, data):
    pads = [data.draw(st.integers(-(size - 1) // 2, 3)) for size in (*shape, *shape)]
    rank = len(shape)
    feeds = {"x": floats(*shape, seed=seed), "fill": np.array(1.5)}

    def function(torch, x, fill):
        flat = [n for axis in reversed(range(rank)) for n in (pads[axis], pads[axis + rank])]
        inside = torch.nn.functional.pad(torch.ones_like(x), flat)
        return torch.nn.functional.pad(x, flat) + fill * (1 - inside)

    nodes = [node("Pad", "x pads fill", "y")]
    constants = {"pads": ints(*pads)}
    check(nodes, feeds, function, constants=constants)


def test_padding_of_some_axes():
    nodes, constants = [node("Pad", "x pads - axes", "y")], {"pads": ints(1, 0, 2, 1), "axes": ints(-1, 0)}
    check(
        nodes,
        {"x": floats(3, 2, 4)},
        lambda torch, x: torch.nn.functional.pad(x, (1, 2, 0, 0, 0, 1)),
        constants=constants,
    )


@few
@given(st.integers(1, 3), st.sampled_from(["DCR", "CRD"]), seeds)
def test_depth_to_space(size, mode, seed):
    x = floats(2, 2 * size * size, 3, 2, seed=seed)

    def function(torch, x):
        n, c, h, w = x.shape
        if mode == "CRD":
            return torch.nn.functional.pixel_shuffle(x, size)
        parts = x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return parts.reshape(n, c // size**2, h * size, w * size)

    check([node("DepthToSpace", "x", "y", blocksize=size, mode=mode)], {"x": x}, function)


@few
@given(st.integers(1, 3), seeds)
def test_space_to_depth(size, seed):
    x = floats(2, 3, 2 * size, 3 * size, seed=seed)

    def function(torch, x):
        n, c, h, w = x.shape
        parts = x.reshape(n, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4)
        return parts.reshape(n, c * size**2, h // size, w // size)

    check([node("SpaceToDepth", "x", "y", blocksize=size)], {"x": x}, function)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("diagonal", [None, -1, 0, 2])
def test_triangles(upper, diagonal):
    constants = {} if diagonal is None else {"k": np.array(diagonal, np.int64)}
    nodes = [node("Trilu", f"x {' '.join(constants)}", "y", upper=upper)]

    def function(torch, x):
        return (torch.triu if upper else torch.tril)(x, diagonal or 0)

    check(nodes, {"x": floats(2, 3, 4)}, function, constants=constants)


def test_sequences_that_are_reversed():
    nodes = [node("ReverseSequence", "x lengths", "y", batch_axis=1, time_axis=0)]

    def function(torch, x):
        return torch.cat([torch.cat([x[:n, i : i + 1].flip(0), x[n:, i : i + 1]]) for i, n in enumerate((1, 3))], 1)

    check(nodes, {"x": floats(3, 2, 2)}, function, constants={"lengths": ints(1, 3)})
