"""Generic operators against onnx's reference evaluator (in float64)."""

import math

import numpy as np
import onnx.helper as h
import onnx.reference
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.generic import GenericProblem
from bnfuse.runtime.kernels.cpu.generic import generic

TARGET = resolve("cpu", 2)
OPSET = 18
F, I64, B = np.float32, np.int64, np.bool_


def run(op, inputs, outputs, attributes=None, scalars=()):
    """Outputs of these shapes and dtypes."""

    def kinds(arrays):
        return tuple((tuple(a.shape), a.dtype.name) for a in arrays)

    problem = GenericProblem(op, kinds(inputs), kinds(outputs), tuple((attributes or {}).items()))
    kernel = generic(problem, TARGET)
    found = execute.call(kernel, {f"in{i}": a for i, a in enumerate(inputs)}, scalars=scalars)
    return [found[f"out{i}"].reshape(a.shape) for i, a in enumerate(outputs)]


def onnx_run(op, inputs, attributes=None, constants=None, outputs=1):
    """The evaluator's results. `constants` are the inputs that a generic problem has as attributes."""
    arrays = [*inputs, *(constants or [])]
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(arrays)]
    node = h.make_node(op, names, [f"y{i}" for i in range(outputs)], **(attributes or {}))
    feeds = {n: np.asarray(a) for n, a in zip(names, arrays, strict=True) if a is not None}
    infos = [h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    results = [h.make_value_info(n, onnx.TypeProto()) for n in node.output]
    model = h.make_model(h.make_graph([node], "g", infos, results), opset_imports=[h.make_opsetid("", OPSET)])
    return onnx.reference.ReferenceEvaluator(model).run(None, feeds)


def wide(array):
    return array.astype(np.float64) if array.dtype == F else array


def agree(found, wanted, tolerance=2e-6):
    assert found.shape == wanted.shape
    if found.dtype == F:
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * 0.1)
    else:
        assert (found == wanted).all()


def check(op, inputs, attributes=None, constants=None, own=None, outputs=1):
    """`own`: the attributes of the generic problem, where inputs of the node are among them."""
    expected = onnx_run(op, [wide(a) for a in inputs], attributes, constants, outputs)
    like = [np.asarray(e).astype(F) if np.asarray(e).dtype == np.float64 else np.asarray(e) for e in expected]
    for found, wanted in zip(run(op, inputs, like, own or attributes), expected, strict=True):
        agree(found, np.asarray(wanted))


def values(*shape, low=-3.0, high=3.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, size=shape).astype(F)


# -- elementwise ---------------------------------------------------------------------------------------------------

UNARY = {
    "Identity": {},
    "Relu": {},
    "LeakyRelu": {"alpha": 0.1},
    "Elu": {"alpha": 0.7},
    "Selu": {},
    "Celu": {"alpha": 1.5},
    "Sigmoid": {},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
    "HardSwish": {},
    "Softplus": {},
    "Mish": {},
    "Softsign": {},
    "Tanh": {},
    "Exp": {},
    "Erf": {},
    "Sin": {},
    "Cos": {},
    "Floor": {},
    "Ceil": {},
    "Reciprocal": {},
    "Neg": {},
    "Abs": {},
    "Sign": {},
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    check(op, [values(3, 5, 7)], UNARY[op])


@pytest.mark.parametrize("op", ["Log", "Sqrt"])
def test_unary_of_positive_numbers(op):
    check(op, [values(40, low=0.1)])


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def test_gelu():
    x = values(35)
    agree(run("Gelu", [x], [x])[0], gelu(wide(x)))
    z = wide(x)
    tanh = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    agree(run("Gelu", [x], [x], {"approximate": "tanh"})[0], tanh)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shapes", [((4, 5, 6), (4, 5, 6)), ((2, 3, 5), (3, 1)), ((7,), (3, 1, 7)), ((), (2, 17))])
def test_arithmetic_broadcasts(op, shapes):
    check(op, [values(*shapes[0]), values(*shapes[1], low=0.5, seed=1)])


def test_integers():
    x = np.array([[7, -7, 3], [0, 5, -9]], I64)
    check("Div", [np.abs(x), np.array([2], I64)])
    check("Add", [x, np.array([[1], [2]], I64)])
    check("Max", [x, np.array(0, I64)])
    check("ReduceSum", [x], {"keepdims": 0}, [np.array([1], I64)], {"axes": (1,)})


@pytest.mark.parametrize("op", ["Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"])
def test_comparisons(op):
    x = np.round(values(5, 18))
    check(op, [x, np.round(values(18, seed=1))])


@pytest.mark.parametrize("op", ["And", "Or"])
def test_logic(op):
    x, y = values(3, 21) > 0, values(21, seed=1) > 0
    check(op, [x, y])
    check("Not", [x])


def test_where_pow_prelu():
    x, y = values(4, 3, 5), values(3, 1, seed=1)
    check("Where", [values(5, seed=2) > 0, x, y])
    check("Pow", [np.abs(x), np.array(2.5, F)])
    check("PRelu", [x, y])


@pytest.mark.parametrize("op", ["Sum", "Max", "Min", "Mean"])
def test_many_operands(op):
    check(op, [values(3, 17), values(17, seed=1), values(3, 1, seed=2)])


def test_a_maximum_shows_nan():
    x, y = np.array([np.nan, 1, 2], F), np.array([0, np.nan, 3], F)
    assert np.isnan(run("Max", [x, y], [x])[0]).tolist() == [True, True, False]
    assert np.isnan(run("ReduceMax", [x], [x[:1]])[0]).all()


def test_clip_with_bounds_as_operands_and_as_attributes():
    x = values(33)
    check("Clip", [x, np.array(-1, F), np.array(0.5, F)])
    assert (run("Clip", [x], [x], {"max": 0.5})[0] == np.minimum(x, F(0.5))).all()


@pytest.mark.parametrize(("source", "result"), [(F, I64), (I64, F), (F, B), (B, F), (np.int32, I64), (F, np.float64)])
def test_cast(source, result):
    x = (2 * values(3, 19)).astype(source)
    assert (run("Cast", [x], [x.astype(result)])[0] == x.astype(result)).all()


# -- moves ---------------------------------------------------------------------------------------------------------


def test_expand():
    check("Expand", [values(3, 1, 5)], None, [np.array([2, 1, 4, 5], I64)], {"shape": (2, 1, 4, 5)})


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_transpose(order):
    check("Transpose", [values(2, 3, 5, 7)], {"perm": order})


def test_transpose_by_default_reverses():
    check("Transpose", [values(4, 19)])


def test_concat_and_split():
    x = [values(2, 3, 5), values(2, 4, 5, seed=1), values(2, 1, 5, seed=2)]
    check("Concat", x, {"axis": -2})
    check("Split", [values(2, 8, 5)], {"axis": 1}, [np.array([3, 4, 1], I64)], {"axis": 1}, outputs=3)


SLICES = [
    {"starts": (1, -4), "ends": (3, 100), "axes": (0, -1)},
    {"starts": (-1,), "ends": (-100,), "axes": (2,), "steps": (-2,)},
    {"starts": (0, 1, 2), "ends": (4, 5, 6), "axes": (0, 1, 2), "steps": (3, 1, 2)},
]


@pytest.mark.parametrize("part", SLICES)
def test_slice(part):
    x = values(4, 5, 6)
    constants = [np.array(part.get(k, (1,) * len(part["axes"])), I64) for k in ("starts", "ends", "axes", "steps")]
    check("Slice", [x], None, constants, part)


def test_pad_and_crop():
    x = values(3, 4, 5)
    for pads, extra in (((0, 1, 2, 0, 3, 1), {}), ((1, 2), {"axes": (1,), "value": -2.5})):
        given = (pads, extra.get("value", 0), extra.get("axes", (0, 1, 2)))
        constants = [np.array(v, kind) for v, kind in zip(given, (I64, F, I64), strict=True)]
        expected = onnx_run("Pad", [x], None, constants)[0]
        assert (run("Pad", [x], [expected], {"pads": pads, **extra})[0] == expected).all()
    assert (run("Pad", [x], [x[:, 1:, :-2]], {"pads": (0, -1, 0, 0, 0, -2)})[0] == x[:, 1:, :-2]).all()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(axis):
    x = values(3, 4, 18)
    indices = np.array([[1, -1], [0, 1]], I64)
    check("Gather", [x, indices], {"axis": axis})


def test_tile():
    x = values(2, 3, 5)
    check("Tile", [x], None, [np.array([2, 1, 4], I64)], {"repeats": (2, 1, 4)})


def test_constants_and_reshapes():
    y = np.empty((2, 3, 5), F)
    assert (run("ConstantOfShape", [], [y], {"value": 0.5})[0] == 0.5).all()
    x = values(6, 5)
    assert (run("Reshape", [x], [y])[0] == x.reshape(y.shape)).all()
    assert (run("Squeeze", [x.reshape(6, 1, 5)], [x])[0] == x).all()


# -- reductions ----------------------------------------------------------------------------------------------------

AXES = [(0,), (1,), (2,), (0, 2), (1, 3), (0, 1, 2, 3), (2, 3), (0, 1), (0, 2, 3)]


@pytest.mark.parametrize("axes", AXES)
def test_sum_over_any_axes(axes):
    x = values(3, 4, 5, 19)
    check("ReduceSum", [x], {"keepdims": len(axes) % 2}, [np.array(axes, I64)], {"axes": axes})


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare", "ReduceL1", "ReduceL2"])
def test_other_reductions(op):
    for axes in ((1,), (0, 2)):
        check(op, [values(3, 4, 21)], {"keepdims": 0}, [np.array(axes, I64)], {"axes": axes})


def test_a_sum_over_nothing_but_ones_is_a_copy():
    check("ReduceSum", [values(1, 18)], {"keepdims": 1}, [np.array([0], I64)], {"axes": (0,)})
    check("ReduceSum", [values(5, 1, 3)], {}, None)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis):
    x = values(3, 5, 19)
    check("Softmax", [x], {"axis": axis})
    check("LogSoftmax", [x], {"axis": axis})


# -- dropout -------------------------------------------------------------------------------------------------------


def dropout(x, seed=1, step=0, **attributes):
    return run("Dropout", [x], [x, x > 0], attributes, (seed, step))


def test_dropout_keeps_its_share_and_scales_it():
    x = values(200, 101, low=1, high=2)
    y, mask = dropout(x, ratio=0.3)
    assert abs(mask.mean() - 0.7) < 0.01
    assert abs(mask.mean(axis=0) - 0.7).max() < 0.15
    agree(y, np.where(mask, wide(x) / 0.7, 0))


def test_dropout_depends_on_seed_step_and_node_alone():
    x = np.ones((64, 33), F)
    masks = [dropout(x, seed, step, node=node)[1] for seed, step, node in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert (dropout(2 * x, node=0)[1] == masks[0]).all()
    for other in masks[1:]:
        assert abs((other == masks[0]).mean() - 0.5) < 0.05


def test_dropout_of_ratio_0_and_1_and_at_inference():
    x = values(3, 17)
    assert (dropout(x, ratio=0.0)[0] == x).all()
    assert (dropout(x, ratio=1.0)[0] == 0).all()
    assert (dropout(x, ratio=0.5, training_mode=0)[0] == x).all()


# -- refusals ------------------------------------------------------------------------------------------------------


def test_an_unknown_operator_gives_the_supported_list():
    with pytest.raises(BnfuseError, match=r"NonMaxSuppression is not among .* Add, "):
        generic(GenericProblem("NonMaxSuppression", (), ()), TARGET)


def test_a_slice_without_constant_bounds_is_refused():
    kind = ((3,), "float32")
    with pytest.raises(BnfuseError, match="'starts' is not constant"):
        generic(GenericProblem("Slice", (kind,), (kind,)), TARGET)


def test_a_softmax_of_integers_is_refused():
    kind = ((3,), "int64")
    with pytest.raises(BnfuseError, match="cast to float32"):
        generic(GenericProblem("Softmax", (kind,), (kind,)), TARGET)
