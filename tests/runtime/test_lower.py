"""Lowering: which launches an operator becomes, where its tensors lie, and that the numbers are right."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.microsoft import convert
from bnfuse.graph.signature import GraphSignature
from bnfuse.runtime.backends.cpu.runner import CpuRunner
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.program.program import ARENA, Program

TARGET = resolve("cpu", 2)


def lowered(signature: str, body: str, types: str = "", file: str | None = None) -> Lowered:
    """The program of a graph in ONNX's text form. All inputs are data; all outputs belong to the forward phase."""
    types = f"<{types}>" if types else ""
    text = f"""<ir_version: 8, opset_import: ["": 17, "ai.bnfuse": 1, "com.microsoft": 1]>
        g {signature} {types} {{ {body} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
    model = convert(model)
    names = tuple(v.name or "" for v in model.graph.inputs)
    signature = GraphSignature(data=names, labels=(), trainable=(), frozen=(), running={}, gradients={}, loss="")
    return lower(model.graph, signature, TARGET, opset=17, file=file)


def run(made: Lowered, step: int = 0, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    runner = CpuRunner(Compiled(made.program, objects(made.requests, Cache(default_folder()))), TARGET)
    runner.memory.regions[ARENA][:] = 0xFF  # NaNs: nothing may be read that was not written
    runner.feed(list(feeds), list(feeds.values()))
    runner.run([runner.program.whole("forward")], {"forward": {"seed": 1, "step": step}})
    return {name: runner.memory.array(tensor).copy() for name, tensor in made.program.outputs.items()}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kernels(program: Program) -> list[str]:
    return [program.kernels[launch.kernel].partition("_")[0] for launch in program.launches]


# -- folding -------------------------------------------------------------------------------------------------------


def test_shape_arithmetic_leaves_no_launch():
    made = lowered(
        "(float[2,12] x) => (float[2,3,4] y)",
        """s = Shape(x)  zero = Constant<value = int64[1] {0}>()  n = Gather(s, zero)
           rest = Constant<value = int64[2] {3, 4}>()  to = Concat<axis = 0>(n, rest)  y = Reshape(x, to)""",
    )
    assert kernels(made.program) == ["Copy"]
    x = numbers(2, 12)
    np.testing.assert_array_equal(run(made, x=x)["y"], x.reshape(2, 3, 4))


def test_a_constant_of_absurd_size_is_refused_before_it_is_made():
    body = """one = Constant<value = int64[1] {1}>()  times = Constant<value = int64[1] {20000000000}>()
              big = Tile(one, times)  most = ReduceMax<keepdims = 0>(big)  s = Cast<to = 1>(most)  y = Mul(x, s)"""
    with pytest.raises(BnfuseError, match=r"'n2' \(Tile\) makes a constant of 20000000000 elements"):
        lowered("(float[2,3] x) => (float[2,3] y)", body)


def test_an_unknown_operator_is_named_with_what_is_supported():
    with pytest.raises(BnfuseError) as caught:
        lowered("(float[2,3] x) => (float[2,3] y)", "y = Frobnicate(x)")
    assert "'n0' (Frobnicate)" in str(caught.value)
    assert "Relu" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("op", "operands", "said"),
    [
        ("MaxPoolStoreInput", "x", "store it by a Pointwise"),
        ("ConvTransposeStoreInput", "x, w", "store it by a Pointwise"),
        ("MaxPoolGradBiasGrad", "x, i, x", "PointwiseGradBiasGrad"),
    ],
)
def test_what_the_grammar_has_and_no_kernel_is_refused(op, operands, said):
    window = "dilations = [1, 1], kernel_shape = [1, 1], pads = [0, 0, 0, 0], strides = [1, 1]"
    more = "group = 1, output_padding = [0, 0]" if "Conv" in op else "ceil_mode = 0"
    signature = "(float[1,2,3,3] x, float[2,2,1,1] w, uint8[1,2,3,3] i) => (float[1,2,3,3] y)"
    with pytest.raises(BnfuseError, match=rf"'n0' \({op}\).*{said}"):
        lowered(signature, f"y, z = ai.bnfuse.{op}<{window}, {more}>({operands})")


def test_a_symbolic_shape_is_refused():
    with pytest.raises(BnfuseError, match="not fixed: build the graph with --batch"):
        lowered("(float[N,4,2,2] x) => (float[N,4,2,2] y)", "y = Relu(x)")


def test_what_is_refused_names_the_file_and_what_to_do():
    """Whether it is about a node, a value, or what a kernel takes."""
    for body, signature, said in (
        (
            "y = LRN<size = 3>(x)",
            "(float[1,4,2,2] x) => (float[1,4,2,2] y)",
            r"node 'n0' \(LRN\) has no kernel: .* Abs, Acos, Acosh, Add",
        ),
        ("y = Conv(x, w)", "(float[1,2,8] x, float[3,2,3] w) => (float[1,3,6] y)", r"rank 3: .*height 1 \(Unsqueeze"),
        ("y = MaxPool<kernel_shape = [2]>(x)", "(float[1,2,8] x) => (float[1,2,7] y)", "the window .*height 1"),
        ("y = Relu(x)", "(float[N,4,2,2] x) => (float[N,4,2,2] y)", "'x' has the shape .*'N'.*not fixed: .* --batch$"),
        ("y = Relu(x)", "(float[1,4,2,2] x) => (float y)", "'y'"),
        ("y = Gemm(a, b)", "(float[2,3] a, float[4,5] b) => (float[2,5] y)", "takes 15 elements as its b, .* given 20"),
        ("y = Gemm(a, b)", "(double[2,3] a, double[3,5] b) => (double[2,5] y)", "takes float32 as its a, .* float64"),
    ):
        with pytest.raises(BnfuseError, match=f"^net.onnx: .*{said}"):
            lowered(signature, body, file="net.onnx")


# -- layout --------------------------------------------------------------------------------------------------------


def test_a_shape_in_the_file_that_the_operator_does_not_give_is_refused():
    body = "a = AveragePool<kernel_shape = [2,2], strides = [2,2]>(x)  y = Relu(a)"
    with pytest.raises(BnfuseError, match=r"'n0' \(AveragePool\) gives 'a' the shape \[1, 3, 2, 2\], the file says"):
        lowered("(float[1,3,4,4] x) => (float[1,3,2,3] y)", body, "float[1,3,2,3] a")


def test_images_are_turned_once_and_the_output_back():
    made = lowered(
        "(float[2,3,4,4] x) => (float[2,3,4,4] y, float[2,3,4,4] z)",
        "y = Relu(x)  z = ai.bnfuse.PointwiseGradReluGrad(y, x)",
    )
    assert kernels(made.program) == ["NchwToNhwc", "ReluPointwise", "PointwiseGradReluGrad", "NhwcToNchw", "NhwcToNchw"]
    x = numbers(2, 3, 4, 4)
    found = run(made, x=x)
    np.testing.assert_array_equal(found["y"], np.maximum(x, 0))
    np.testing.assert_array_equal(found["z"], np.maximum(x, 0))


def test_flatten_of_one_pixel_is_a_view_and_of_more_is_a_copy():
    body = "a = Relu(x)  y = Flatten(a)"
    one = lowered("(float[2,3,1,1] x) => (float[2,3] y)", body)
    many = lowered("(float[2,3,2,2] x) => (float[2,12] y)", body)
    assert kernels(one.program) == ["ReluPointwise"]
    assert kernels(many.program) == ["NchwToNhwc", "ReluPointwise", "NhwcToNchw"]
    x = numbers(2, 3, 2, 2)
    np.testing.assert_array_equal(run(many, x=x)["y"], np.maximum(x, 0).reshape(2, 12))


def test_rows_need_no_layout():
    made = lowered("(float[5,7] x) => (float[5,7] y)", "y = Relu(x)")
    assert kernels(made.program) == ["ReluPointwise"]
    x = numbers(5, 7)
    np.testing.assert_array_equal(run(made, x=x)["y"], np.maximum(x, 0))


CONCAT = """a = Relu(x)  t = Concat<axis = 1>(x, a)  b = Relu(t)  u = Concat<axis = 1>(t, a)  y = Relu(u)"""
CONCAT_TYPES = "float[2,4,3,3] a, float[2,8,3,3] t, float[2,8,3,3] b, float[2,12,3,3] u"


def test_concatenation_launches_only_the_copies_that_it_reports():
    made = lowered("(float[2,4,3,3] x) => (float[2,8,3,3] b, float[2,12,3,3] y)", CONCAT, CONCAT_TYPES)
    copies = [line for line in made.program.report.copies if "channels" in line]
    assert len(copies) == 2  # the input, which no kernel writes, and the second place of a
    assert kernels(made.program).count("CopyMap") == 2
    assert kernels(made.program).count("ReluPointwise") == 3
    x = numbers(2, 4, 3, 3)
    found, a = run(made, x=x), np.maximum(x, 0)
    np.testing.assert_array_equal(found["b"], np.maximum(np.concatenate([x, a], 1), 0))
    np.testing.assert_array_equal(found["y"], np.maximum(np.concatenate([x, a, a], 1), 0))


def test_what_is_not_written_into_its_place_in_a_concatenation_is_copied_there():
    made = lowered(
        "(float[2,2,3,3] x) => (float[2,7,3,3] y, float[2,3,1,1] z)",
        """a = Relu(x)  p = Pad(x, pads)  k = Identity(ones)  t = Concat<axis = 1>(p, a, k)  y = Relu(t)
           s = Slice(x, one, two, axes)  g = GlobalAveragePool(x)  u = Concat<axis = 1>(g, s)  z = Relu(u)""",
        """float[2,2,3,3] a, float[2,4,3,3] p, float[2,1,3,3] k, float[2,7,3,3] t, float[2,1,1,1] s, float[2,2,1,1] g,
           float[2,3,1,1] u, int64[8] pads = {0,1,0,0,0,1,0,0}, int64[3] one = {1,1,1}, int64[3] two = {2,2,2},
           int64[3] axes = {1,2,3}, float[2,1,3,3] ones = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}""",
    )
    x = numbers(2, 2, 3, 3)
    found, a = run(made, x=x), np.maximum(x, 0)
    padded, ones = np.pad(a, ((0, 0), (1, 1), (0, 0), (0, 0))), np.ones((2, 1, 3, 3), np.float32)
    np.testing.assert_array_equal(found["y"], np.concatenate([padded, a, ones], 1))
    expected = np.concatenate([x.mean((2, 3), keepdims=True), x[:, 1:, 1:2, 1:2]], 1)
    np.testing.assert_allclose(found["z"], np.maximum(expected, 0), atol=1e-6)


def test_split_gives_views():
    made = lowered(
        "(float[2,6,2,2] x) => (float[2,2,2,2] y, float[2,4,2,2] z)",
        """a = Relu(x)  n = Constant<value = int64[2] {2, 4}>()
           y0, z0 = Split<axis = 1>(a, n)  y = Relu(y0)  z = Relu(z0)""",
    )
    assert kernels(made.program).count("ReluPointwise") == 3
    assert not any("channels" in line for line in made.program.report.copies)
    x = numbers(2, 6, 2, 2)
    found = run(made, x=x)
    np.testing.assert_array_equal(found["y"], np.maximum(x, 0)[:, :2])
    np.testing.assert_array_equal(found["z"], np.maximum(x, 0)[:, 2:])


def test_dropout_drops_the_same_elements_in_both_directions_and_others_in_the_next_step():
    made = lowered(
        "(float[2,8,6,6] x) => (float[2,8,6,6] y, float[2,8,6,6] dx)",
        """ratio = Constant<value = float {0.25}>()  training = Constant<value = bool {1}>()  a = Relu(x)
           y, mask = Dropout(a, ratio, training)  kept = Cast<to = 1>(mask)
           scale = Constant<value = float {1.3333334}>()  factor = Mul(kept, scale)  dx = Mul(a, factor)""",
    )
    x = np.ones((2, 8, 6, 6), np.float32)
    first, again, later = run(made, x=x), run(made, x=x), run(made, step=1, x=x)
    np.testing.assert_array_equal(first["y"], first["dx"])
    np.testing.assert_array_equal(first["y"], again["y"])
    assert (first["y"] != later["y"]).any()
    np.testing.assert_allclose(np.unique(first["y"]), [0, 4 / 3], rtol=1e-6)
    assert 0.68 < (first["y"] != 0).mean() < 0.82


def test_channels_scaled_by_a_vector_stay_in_memory_order():
    made = lowered(
        "(float[2,8,6,6] x, float[8,1,1] s) => (float[2,8,6,6] y)", "a = Relu(x)  b = Mul(a, s)  y = Relu(b)"
    )
    assert kernels(made.program) == ["NchwToNhwc", "ReluPointwise", "Mul", "ReluPointwise", "NhwcToNchw"]
    x, s = numbers(2, 8, 6, 6), numbers(8, 1, 1, seed=1)
    np.testing.assert_allclose(run(made, x=x, s=s)["y"], np.maximum(np.maximum(x, 0) * s, 0), rtol=1e-6)


def test_what_depends_on_the_order_of_axes_is_turned_back():
    made = lowered(
        "(float[2,4,3,5] x) => (float[2,4,5,3] y)", "a = Relu(x)  b = Transpose<perm = [0, 1, 3, 2]>(a)  y = Relu(b)"
    )
    assert kernels(made.program) == [
        "NchwToNhwc",
        "ReluPointwise",
        "NhwcToNchw",
        "Transpose",
        "ReluPointwise",
    ]
    x = numbers(2, 4, 3, 5)
    np.testing.assert_array_equal(run(made, x=x)["y"], np.maximum(x, 0).transpose(0, 1, 3, 2))


def test_a_mean_over_pixels_reads_the_map_as_it_lies():
    made = lowered(
        "(float[2,4,3,5] x) => (float[2,4] y)", "a = Relu(x)  y = ReduceMean<axes = [2, 3], keepdims = 0>(a)"
    )
    assert kernels(made.program) == ["NchwToNhwc", "ReluPointwise", "ReduceMean"]
    x = numbers(2, 4, 3, 5)
    np.testing.assert_allclose(run(made, x=x)["y"], np.maximum(x, 0).mean((2, 3)), rtol=1e-6)


# -- accumulation --------------------------------------------------------------------------------------------------

ACCUMULATE = """acc = ai.bnfuse.PointwiseGradScale(dy, p)
    dx = ai.bnfuse.PointwiseGradAccumulate<acc_start = 1, acc_stop = 3>(other, acc, q)  out = Relu(dx)"""
ACCUMULATE_TYPES = "float[2,4,3,3] acc, float[2,2,3,3] dx"
ACCUMULATE_INPUTS = "float[2,4,3,3] dy, float[4] p, float[2,2,3,3] other, float[2] q"


def accumulated() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    feeds = {"dy": numbers(2, 4, 3, 3), "p": numbers(4, seed=1), "other": numbers(2, 2, 3, 3, seed=2)}
    feeds["q"] = numbers(2, seed=3)
    acc = feeds["dy"] * feeds["p"][:, None, None]
    return feeds, acc, acc[:, 1:3] + feeds["other"] * feeds["q"][:, None, None]


def test_an_accumulator_that_nobody_needs_any_more_is_updated_in_place():
    made = lowered(f"({ACCUMULATE_INPUTS}) => (float[2,2,3,3] out)", ACCUMULATE, ACCUMULATE_TYPES)
    assert "CopyMap" not in kernels(made.program)
    feeds, _, dx = accumulated()
    np.testing.assert_allclose(run(made, **feeds)["out"], np.maximum(dx, 0), rtol=1e-6, atol=1e-7)


def test_readers_of_other_channels_do_not_stop_it():
    body = f"{ACCUMULATE}  last = ai.bnfuse.SlicePointwiseGrad<grad_start = 3, grad_stop = 4>(acc)"
    types = f"{ACCUMULATE_TYPES}, float[2,1,3,3] last"
    made = lowered(f"({ACCUMULATE_INPUTS}) => (float[2,2,3,3] out, float[2,1,3,3] last)", body, types)
    assert "CopyMap" not in kernels(made.program)
    feeds, acc, dx = accumulated()
    found = run(made, **feeds)
    np.testing.assert_allclose(found["out"], np.maximum(dx, 0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["last"], acc[:, 3:], rtol=1e-6)


def test_an_accumulator_with_a_later_reader_is_copied_first():
    body = f"{ACCUMULATE}  late = Relu(acc)"
    made = lowered(f"({ACCUMULATE_INPUTS}) => (float[2,2,3,3] out, float[2,4,3,3] late)", body, ACCUMULATE_TYPES)
    assert kernels(made.program).count("CopyMap") == 1
    assert any("2 channels" in line for line in made.program.report.copies)
    feeds, acc, dx = accumulated()
    found = run(made, **feeds)
    np.testing.assert_allclose(found["out"], np.maximum(dx, 0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found["late"], np.maximum(acc, 0), rtol=1e-6)


def test_an_accumulator_that_is_an_output_is_copied_first():
    made = lowered(
        f"({ACCUMULATE_INPUTS}) => (float[2,2,3,3] out, float[2,4,3,3] acc)", ACCUMULATE, "float[2,2,3,3] dx"
    )
    assert kernels(made.program).count("CopyMap") == 1
    feeds, acc, _ = accumulated()
    np.testing.assert_allclose(run(made, **feeds)["acc"], acc, rtol=1e-6)


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_chain_of_maps_lives_in_two_storages():
    body = "a0 = Relu(x)" + "".join(f"  a{i + 1} = Relu(a{i})" for i in range(9)) + "  y = Relu(a9)"
    made = lowered("(float[2,16,4,4] x) => (float[2,16,4,4] y)", body)
    map_bytes = math.prod((2, 16, 4, 4)) * 4
    report = made.program.report
    assert report.arena_bytes == 2 * map_bytes
    assert report.feature_map_bytes == 12 * map_bytes
    assert report.launches == {"forward": 13, "backward": 0, "update": 0}
    x = numbers(2, 16, 4, 4)
    np.testing.assert_array_equal(run(made, x=x)["y"], np.maximum(x, 0))


def test_concatenated_statistics_lie_side_by_side():
    made = lowered(
        "(float[2,16,3,3] x, float[2,32,3,3] u) => (float[48] mean2)",
        """m, v = ai.bnfuse.BatchNormStatistics(x)  n, w = ai.bnfuse.BatchNormStatistics(u)
           mean = Concat<axis = 0>(m, n)  mean2 = Identity(mean)""",
        "float[16] m, float[16] v, float[32] n, float[32] w, float[48] mean",
    )
    assert kernels(made.program).count("BatchNormStatistics") == 2
    assert "Concat" not in kernels(made.program)
    x, u = numbers(2, 16, 3, 3), numbers(2, 32, 3, 3, seed=1)
    expected = np.concatenate([x.mean((0, 2, 3)), u.mean((0, 2, 3))])
    np.testing.assert_allclose(run(made, x=x, u=u)["mean2"], expected, atol=1e-6)


def test_a_constant_among_concatenated_statistics_is_copied_to_its_place():
    made = lowered(
        "(float[2,16,3,3] x) => (float[32] y)",
        """m, v = ai.bnfuse.BatchNormStatistics(x)  size = Shape(m)  k = ConstantOfShape<value = float[1] {2.0}>(size)
           t = Concat<axis = 0>(m, k)  y = Relu(t)""",
        "float[16] m, float[16] v, float[16] k, float[32] t",
    )
    x = numbers(2, 16, 3, 3)
    expected = np.concatenate([np.maximum(x.mean((0, 2, 3)), 0), np.full(16, 2.0)])
    np.testing.assert_allclose(run(made, x=x)["y"], expected, atol=1e-6)
