"""Maps that are read between their pixels, against torch's autograd in float64; forward against onnx's reference."""

from __future__ import annotations

import numpy as np
import pytest
from decomposed import after, by_reference, check_gradients, check_same, floats, model_of
from differentiated import few, seeds
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from bnfuse.core.errors import BnfuseError


def wide(*shape: int, seed: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape)


@pytest.mark.torch
@given(
    mode=st.sampled_from(["bilinear", "nearest"]),
    padding=st.sampled_from(["zeros", "border", "reflection"]),
    corners=st.booleans(),
    shape=st.tuples(*[st.integers(1, 4)] * 4),
    seed=seeds,
)
@few
def test_grid_sample(mode, padding, corners, shape, seed):
    n, c, h, w = shape
    feeds = {"x": wide(n, c, h, w, seed=seed), "g": wide(n, 3, 2, 2, seed=seed + 1, low=-3, high=3)}
    node = helper.make_node(  # of opset 16, as torch has it: "linear" from opset 20 on
        "GridSample", ["x", "g"], ["y"], "it", mode=mode, padding_mode=padding, align_corners=int(corners)
    )
    check_gradients(
        [node],
        feeds,
        lambda torch, x, g: torch.nn.functional.grid_sample(
            x, g, mode=mode, padding_mode=padding, align_corners=corners
        ),
        opset=18,
    )


@pytest.mark.torch
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_the_grid_of_the_pixels_themselves(padding):
    """Its corners lie on the border, where torch has no slope."""
    y, x = np.meshgrid(np.linspace(-1, 1, 3), np.linspace(-1, 1, 4), indexing="ij")
    feeds = {"x": wide(1, 2, 3, 4, seed=0), "g": np.stack([x, y], -1)[None]}
    attributes = {"mode": "linear", "padding_mode": padding, "align_corners": 1}
    made = check_gradients(
        [helper.make_node("GridSample", ["x", "g"], ["y"], "it", **attributes)],
        feeds,
        lambda torch, x, g: torch.nn.functional.grid_sample(x, g, padding_mode=padding, align_corners=True),
    )
    assert not any(node.op_type == "GridSample" for node in made.graph.node)


@pytest.mark.torch
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    extras=st.tuples(st.booleans(), st.booleans()),
    seed=seeds,
)
@few
def test_deform_conv(groups, kernel, strides, dilations, pads, extras, seed):
    (group, parts), (masked, biased), (kh, kw) = groups, extras, kernel
    size = [
        (e + 2 * p - (k - 1) * d - 1) // s + 1
        for e, p, k, d, s in zip((5, 6), pads, kernel, dilations, strides, strict=True)
    ]
    feeds = {
        "x": wide(2, 4, 5, 6, seed=seed),
        "w": wide(2, 4 // group, kh, kw, seed=seed + 1),
        "o": wide(2, parts * kh * kw * 2, *size, seed=seed + 2, low=-2, high=2),
        "b": wide(2, seed=seed + 3),
        "m": wide(2, parts * kh * kw, *size, seed=seed + 4),
    }
    names = ["x", "w", "o", "b" if biased else "", "m" if masked else ""]
    feeds = {name: feeds[name] for name in names if name}
    node = helper.make_node(
        "DeformConv",
        names,
        ["y"],
        "it",
        group=group,
        offset_group=parts,
        strides=strides,
        dilations=dilations,
        pads=[*pads, *pads],
    )

    def function(torch, x, w, o, *more):
        """Tap by tap, by torch's own sampling; torchvision's operator is not everywhere."""
        more = list(more)
        bias, mask = more.pop(0) if biased else None, more.pop(0) if masked else None
        columns = []
        for tap in range(kh * kw):
            for part in range(parts):
                place = 2 * (part * kh * kw + tap)
                y = o[:, place] + torch.arange(size[0])[:, None] * strides[0] - pads[0] + tap // kw * dilations[0]
                x_ = o[:, place + 1] + torch.arange(size[1]) * strides[1] - pads[1] + tap % kw * dilations[1]
                grid = torch.stack([x_ / 2.5 - 1, y / 2 - 1], -1)
                own = x[:, part * 4 // parts : (part + 1) * 4 // parts]
                read = torch.nn.functional.grid_sample(own, grid, align_corners=True)
                if mask is not None:
                    read = read * mask[:, part * kh * kw + tap, None]
                columns.append(read)
        taps = torch.stack([torch.cat(columns[i : i + parts], 1) for i in range(0, len(columns), parts)], 2)
        of_group = taps.reshape(2, group, 4 // group, kh * kw, *size)
        weight = w.reshape(group, 2 // group, 4 // group, kh * kw)
        y = torch.einsum("ngcthw,goct->ngohw", of_group, weight).reshape(2, 2, *size)
        return y if bias is None else y + bias[:, None, None]

    check_gradients([node], feeds, function)


@pytest.mark.torch
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pads=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    seed=seeds,
)
@few
def test_col2im(kernel, strides, dilations, pads, seed):
    image = (6, 7)
    counts = [
        (e + 2 * p - (k - 1) * d - 1) // s + 1
        for e, p, k, d, s in zip(image, pads, kernel, dilations, strides, strict=True)
    ]
    node = helper.make_node(
        "Col2Im", ["x", "image", "block"], ["y"], "it", strides=strides, dilations=dilations, pads=[*pads, *pads]
    )
    check_gradients(
        [node],
        {"x": wide(2, 3 * kernel[0] * kernel[1], counts[0] * counts[1], seed=seed)},
        lambda torch, x: torch.nn.functional.fold(x, image, kernel, dilations, pads, strides),
        values={"image": np.array(image), "block": np.array(kernel)},
    )


def test_columns_of_rows_and_of_volumes():
    for block, image, length in (([3], [7], 5), ([2, 1, 2], [3, 2, 4], 2 * 2 * 3)):
        feeds = {"x": floats(2, 2 * int(np.prod(block)), length)}
        values = {"image": np.array(image), "block": np.array(block)}
        model = model_of([helper.make_node("Col2Im", ["x", "image", "block"], ["y"], "it")], feeds, values)
        check_same(model, feeds, before=by_reference, gone=["Col2Im"])


@pytest.mark.parametrize(
    ("shape", "mode", "said"),
    [((1, 2, 3, 4), "cubic", "has mode=cubic: there are"), ((1, 2, 3, 4, 5), "linear", "samples a tensor of 5 axes")],
)
def test_other_samplings_are_refused(shape, mode, said):
    feeds = {"x": floats(*shape), "g": floats(1, *[2] * (len(shape) - 2), len(shape) - 2)}
    model = model_of([helper.make_node("GridSample", ["x", "g"], ["y"], "it", mode=mode)], feeds)
    with pytest.raises(BnfuseError, match=rf"^node 'it' \(GridSample\) {said}"):
        after(model)
