"""Lowering of generic operators: what they take from constants, what is folded, and that the numbers are right."""

import pathlib

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import pytest
import source_files

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.signature import GraphSignature
from bnfuse.runtime.lowering.graph import Lowered, lower

base = source_files.load(pathlib.Path(__file__).with_name("test_lower.py"))
OPSET = 20
INT = "Constant<value = int64[1] {%d}>()"


def parsed(signature: str, body: str, types: str = "") -> onnx.ModelProto:
    types = f"<{types}>" if types else ""
    head = f'<ir_version: 8, opset_import: ["": {OPSET}]>'
    return onnx.parser.parse_model(f"{head} g {signature} {types} {{ {body} }}")


def lowered(proto: onnx.ModelProto) -> Lowered:
    model = ir.from_proto(proto)
    for index, node in enumerate(model.graph):
        node.name = f"n{index}"
    names = tuple(v.name or "" for v in model.graph.inputs)
    roles = GraphSignature(data=names, labels=(), trainable=(), frozen=(), running={}, gradients={}, loss="")
    return lower(model.graph, roles, base.TARGET, opset=OPSET)


def drawn(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Numbers for each input: small integers where it takes those."""
    random = np.random.default_rng(0)
    found = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape, dtype = [d.dim_value for d in kind.shape.dim], onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        normal = dtype == np.float32
        found[value.name] = (random.standard_normal(shape) if normal else random.integers(0, 3, shape)).astype(dtype)
    return found


def check(signature: str, body: str, kernels: list[str], types: str = "") -> Lowered:
    """The kernels that are launched, and the numbers against onnx's evaluator."""
    proto = parsed(signature, body, types)
    made, feeds = lowered(proto), drawn(proto)
    assert base.kernels(made.program) == kernels
    wanted = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    found = base.run(made, **feeds)
    for value, array in zip(proto.graph.output, wanted, strict=True):
        np.testing.assert_allclose(found[value.name], array, rtol=1e-5, atol=1e-6)
        assert found[value.name].shape == array.shape
    return made


CASES = {
    "tile": ("(float[2,4] x) => (float[4,8] y)", "r = Constant<value = int64[2] {2, 2}>() y = Tile(x, r)", ["Tile"]),
    "one hot": (
        "(int64[4] x) => (float[4,5] y)",
        "d = Constant<value = int64 {5}>() v = Constant<value = float[2] {0.0, 1.0}>() y = OneHot(x, d, v)",
        ["OneHot"],
    ),
    "triangle": (
        "(float[4,6] x) => (float[4,6] y)",
        "k = Constant<value = int64 {1}>() y = Trilu<upper = 0>(x, k)",
        ["Trilu"],
    ),
    "running sum": (
        "(float[4,6] x) => (float[4,6] y)",
        "a = Constant<value = int64 {1}>() y = CumSum<reverse = 1>(x, a)",
        ["CumSum"],
    ),
    "the greatest": (
        "(float[4,6] x) => (float[4,2] v, int64[4,2] i)",
        f"k = {INT % 2} v, i = TopK(x, k)",
        ["TopK"],
    ),
    "uneven parts": (
        "(float[2,7] x) => (float[2,3] a, float[2,3] b, float[2,1] c)",
        "a, b, c = Split<axis = 1, num_outputs = 3>(x)",
        ["Split"],
    ),
    "backwards": (
        "(float[5,3] x) => (float[5,3] y)",
        f"s = {INT % -1} e = {INT % -100} a = {INT % 0} y = Slice(x, s, e, a, s)",
        ["Slice"],
    ),
    "a product of maps": (
        "(float[2,4,6,3] x) => (float[2,4] y)",
        "r = Exp(x) a = Constant<value = int64[2] {2, 3}>() y = ReduceProd<keepdims = 0>(r, a)",
        ["Exp", "ReduceProd"],
    ),
    "maps go to the order of the file where it counts": (
        "(float[2,4,6,3] x) => (int64[2,1,6,3] y)",
        "r = Relu(x) y = ArgMax<axis = 1>(r)",
        ["NchwToNhwc", "ReluPointwise", "NhwcToNchw", "ArgMax"],
    ),
    "maps of a function stay as they are": (
        "(float[2,4,6,4] x) => (float[2,4,6,4] y)",
        "r = Relu(x) t = Atan(r) y = Relu(t)",
        ["NchwToNhwc", "ReluPointwise", "Atan", "ReluPointwise", "NhwcToNchw"],
    ),
    "rows that are added up": (
        "(float[4,6] x, int64[3,1] i, float[3,6] u) => (float[4,6] y)",
        'y = ScatterND<reduction = "add">(x, i, u)',
        ["ScatterND"],
    ),
    "rows that are added up at known places": (
        "(float[4,6] x, float[4,6] u) => (float[4,6] y)",
        'i = Constant<value = int64[4,1] {1, -1, 1, 0}>() y = ScatterND<reduction = "add">(x, i, u)',
        ["ScatterRows"],
    ),
    "rows that are replaced at known places": (
        "(float[4,5,6] x, float[3,6] u) => (float[4,5,6] y)",
        "i = Constant<value = int64[3,2] {1, 2, -1, 0, 1, 2}>() y = ScatterND(x, i, u)",
        ["ScatterRows"],
    ),
    "a range": (
        "(float[6] x) => (float[6] y)",
        """a = Constant<value = float {0.0}>() b = Constant<value = float {6.0}>() c = Constant<value = float {1.0}>()
           r = Range(a, b, c) y = Mul(x, r)""",
        ["Mul"],
    ),
    "a unit matrix": ("(float[4,6] x) => (float[4,6] y)", "e = EyeLike(x) y = Sub(x, e)", ["Sub"]),
}


@pytest.mark.parametrize("name", CASES)
def test_operators(name):
    check(*CASES[name])


@pytest.mark.parametrize("indices", ["int64[3,1] i", ""])
def test_updates_of_nothing_but_zeros_read_no_zeros(indices):
    known = "" if indices else "i = Constant<value = int64[3,1] {1, -1, 1}>()"
    body = f"""{known} s = Constant<value = int64[2] {{4, 6}}>() z = ConstantOfShape(s)
               y = ScatterND<reduction = "add">(z, i, u)"""
    made = check(
        f"({indices + ', ' if indices else ''}float[3,6] u) => (float[4,6] y)",
        body,
        ["ScatterND" if indices else "ScatterRows"],
    )
    assert not any(np.size(array) == 24 for array in made.program.initial.values())


def test_an_element_goes_where_the_index_says_of_zeros_too():
    body = """s = Constant<value = int64[2] {4, 6}>() z = ConstantOfShape(s)
              y = ScatterElements<axis = 0, reduction = "add">(z, i, u)"""
    check("(int64[2,6] i, float[2,6] u) => (float[4,6] y)", body, ["ScatterElements"])


def test_an_output_that_the_file_leaves_out_may_stand_before_one_that_it_has():
    proto = parsed("(float[4,6] x) => (int64[4,2] i)", f"k = {INT % 2} v, i = TopK(x, k)")
    wanted = onnx.reference.ReferenceEvaluator(proto).run(None, drawn(proto))[0]
    proto.graph.node[1].output[0] = ""
    assert (base.run(lowered(proto), **drawn(proto))["i"] == wanted).all()


def test_lengths_of_parts_follow_from_shapes():
    """Whether the file says what they are or not: a vector that is none of statistics."""
    body = f"""s = Shape(x) one = {INT % 1} c = Gather(s, one) three = {INT % 3} four = Sub(c, three)
               lengths = Concat<axis = 0>(three, four) a, b = Split<axis = 1>(x, lengths) y = Relu(b)"""
    signature, kernels = "(float[2,7,3,3] x) => (float[2,4,3,3] y)", ["NchwToNhwc", "ReluPointwise", "NhwcToNchw"]
    for types in ("", "int64[1] three, int64[1] four, int64[2] lengths"):
        check(signature, body, kernels, types)
    proto = parsed(signature, body, "int64[1] three, int64[1] four, int64[2] lengths")
    for value in proto.graph.value_info:
        value.type.tensor_type.elem_type = 0
    assert base.kernels(lowered(proto).program) == kernels


def test_vectors_of_integers_have_a_kernel():
    body = "a = Neg(x) b = Neg(y) c = Concat<axis = 0>(a, b) z = Neg(c)"
    for types in ("", "int64[16] a, int64[3] b, int64[19] c"):
        check("(int64[16] x, int64[3] y) => (int64[19] z)", body, ["Neg", "Neg", "Concat", "Neg"], types)


def test_large_results_of_constants_are_made_in_each_step():
    body = """s = Constant<value = int64[2] {3000, 2000}>() c = ConstantOfShape<value = float[1] {2.0}>(s)
              m = ReduceSum<keepdims = 0>(x) y = Add(c, m)"""
    signature = "(float[3,4] x) => (float[3000,2000] y)"
    made = check(signature, body, ["ConstantOfShape", "ReduceSum", "Add"], "float[3000,2000] c")
    assert sum(np.size(array) for array in made.program.initial.values()) < 100


def test_a_range_of_unknown_length_is_refused():
    body = """a = Constant<value = int64 {0}>() c = Constant<value = int64 {1}>()
              r = Range(a, n, c) f = Cast<to = 1>(r) y = Mul(x, f)"""
    with pytest.raises(BnfuseError, match=r"'n2' \(Range\) reads 'limit' from 'n', which is not constant"):
        lowered(parsed("(float[6] x, int64 n) => (float[6] y)", body))


def test_parts_that_do_not_make_up_the_whole_are_refused():
    body = "l = Constant<value = int64[2] {3, 3}>() a, b = Split<axis = 1>(x, l) y = Relu(b)"
    with pytest.raises(BnfuseError, match=r"\(Split\) splits 7 channels into 2 parts of \[3, 3\]"):
        lowered(parsed("(float[2,7,3,3] x) => (float[2,4,3,3] y)", body, "float[2,3,3,3] a, float[2,4,3,3] b"))
