"""Gradients of Resize and of Pads that repeat the map: against torch, and as transposed matrices for all else."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check, differentiated, few, floats, ints, many, node, seeds
from hypothesis import given
from hypothesis import strategies as st

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.resampling import resize_matrices

BY_TORCH = {  # mode and coordinates -> torch's mode, align_corners
    ("nearest", "asymmetric"): ("nearest", None),
    ("linear", "half_pixel"): ("bilinear", False),
    ("linear", "align_corners"): ("bilinear", True),
    ("cubic", "half_pixel"): ("bicubic", False),
}


@pytest.mark.torch
@pytest.mark.parametrize(("mode", "coordinates"), BY_TORCH)
@pytest.mark.parametrize("size", [(3, 5), (1, 2)])
def test_enlarging_to_the_double(mode, coordinates, size):
    name, corners = BY_TORCH[mode, coordinates]
    wide = [2 * n - 1 if corners else 2 * n for n in size]  # weights that float32 has

    def function(torch, x):
        return torch.nn.functional.interpolate(x, size=wide, mode=name, align_corners=corners)

    attributes = {"coordinate_transformation_mode": coordinates, "nearest_mode": "floor", "mode": mode}
    nodes = [node("Resize", "x - - sizes", "y", **attributes)]
    check(nodes, {"x": floats(2, 1, *size)}, function, constants={"sizes": ints(2, 1, *wide)}, forward=False)


@pytest.mark.torch
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_nearest_of_maps_of_any_rank(rank):
    constants = {"scales": np.array([1, 1, 2, 3, 2][:rank], np.float32)}

    def function(torch, x):
        return torch.nn.functional.interpolate(x, scale_factor=[2, 3, 2][: rank - 2])

    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    nodes = [node("Resize", "x - scales", "y", **attributes)]
    check(nodes, {"x": floats(*[2, 3, 2, 1, 3][:rank])}, function, constants=constants, forward=False)


MODES = st.sampled_from(["nearest", "linear", "cubic"])
COORDINATES = st.sampled_from(["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])


@many
@given(MODES, COORDINATES, st.integers(2, 5), seeds, st.data())
def test_the_gradient_is_the_transposed_map(mode, coordinates, rank, seed, data):
    """<A x, dy> = <x, A^T dy>, with the matrices of each axis that the forward operator stands for."""
    shape = [data.draw(st.integers(1, 4)) for _ in range(rank)]
    sizes = [size if data.draw(st.booleans()) else data.draw(st.integers(1, 6)) for size in shape]
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    x = floats(*shape, seed=seed)
    nodes, constants = [node("Resize", "x - - sizes", "y", **attributes)], {"sizes": ints(*sizes)}
    found = differentiated(nodes, {"x": x}, constants=constants)
    y = x
    for axis, matrix in resize_matrices("Resize", attributes, shape, sizes=sizes).items():
        y = np.moveaxis(np.moveaxis(y, axis, -1) @ matrix.T.astype(np.float64), -1, axis)
    dy = found.values["seed_y"]
    np.testing.assert_allclose((y * dy).sum(), (x * found.gradient("x")).sum(), rtol=1e-10, atol=1e-10)


def test_sizes_of_some_axes():
    x = floats(1, 2, 3, 4)
    given = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    whole, part = (
        differentiated([node("Resize", "x - scales", "y", **attributes)], {"x": x}, constants={"scales": scales})
        for attributes, scales in (
            (given, np.array([1, 1, 2, 1], np.float32)),
            (given | {"axes": [2]}, np.array([2], np.float32)),
        )
    )
    np.testing.assert_array_equal(whole.gradient("x"), part.gradient("x"))


def test_the_rows_and_columns_of_a_map_are_multiplied_where_they_lie():
    constants = {"scales": np.array([1, 1, 2, 2], np.float32)}
    found = differentiated(
        [node("Resize", "x - scales", "y", mode="linear")], {"x": floats(1, 2, 3, 4)}, constants=constants
    )
    assert found.operators() == ["MatMul", "MatMul"]


def test_computed_sizes_are_refused_in_one_line():
    feeds = {"x": floats(1, 1, 2, 2), "sizes": ints(1, 1, 4, 4)}
    with pytest.raises(
        BnfuseError, match=r"model.onnx: node 'wide' \(Resize\) computes its sizes: it must be constant"
    ):
        differentiated([node("Resize", "x - - sizes", "y", name="wide")], feeds)


PADS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@pytest.mark.torch
@few
@given(st.sampled_from(list(PADS)), seeds, st.data())
def test_padding_with_what_is_there(mode, seed, data):
    shape = [data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), 4, 5]
    pads = [data.draw(st.integers(0, 3)) for _ in range(4)]

    def function(torch, x):
        return torch.nn.functional.pad(x, (pads[1], pads[3], pads[0], pads[2]), mode=PADS[mode])

    nodes = [node("Pad", "x pads - axes", "y", mode=mode)]
    constants = {"pads": ints(*pads), "axes": ints(2, 3)}
    check(nodes, {"x": floats(*shape, seed=seed)}, function, constants=constants)


@pytest.mark.torch
def test_padding_of_channels_with_what_is_there():
    def function(torch, x):
        return torch.cat([x[:, :1], x, x[:, -1:], x[:, -1:]], 1)

    nodes, constants = [node("Pad", "x pads", "y", mode="edge")], {"pads": ints(0, 1, 0, 0, 2, 0)}
    check(nodes, {"x": floats(2, 3, 2)}, function, constants=constants)
