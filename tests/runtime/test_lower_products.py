"""Lowering of products of any ranks, of what resamples, and of transposed convolutions, against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lowered_graph import Graph, assert_close, kernels, shapes_of

from bnfuse.core.errors import BnfuseError
from bnfuse.opset import reference
from bnfuse.opset.resampling import resize_matrices

I64 = np.int64
MATRICES = [
    ((2, 3, 5, 7), (2, 3, 7, 4)),
    ((2, 3, 5, 7), (7, 4)),
    ((5, 7), (2, 7, 4)),
    ((3, 1, 5, 7), (2, 7, 1)),
    ((7,), (2, 7, 4)),
    ((2, 5, 7), (7,)),
    ((5, 7), (7,)),
    ((7,), (7,)),
]


def check(graph: Graph, wanted=None) -> list[str]:
    """The operators of its launches, on a CPU."""
    wanted = wanted or graph.by_onnxruntime()
    made, found = graph.on_cpu(shapes_of(wanted))
    assert_close(found, wanted)
    return kernels(made.program)


# -- matrix products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), MATRICES)
def test_products_of_any_ranks_are_one_launch(a, b):
    assert check(Graph("y = MatMul(a, b)", (("a", a), ("b", b)))) == ["Gemm"]


TRANSPOSED = Graph(
    """t = Transpose<perm = [0, 2, 1]>(b)  y = MatMul(a, t)
       u = Transpose<perm = [0, 2, 1]>(a)  z = MatMul(u, a)  v = Transpose(c)  w = MatMul(a, v)""",
    (("a", (2, 5, 7)), ("b", (2, 4, 7)), ("c", (3, 7))),
    outputs=("y", "z", "w"),
)


def test_matrices_that_are_read_transposed_are_not_copied():
    assert check(TRANSPOSED) == ["Gemm", "Gemm", "Gemm"]


def test_a_transposed_matrix_that_something_else_reads_is_made():
    found = check(
        Graph("t = Transpose(b)  y = MatMul(a, t)  z = Relu(t)", (("a", (5, 7)), ("b", (4, 7))), outputs=("y", "z"))
    )
    assert sorted(found) == ["Gemm", "ReluPointwise", "Transpose"]


def test_operands_that_do_not_fit_are_refused():
    for a, b, said in (((2, 3), (4, 5), "by .* do not fit"), ((2, 3, 4), (3, 4, 5), "do not broadcast")):
        with pytest.raises(BnfuseError, match=rf"^net.onnx: node 'n0' \(MatMul\) .*{said}.*build the graph anew$"):
            Graph("y = MatMul(a, b)", (("a", a), ("b", b))).lowered({"y": (1,)}, file="net.onnx")


BIASED = Graph(
    "m = MatMul(x, w)  y = Add(b, m)  t = Transpose(v)  n = MatMul(u, t)  z = Add(n, c)",
    (("x", (2, 3, 5, 7)), ("w", (7, 4)), ("b", (4,)), ("u", (6, 7)), ("v", (3, 7)), ("c", (3,))),
    outputs=("y", "z"),
    types="float[2,3,5,4] m, float[7,3] t, float[6,3] n",
)


def test_a_vector_is_added_by_the_product():
    assert check(BIASED) == ["Gemm", "Gemm"]


def test_a_vector_is_added_behind_a_product_that_something_else_reads():
    graph = Graph(
        "m = MatMul(x, w)  y = Add(b, m)  z = Relu(m)",
        (("x", (5, 7)), ("w", (7, 4)), ("b", (4,))),
        outputs=("y", "z"),
        types="float[5,4] m",
    )
    assert check(graph) == ["Gemm", "Chain"]  # of the sum and the Relu


# -- channels last -------------------------------------------------------------------------------------------------

CONVNEXT = Graph(
    """d = Conv<group = 24, pads = [3, 3, 3, 3]>(x, w)  t = Transpose<perm = [0, 2, 3, 1]>(d)
       mean = ReduceMean<keepdims = 1>(t, last)  s = Sub(t, mean)  q = Mul(s, s)  v = ReduceMean<keepdims = 1>(q, last)
       e = Add(v, eps)  r = Sqrt(e)  n = Div(s, r)  o = Mul(n, scale)  p = Add(o, shift)
       m = MatMul(p, w1)  h = Add(m, b1)  a = Gelu(h)  k = MatMul(a, w2)  i = Add(k, b2)  c = Mul(i, gamma)
       u = Transpose<perm = [0, 3, 1, 2]>(c)  y = Add(u, x)""",
    (
        ("x", (2, 24, 5, 5)),
        ("w", (24, 1, 7, 7)),
        *((name, (24,)) for name in ("scale", "shift", "b2", "gamma")),
        ("w1", (24, 40)),
        ("b1", (40,)),
        ("w2", (40, 24)),
    ),
    (("last", np.array([-1])), ("eps", np.array(1e-6, np.float32))),
    opset=20,
    types="float[2,5,5,40] m, float[2,5,5,24] k",
)


def test_a_block_with_channels_last_turns_no_map_around():
    found = check(CONVNEXT)
    assert found[:2] == ["NchwToNhwc", "Conv"] and found[-2:] == ["AddPointwise", "NhwcToNchw"]
    assert found.count("Gemm") == 2
    assert not {"Transpose", "NchwToNhwc", "NhwcToNchw"} & {*found[2:-2]}


def test_a_tensor_that_something_else_reads_becomes_a_map_by_a_copy():
    body = "m = MatMul(x, w)  t = Transpose<perm = [0, 3, 1, 2]>(m)  y = Relu(t)  z = Relu(m)"
    graph = Graph(body, (("x", (2, 3, 5, 7)), ("w", (7, 4))), outputs=("y", "z"))
    assert sorted(check(graph)) == ["Gemm", "NchwToNhwc", "NhwcToNchw", "ReluPointwise", "ReluPointwise"]


def test_channels_of_a_wider_map_are_copied_out():
    body = """a = Relu(x)  b = Sigmoid(x)  c = Concat<axis = 1>(a, b)  t = Transpose<perm = [0, 2, 3, 1]>(a)
              z = Exp(t)  y = Relu(c)"""
    graph = Graph(
        body, (("x", (2, 3, 4, 4)),), outputs=("y", "z"), types="float[2,3,4,4] a, float[2,3,4,4] b, float[2,6,4,4] c"
    )
    assert "Transpose" not in check(graph)


# -- sparse matrices -----------------------------------------------------------------------------------------------


def resized_gradient(shape, sizes, mode, before="", after="y = Identity(d)"):
    """dy of a Resize to `sizes`, times the transposed matrices of its axes."""
    full = (*shape[: len(shape) - 2], *sizes)
    matrices = resize_matrices("Resize", {"mode": mode}, shape, sizes=full)
    rows, columns = (np.ascontiguousarray(matrices[len(shape) + axis]) for axis in (-2, -1))
    body = f"{before or 'r = Identity(x)'}  t = MatMul(r, columns)  d = MatMul(rows, t)  {after}"
    return Graph(body, (("x", full),), (("rows", np.ascontiguousarray(rows.T)), ("columns", columns)))


RESIZED_MAP = resized_gradient((2, 3, 5, 6), (9, 13), "linear", "r = Relu(x)", "y = Relu(d)")


def test_the_gradient_of_a_resize_leaves_maps_as_they_lie():
    assert check(RESIZED_MAP) == ["NchwToNhwc", "ReluPointwise", "Taps", "Taps", "ReluPointwise", "NhwcToNchw"]


def test_the_gradient_of_a_resize_of_other_ranks():
    assert check(resized_gradient((3, 5, 6), (9, 13), "linear")) == ["Taps", "Taps"]
    assert check(resized_gradient((5, 6), (12, 12), "nearest")) == ["Taps", "Taps"]


def test_a_constant_that_is_full_is_a_product():
    full = np.tril(np.ones((40, 40), np.float32))
    assert check(Graph("y = MatMul(x, m)", (("x", (3, 40)),), (("m", full),))) == ["Gemm"]


RESIZES = [
    ('mode = "linear"', (2, 3, 9, 11)),
    ('mode = "cubic", coordinate_transformation_mode = "align_corners"', (2, 3, 3, 4)),
    ('mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"', (2, 3, 12, 10)),
]


@pytest.mark.parametrize(("attributes", "sizes"), RESIZES)
def test_a_map_is_resized_as_it_lies(attributes, sizes):
    body = f"r = Relu(x)  u = Resize<{attributes}>(r, , , sizes)  y = Relu(u)"
    found = check(Graph(body, (("x", (2, 3, 6, 5)),), (("sizes", np.array(sizes, I64)),)))
    assert found == ["NchwToNhwc", "ReluPointwise", "Taps", "Taps", "ReluPointwise", "NhwcToNchw"]


def test_other_tensors_are_resized_too():
    scales = ("scales", np.array([1, 1, 2], np.float32))
    assert check(Graph('y = Resize<mode = "linear">(x, , scales)', (("x", (2, 3, 6)),), (scales,))) == ["Taps"]
    same = ("scales", np.ones(4, np.float32))
    assert check(Graph("y = Resize(x, , scales)", (("x", (2, 3, 4, 5)),), (same,))) == ["Copy"]
    old = Graph('y = Upsample<mode = "nearest">(x, scales)', (("x", (2, 3, 6)),), (scales,), opset=9)
    assert check(old) == ["Taps"]


def test_what_no_kernel_resizes_says_what_to_do():
    x = (("x", (2, 3, 6)),)
    scales = ("scales", np.array([1, 2], np.float32))
    for graph, said in (
        (Graph("y = Resize(x, , scales)", x, (scales,)), "2 scales and 0 sizes for 3 axes: give one"),
        (Graph("y = Resize(x, , s)", (*x, ("s", (3,)))), "scales from 's', which is not constant"),
    ):
        with pytest.raises(BnfuseError, match=rf"^net.onnx: node 'n0' \(Resize\) .*{said}"):
            graph.lowered({"y": (1,)}, file="net.onnx")


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_pads_repeat_what_is_there(mode):
    pads = ("pads", np.array([0, 0, 1, 2, 0, 0, 2, 0], I64))
    graph = Graph(
        f'r = Relu(x)  u = Pad<mode = "{mode}">(r, pads)  y = Relu(u)', (("x", (2, 3, 6, 5)),), (pads,), opset=19
    )
    assert check(graph, graph.by_evaluator()).count("Taps") == 2
    axes = ("pads", np.array([1, -1, 1, 2], I64)), ("axes", np.array([-1, 0], I64))
    graph = Graph(f'y = Pad<mode = "{mode}">(x, pads, , axes)', (("x", (4, 3, 6)),), axes, opset=19)
    assert check(graph) == ["Taps", "Taps"]


def test_means_over_dilated_windows():
    window = "kernel_shape = [3, 2], dilations = [2, 3], pads = [1, 1, 1, 1], strides = [2, 1], ceil_mode = 1"
    for counted in (0, 1):
        body = f"r = Relu(x)  u = AveragePool<{window}, count_include_pad = {counted}>(r)  y = Relu(u)"
        graph = Graph(body, (("x", (2, 3, 9, 9)),), opset=19)
        assert check(graph).count("Taps") == 2


# -- transposed convolutions ---------------------------------------------------------------------------------------

TRANSPOSED_CONVS = [
    ("strides = [2, 3], pads = [1, 0, 0, 1], output_padding = [1, 2]", (6, 3, 3, 2)),
    ("group = 3, dilations = [2, 1], pads = [1, 1, 1, 1]", (6, 2, 3, 3)),
    ("group = 6, strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1]", (6, 1, 3, 3)),
    ('auto_pad = "SAME_UPPER", strides = [2, 2]', (6, 2, 3, 3)),
    ('auto_pad = "SAME_LOWER", strides = [3, 3]', (6, 2, 4, 4)),
    ('auto_pad = "VALID", strides = [2, 1]', (6, 2, 2, 4)),
    ("output_shape = [10, 8], strides = [2, 2]", (6, 2, 3, 3)),
]


@pytest.mark.parametrize(("attributes", "weight"), TRANSPOSED_CONVS)
def test_a_transposed_convolution(attributes, weight):
    graph = Graph(f"y = ConvTranspose<{attributes}>(x, w)", (("x", (2, 6, 5, 4)), ("w", weight)))
    assert len(check(graph)) == 3


def test_its_bias_is_added():
    inputs = ("x", (2, 6, 5, 4)), ("w", (6, 3, 3, 2)), ("b", (3,))
    found = check(Graph("r = Relu(x)  t = ConvTranspose<strides = [2, 2]>(r, w, b)  y = Relu(t)", inputs))
    assert "PointwiseBias" not in found


def test_its_weight_has_two_axes_of_space():
    for rank in (3, 5):
        graph = Graph("y = ConvTranspose(x, w)", (("x", (1, 2, 5, 5, 5)[:rank]), ("w", (2, 3, 2, 2, 2)[:rank])))
        with pytest.raises(BnfuseError, match=rf"'n0' \(ConvTranspose\) has a weight of rank {rank}: only"):
            graph.lowered({"y": (1,)})


@st.composite
def transposed(draw):
    """(attributes, shape of x, of weight, size of y): any window, pads that leave something, padding at the end."""
    group = draw(st.sampled_from([1, 1, 2]))
    kernel, strides, dilations = (draw(st.tuples(*(st.integers(1, k),) * 2)) for k in (4, 3, 2))
    pads = draw(st.tuples(*(st.integers(0, 2),) * 4))
    more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(strides, dilations, strict=True))
    size = draw(st.tuples(*(st.integers(1, 6),) * 2))
    out = tuple(
        (size[i] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 + more[i] - pads[i] - pads[i + 2]
        for i in (0, 1)
    )
    assume(min(out) > 0)
    cin, cout = group * draw(st.integers(1, 20)), draw(st.integers(1, 20))
    attributes = {"dilations": dilations, "group": group, "kernel_shape": kernel, "pads": pads, "strides": strides}
    return attributes, more, (draw(st.integers(1, 2)), cin, *size), (cin, cout, *kernel), out


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(transposed())
def test_any_transposed_convolution_and_its_gradients(case):
    """Of its gradients: <dy, y> = <dx, x> = <dweight, w>, as y is linear in both."""
    attributes, more, x, weight, out = case
    shape = (x[0], weight[1] * attributes["group"], *out)
    text = ", ".join(f"{k} = {list(v) if isinstance(v, tuple) else v}" for k, v in attributes.items())
    body = f"""y = ConvTranspose<{text}, output_padding = {list(more)}>(x, w)
               dw = ai.bnfuse.ConvTransposeGradWeight<{text}>(dy, x, w)
               dx = ai.bnfuse.ConvTransposeGradInput<{text}>(dy, x, w)"""
    graph = Graph(body, (("x", x), ("w", weight), ("dy", shape)), outputs=("y", "dw", "dx"))
    feeds = graph.feeds()
    wide = {name: value.astype(np.float64) for name, value in feeds.items()}
    wanted = reference.conv_grad_input(wide["x"], shape, wide["w"], attributes)
    _, found = graph.on_cpu({"y": shape, "dw": weight, "dx": x})
    assert_close(found, {"y": wanted}, 1e-5)
    product = (wide["dy"] * wanted).sum()
    size = np.sqrt((wide["dy"] ** 2).sum() * (wanted**2).sum())
    for gradient, name in (("dw", "w"), ("dx", "x")):
        assert abs((found[gradient] * wide[name]).sum() - product) < 1e-5 * size, gradient
