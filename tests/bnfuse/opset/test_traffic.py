"""Bytes of feature maps that a node touches, written out by hand."""

import onnx_ir as ir
import pytest

from bnfuse.opset.traffic import maps_touched

X = 2 * 6 * 7 * 9 * 4  # bytes of the map x in the cases
Y = 2 * 4 * 7 * 9 * 4  # of a convolution's result


def touched(model, **options) -> tuple[dict[str, int], dict[str, int]]:
    node = ir.from_proto(model).graph[0]
    read, written = maps_touched(node, lambda value: value.shape and tuple(value.shape.numpy()), **options)
    return {value.name: size for value, size in read}, {value.name: size for value, size in written}


@pytest.fixture
def one_node(case):
    """The traffic of one operator, by operand and result."""

    def measure(name: str):
        it = case(name)
        model = it.model(function=False)
        for value, result in zip(model.graph.output, it.expected().values(), strict=True):
            for dim, size in zip(value.type.tensor_type.shape.dim, result.shape, strict=True):
                dim.dim_value = size
        return touched(model)

    return measure


def test_weights_and_coefficients_are_no_maps(one_node):
    assert one_node("NormalizeReluConvStatistics") == ({"x": X}, {"y": Y})


def test_gradient_of_a_convolution_reads_x_for_the_weights(one_node):
    read, written = one_node("BatchNormGradNormalizeReluConvGradReluGradReduce")
    assert (read, written) == ({"dy": Y, "x": X, "grad_x": Y}, {"dx": X})


def test_x_that_only_gives_a_shape_is_not_read(one_node):
    assert one_node("ConvGradInput") == ({"dy": Y}, {"dx": X})
    assert one_node("ConvGradInputReluGrad") == ({"dy": Y, "x": X}, {"dx": X})
    assert one_node("GlobalAveragePoolGrad") == ({"dy": 2 * 6 * 4}, {"dx": X})


def test_gradient_of_weights_writes_no_map(one_node):
    assert one_node("ConvGradWeight") == ({"dy": Y, "x": X}, {})


def test_ranges_are_counted_as_ranges(one_node):
    """dy has 7 channels, of which a convolution's 4 are read; acc has 10, of which x's 6 are."""
    assert one_node("SliceConvGradInputAccumulate") == ({"dy": Y, "acc": X}, {"dx": X})


def test_indices_are_eight_bytes_each(one_node):
    read, written = one_node("MaxPoolGrad")
    pooled = 2 * 6 * 4 * 5
    assert (read, written) == ({"dy": 4 * pooled, "indices": 8 * pooled}, {"dx": X})


def test_every_other_batch_norm_reads_its_map(one_node):
    read, _ = one_node("PointwiseGradReduceReduceOtherReduceOther")
    assert read == {"dy": X, "x": X, "x_1": X, "x_2": X}


@pytest.mark.parametrize(("other", "read"), [("x", ["dy", "x", "skip"]), ("skip", ["dy", "x", "skip"]), ("y", None)])
def test_what_is_summed_on_the_way_out_counts_once_where_it_was_read_on_the_way_in(other, read):
    """The sums of a BatchNorm behind a residual sum are of x or of its skip; y is a third map."""
    model = ir.from_onnx_text(f"""
        <ir_version: 9, opset_import: ["": 17, "ai.bnfuse": 1]>
        g (float[2,6,3,3] dy, float[2,6,3,3] x, float[6,6,1,1] w, float[2,6,3,3] skip, float[2,6,3,3] y, float[6] m)
            => (float[2,6,3,3] dx, float[6,6,1,1] dw, float[6] b, float[6] g)
        {{ dx, dw, b, g = ai.bnfuse.AddConvGradReduceOther (dy, x, w, skip, {other}, m, m) }}""")
    found, _ = maps_touched(model.graph[0], lambda value: value.shape and tuple(value.shape.numpy()))
    assert [value.name for value, _ in found] == (read or ["dy", "x", "skip", "y"])


def test_a_map_at_both_sides_of_a_convolution_counts_twice():
    model = ir.from_onnx_text("""
        <ir_version: 9, opset_import: ["": 17, "ai.bnfuse": 1]>
        g (float[2,6,3,3] x, float[6,6,3,3] w) => (float[2,6,3,3] dx, float[6,6,3,3] dw)
        { dx, dw = ai.bnfuse.ConvGrad (x, x, w) }""")
    found, _ = maps_touched(model.graph[0], lambda value: value.shape and tuple(value.shape.numpy()))
    assert [value.name for value, _ in found] == ["x", "x"]


def test_of_a_sampled_map_the_sample_counts(one_node):
    """A box of 1 sample, 3 rows and 7 columns; 42 points; groups of one sample each; the whole map."""
    box, points = 1 * 6 * 3 * 7 * 4, 42 * 6 * 4
    assert one_node("SampledStatistics") == ({"x": box}, {})
    assert one_node("AddSampled") == ({"acc": box, "x": box}, {"dx": box})
    assert one_node("PointStatistics") == ({"x": points}, {})
    assert one_node("AddAtPoints") == ({"acc": points, "x": points}, {"dx": points})
    assert one_node("LocalStatistics") == ({"x": X}, {})
    assert one_node("L1GradInput") == ({"dz": X, "x": X}, {"dx": X})


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_standard_operators_touch_all_their_maps(op):
    model = ir.from_onnx_text(f"""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[2,6,3,3] x, float[6,6,1,1] w) => (float[2,6,3,3] y) {{ y = {op}(x, w) }}""")
    assert touched(ir.to_proto(model)) == ({"x": 2 * 6 * 9 * 4}, {"y": 2 * 6 * 9 * 4})


def test_shape_reads_nothing():
    model = ir.from_onnx_text("""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[2,4,3,3] x) => (int64[4] s) { s = Shape(x) }""")
    assert touched(ir.to_proto(model)) == ({}, {})


def test_batch_tells_maps_from_sums_of_weight_gradients():
    model = ir.from_onnx_text("""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[4,6,1,1] dw, float[4,6,1,1] other) => (float[4,6,1,1] sum) { sum = Sum(dw, other) }""")
    assert touched(ir.to_proto(model), batch=2) == ({}, {})
    assert touched(ir.to_proto(model), batch=4) != ({}, {})
