"""The matrices of Resize, Upsample and Pad against onnxruntime and onnx's reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as h
import onnx.reference
import onnx_ir as ir
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.resampling import pad_matrices, resize_matrices
from bnfuse.ort.oracle import OrtGraph

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def applied(matrices: dict[int, np.ndarray], x: np.ndarray) -> np.ndarray:
    y = x.astype(np.float64)
    for axis, matrix in matrices.items():
        y = np.moveaxis(np.tensordot(matrix.astype(np.float64), y, (1, axis)), 0, axis)
    return y


def model_of(op: str, x: np.ndarray, constants: dict[str, np.ndarray], rank: int, opset: int, **attributes):
    names = ["x", *(name if value is not None else "" for name, value in constants.items())]
    node = h.make_node(op, names, ["y"], **attributes)
    values = [onnx.numpy_helper.from_array(v, name) for name, v in constants.items() if v is not None]
    ends = ("x", list(x.shape)), ("y", [None] * rank)
    infos = [[h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)] for name, shape in ends]
    graph = h.make_graph([node], "g", *infos, values)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=9)


def by_ort(op, x, constants, opset=18, **attributes):
    model = model_of(op, x, constants, x.ndim, opset, **attributes)
    return OrtGraph(ir.from_proto(model), name="g", threads=1).run({"x": x}, ["y"])["y"]


def by_reference(op, x, constants, opset=19, **attributes):
    return onnx.reference.ReferenceEvaluator(model_of(op, x, constants, x.ndim, opset, **attributes)).run(
        None, {"x": x}
    )[0]


def resize(x, scales=None, sizes=None, roi=None, **attributes):
    """The node's constants, and what the matrices make of x."""
    constants = {
        "roi": None if roi is None else np.array(roi, np.float32),
        "scales": None if scales is None else np.array(scales, np.float32),
        "sizes": None if sizes is None else np.array(sizes, np.int64),
    }
    while constants and list(constants.values())[-1] is None:
        constants.popitem()
    matrices = resize_matrices("Resize", attributes, x.shape, roi=roi, scales=scales, sizes=sizes)
    return constants, applied(matrices, x)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_nearest_picks_the_pixels_that_onnxruntime_picks(coordinates, rounding):
    attributes = {"mode": "nearest", "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    x = numbers(1, 2, 6, 7)
    for scales in ([1, 1, 2, 3], [1, 1, 0.5, 0.4], [1, 1, 1.3, 2.7]):
        constants, found = resize(x, scales=scales, **attributes)
        np.testing.assert_array_equal(found, by_ort("Resize", x, constants, **attributes))
    for sizes in ([1, 2, 9, 5], [1, 2, 1, 21]):
        constants, found = resize(x, sizes=sizes, **attributes)
        np.testing.assert_array_equal(found, by_ort("Resize", x, constants, **attributes))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_linear_and_cubic_are_onnxruntime_s(coordinates, mode):
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    x = numbers(1, 2, 6, 7)
    for scales in ([1, 1, 2, 3], [1, 1, 0.5, 0.4], [1, 1, 1.3, 2.7]):
        constants, found = resize(x, scales=scales, **attributes)
        np.testing.assert_allclose(found, by_ort("Resize", x, constants, **attributes), atol=3e-6)
    constants, found = resize(x, sizes=[1, 2, 9, 5], **attributes)
    np.testing.assert_allclose(found, by_ort("Resize", x, constants, **attributes), atol=3e-6)
    np.testing.assert_allclose(found, by_reference("Resize", x, constants, **attributes), atol=3e-6)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("more", [{"exclude_outside": 1}, {"antialias": 1}, {"antialias": 1, "exclude_outside": 1}])
def test_windows_at_the_edge_and_stretched_ones(mode, more):
    attributes = {"mode": mode, **more, **({"cubic_coeff_a": -0.5} if mode == "cubic" else {})}
    x = numbers(2, 9, 8)
    for sizes in ([2, 4, 3], [2, 13, 20]):
        constants, found = resize(x, sizes=sizes, **attributes)
        np.testing.assert_allclose(found, by_reference("Resize", x, constants, **attributes), atol=3e-6)


def test_some_axes_alone_and_any_rank():
    x = numbers(3, 5, 4, 2, 3)
    attributes = {"mode": "linear", "axes": [3, 1]}
    constants, found = resize(x, sizes=[5, 8], **attributes)
    assert found.shape == (3, 8, 4, 5, 3)
    np.testing.assert_allclose(found, by_reference("Resize", x, constants, **attributes), atol=3e-6)


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
def test_the_aspect_ratio_is_kept(policy):
    x = numbers(1, 1, 6, 8)
    attributes = {"mode": "linear", "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
    constants, found = resize(x, sizes=[9, 10], **attributes)
    wanted = by_reference("Resize", x, constants, **attributes)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_a_crop_is_resized_and_what_it_takes_from_outside_is_zero(mode):
    x = numbers(1, 1, 6, 8)
    attributes = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize"}
    roi = [0, 0, 0.2, -0.3, 1, 1, 0.7, 1.2]
    constants, found = resize(x, sizes=[1, 1, 5, 11], roi=roi, **attributes)
    np.testing.assert_allclose(found, by_ort("Resize", x, constants, **attributes), atol=3e-6)
    with pytest.raises(BnfuseError, match="extrapolation_value=2 and a crop that leaves"):
        resize(x, sizes=[1, 1, 5, 11], roi=roi, **attributes, extrapolation_value=2.0)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample(mode):
    x, scales = numbers(1, 2, 5, 4), np.array([1, 1, 2, 1.5], np.float32)
    found = applied(resize_matrices("Upsample", {"mode": mode}, x.shape, scales=scales), x)
    np.testing.assert_allclose(found, by_ort("Upsample", x, {"scales": scales}, opset=9, mode=mode), atol=1e-6)


def test_axes_that_stay_have_no_matrix():
    assert set(resize_matrices("Resize", {}, (2, 3, 4, 5), scales=[1, 1, 2, 1])) == {2}


@pytest.mark.parametrize(
    ("attributes", "operands", "said"),
    [
        ({"mode": "lanczos"}, {"scales": [1, 2]}, "mode 'lanczos'"),
        ({"nearest_mode": "up"}, {"scales": [1, 2]}, "nearest_mode 'up'"),
        ({}, {"scales": [2]}, "1 scales and 0 sizes for 2 axes"),
        ({}, {"scales": [1, 0.1]}, "makes .* at least one"),
        ({"axes": [1]}, {"sizes": [4], "roi": [0, 0, 1, 1]}, "a roi of 4 numbers for 1 axes"),
    ],
)
def test_what_does_not_fit_is_refused(attributes, operands, said):
    with pytest.raises(BnfuseError, match=said):
        resize_matrices("Resize", attributes, (3, 4), **operands)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_pads_repeat_what_is_there(mode):
    x = numbers(2, 3, 6, 7)
    pads = [0, 1, 3, 2, 0, 0, 1, 4]
    found = applied(pad_matrices(mode, pads, None, x.shape), x)
    wanted = by_reference("Pad", x, {"pads": np.array(pads, np.int64)}, mode=mode)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_negative_pads_cut_off_before_others_repeat(mode):
    x, pads = numbers(2, 7, 6), [0, -2, 2, 0, 3, -1]
    found = applied(pad_matrices(mode, pads, None, x.shape), x)
    np.testing.assert_array_equal(found, by_ort("Pad", x, {"pads": np.array(pads, np.int64)}, mode=mode))
    with pytest.raises(BnfuseError, match="cut off all 6"):
        pad_matrices(mode, [-4, -2], [2], x.shape)
