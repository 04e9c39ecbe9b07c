"""Generic operators that read and write where others say, or go along an axis, against onnx's reference evaluator."""

import pathlib

import numpy as np
import pytest
import source_files
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("optimized_by_turns")

base = source_files.load(pathlib.Path(__file__).with_name("test_generic.py"))
check, values, onnx_run, F, I64 = base.check, base.values, base.onnx_run, base.F, base.I64
few = settings(max_examples=12, deadline=None)


def run(*arguments, **named):
    return base.run(*arguments, **named)


def indices(*shape, low=0, high=3, seed=0, dtype=np.int64):
    return np.random.default_rng(seed).integers(low, high, size=shape).astype(dtype)


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_of_indices_of_any_rank(axis, shape):
    check("Gather", [values(3, 4, 18), indices(*shape, low=-3)], {"axis": axis})


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.int32, np.bool_])
def test_gather_of_any_type(kind):
    check("Gather", [values(5, 6).astype(kind), indices(4, high=5, dtype=np.int32)], {"axis": 0})


@pytest.mark.parametrize(("axis", "shape"), [(0, (2, 4, 19)), (1, (3, 7, 19)), (-1, (3, 4, 5)), (2, (1, 2, 40))])
def test_gather_elements(axis, shape):
    x, place = values(3, 4, 19), indices(*shape, low=-3)
    at = list(np.ogrid[tuple(slice(n) for n in shape)])
    at[axis] = place
    wanted = x[tuple(at)]
    assert (run("GatherElements", [x, place], [wanted], {"axis": axis})[0] == wanted).all()


ND = [
    ((5, 6), (4, 2), 0),
    ((5, 6, 7), (4, 1), 0),
    ((3, 5, 40), (3, 2, 1), 1),
    ((2, 3, 4, 5), (2, 3, 6, 1), 2),
    ((9,), (1,), 0),
]


@pytest.mark.parametrize(("data", "place", "batched"), ND)
def test_gather_nd(data, place, batched):
    check("GatherND", [values(*data), indices(*place, low=-3)], {"batch_dims": batched})


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot(axis):
    constants = [np.array(5, I64), np.array([-1, 2], F)]
    like = onnx_run("OneHot", [indices(3, 4, low=-5, high=8)], {"axis": axis}, constants)[0]
    for kind in (np.int64, np.int32, np.float32):
        x = indices(3, 4, low=-5, high=8, dtype=kind)
        found = run("OneHot", [x, constants[1]], [like], {"axis": axis, "depth": 5})[0]
        np.testing.assert_array_equal(found, like)


def test_reverse_sequence():
    x, lengths = values(5, 3, 4), np.array([5, 0, 2], I64)
    check("ReverseSequence", [x, lengths], {"time_axis": 0, "batch_axis": 1})
    check("ReverseSequence", [x.swapaxes(0, 1).copy(), lengths], {"time_axis": 1, "batch_axis": 0})


# -- writing -------------------------------------------------------------------------------------------------------

REDUCTIONS = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def scattered(data, places, updates, reduction):
    """Updates one after the other, in float64."""
    wanted = base.wide(data).copy()
    join = REDUCTIONS[reduction]
    for place, update in zip(places, updates, strict=True):
        wanted[place] = update if join is None else join(wanted[place], update)
    return wanted


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scatter_elements_with_updates_that_meet(axis, reduction):
    data, updates, place = values(3, 4, 6), values(2, 3, 5, seed=1), indices(2, 3, 5, low=-3)
    spots = [list(at) for at in np.ndindex(*place.shape)]
    for at in spots:
        at[axis] = place[tuple(at)]
    wanted = scattered(data, [tuple(at) for at in spots], updates.reshape(-1), reduction)
    found = run("ScatterElements", [data, place, updates], [data], {"axis": axis, "reduction": reduction})[0]
    base.agree(found, wanted, 1e-5)


SCATTERS = [((4, 5), (12, 2)), ((4, 5), (2, 6, 1)), ((4, 3, 37), (9, 1)), ((6,), (20, 1))]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("shape", "place"), SCATTERS)
def test_scatter_nd_with_updates_that_meet(shape, place, reduction):
    data, where = values(*shape), indices(*place, low=-3)
    updates = values(*place[:-1], *shape[place[-1] :], seed=1)
    rows = [tuple(row) for row in where.reshape(-1, place[-1])]
    wanted = scattered(data, rows, updates.reshape(len(rows), *shape[place[-1] :]), reduction)
    found = run("ScatterND", [data, where, updates], [data], {"reduction": reduction})[0]
    base.agree(found, wanted, 1e-5)


def test_scatters_into_one_number():
    where, updates = np.array([[1], [3], [1]], I64), np.array([2, 3, 4], F)
    like = np.empty(5, F)
    found = run("ScatterND", [where, updates], [like], {"reduction": "add", "fill": 0.5})[0]
    assert found.tolist() == [0.5, 6.5, 0.5, 3.5, 0.5]
    found = run("ScatterElements", [where[:, 0], updates], [like], {"reduction": "none", "fill": 0.5})[0]
    assert found.tolist() == [0.5, 4, 0.5, 3, 0.5]
    lists = np.array([0, 0, 2, 2, 3, 3], np.int32), np.array([0, 2, 1], np.int32)
    found = run("ScatterRows", [updates, *lists], [like], {"reduction": "add", "fill": 0.5})[0]
    assert found.tolist() == [0.5, 6.5, 0.5, 3.5, 0.5]


@given(st.data())
@few
def test_a_scatter_adds_what_a_gather_read(data):
    """<gather(x), dy> = <x, scatter(dy)> for any shapes: one is the other's gradient."""
    rank = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(1, 6)) for _ in range(rank))
    depth = data.draw(st.integers(1, rank))
    count = data.draw(st.integers(1, 9))
    where = np.stack([indices(count, low=-n, high=n, seed=i) for i, n in enumerate(shape[:depth])], -1)
    x = np.round(4 * values(*shape))
    y = onnx_run("GatherND", [x, where])[0]
    assert (run("GatherND", [x, where], [y])[0] == y).all()
    dy = np.round(4 * values(*y.shape, seed=1))
    dx = run("ScatterND", [np.zeros_like(x), where, dy], [x], {"reduction": "add"})[0]
    assert (y * dy).sum() == (x * dx).sum()


def test_integers_are_scattered_too():
    data, where = np.zeros((5,), I64), np.array([[1], [1], [4]], I64)
    assert run("ScatterND", [data, where, np.array([2, 3, 7], I64)], [data], {"reduction": "add"})[0].tolist() == [
        0,
        5,
        0,
        0,
        7,
    ]


# -- along an axis -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_running_sums(axis, exclusive, reverse):
    flags = {"exclusive": exclusive, "reverse": reverse}
    check("CumSum", [values(3, 5, 7)], flags, [np.array(axis, I64)], {"axis": axis, **flags})
    x = indices(3, 5, 7)
    check("CumSum", [x], flags, [np.array(axis, I64)], {"axis": axis, **flags})


def test_running_products():
    x = values(3, 7)
    for axis in (0, 1):
        base.agree(run("CumProd", [x], [x], {"axis": axis})[0], np.cumprod(base.wide(x), axis))


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.int32])
@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(("axis", "k"), [(-1, 3), (0, 4), (1, 5)])
def test_the_greatest_and_where_they_are(axis, k, largest, kind):
    x = np.round(values(4, 5, 9)).astype(kind)  # with ties
    flags = {"axis": axis, "largest": largest, "sorted": 1}
    check("TopK", [x], flags, [np.array([k], I64)], {**flags, "k": k}, outputs=2)


def test_the_greatest_of_what_is_no_number_and_of_both_zeros():
    x = np.array([0.0, np.nan, -0.0, np.inf, -np.inf, 2.0], F)
    like = [np.empty(6, F), np.empty(6, I64)]
    assert run("TopK", [x], like, {"k": 6})[1].tolist() == [1, 3, 5, 0, 2, 4]
    assert run("TopK", [x], like, {"k": 6, "largest": 0})[1].tolist() == [4, 0, 2, 5, 3, 1]


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_where_the_extremes_are(op, axis, last):
    for kind in (F, np.int32, I64):
        x = np.round(values(4, 5, 19)).astype(kind)
        check(op, [x], {"axis": axis, "keepdims": last, "select_last_index": last})


def test_the_greatest_is_what_is_no_number():
    x = np.array([[1, np.nan, 3], [1, 2, -np.inf]], F)
    assert run("ArgMax", [x], [np.empty(2, I64)], {"axis": 1, "keepdims": 0})[0].tolist() == [1, 1]
    assert run("ArgMin", [x], [np.empty(2, I64)], {"axis": 1, "keepdims": 0})[0].tolist() == [1, 2]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_hardmax(axis):
    check("Hardmax", [np.round(values(4, 5, 19))], {"axis": axis})


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rows_of_norm_1(axis):
    x = values(4, 5, 19)
    x[0], x[:, 0], x[..., 0] = 0, 0, 0
    check("LpNormalization", [x], {"axis": axis, "p": 2})
    check("LpNormalization", [np.abs(x)], {"axis": axis, "p": 1})
    assert (run("LpNormalization", [-np.abs(x)], [x], {"axis": axis, "p": 1})[0] <= 0).all()


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("op", ["ReduceProd", "ReduceLogSum", "ReduceLogSumExp"])
def test_reductions_of_products_and_logarithms(op, axes):
    x = values(3, 4, 21, low=0.5, high=1.6)
    check(op, [x], {"keepdims": 0}, [np.array(axes, I64)], {"axes": axes})


def test_a_sum_of_exponentials_neither_overflows_nor_vanishes():
    for x in ([1000.0, 999.0], [-1000.0, -1001.0], [-np.inf, -np.inf], [np.inf, 1.0], [-np.inf, 3.0]):
        found = run("ReduceLogSumExp", [np.array(x, F)], [np.empty(1, F)])[0][0]
        np.testing.assert_allclose(found, np.logaddexp.reduce(np.array(x)), rtol=1e-6)


# -- moves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_blocks_of_channels_and_of_pixels(mode):
    x = values(2, 12, 3, 5)
    check("DepthToSpace", [x], {"blocksize": 2, "mode": mode})
    y = values(2, 3, 6, 10)
    wanted = y.reshape(2, 3, 3, 2, 5, 2).transpose(0, 3, 5, 1, 2, 4).reshape(2, 12, 3, 5)
    assert (run("SpaceToDepth", [y], [wanted], {"blocksize": 2})[0] == wanted).all()


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [-2, 0, 1, 9])
def test_triangles(k, upper):
    check("Trilu", [values(2, 4, 5)], {"upper": upper}, [np.array(k, I64)], {"upper": upper, "k": k})
    check("Trilu", [values(5, 3) > 0], {"upper": upper}, [np.array(k, I64)], {"upper": upper, "k": k})


@pytest.mark.parametrize("k", [-1, 0, 2])
def test_the_unit_matrix(k):
    for kind in (np.float32, np.int64, np.bool_):
        wanted = np.eye(4, 5, k, kind)
        assert (run("EyeLike", [], [wanted], {"k": k})[0] == wanted).all()


def test_ranges():
    for start, limit, delta in ((2, 20, 3), (7, -4, -2), (0.5, 3.0, 0.25)):
        wanted = np.arange(start, limit, delta).astype(I64 if isinstance(start, int) else F)
        assert (run("Range", [], [wanted], {"start": start, "limit": limit, "delta": delta})[0] == wanted).all()


def cut(data, size):
    """Start, end and step of a slice that is not empty."""
    step = data.draw(st.sampled_from([-3, -2, -1, 1, 2]))
    first = data.draw(st.integers(0, size - 1))
    start = data.draw(st.sampled_from([first, first - size]))
    end = data.draw(st.sampled_from([first + 1, size + 5] if step > 0 else [first - 1 - size, -size - 5]))
    return start, end, step


@given(st.data())
@few
def test_slices_with_any_steps(data):
    shape = (5, 7)
    cuts = [cut(data, size) for size in shape]
    part = dict(zip(("starts", "ends", "steps"), zip(*cuts, strict=True), strict=True)) | {"axes": (0, -1)}
    constants = [np.array(part[name], I64) for name in ("starts", "ends", "axes", "steps")]
    check("Slice", [values(*shape)], None, constants, part)


@given(st.data())
@few
def test_pads_that_add_and_crop(data):
    shape = (4, 3, 5)
    axes = data.draw(st.sampled_from([(0, 1, 2), (1,), (-1, 0)]))
    pads = tuple(data.draw(st.integers(-1, 2)) for _ in range(2 * len(axes)))
    x = values(*shape)
    wanted = x
    for i, axis in enumerate(axes):
        before, after = pads[i], pads[i + len(axes)]
        kept = [slice(None)] * 3
        kept[axis] = slice(max(0, -before), shape[axis] - max(0, -after))
        widths = [(0, 0)] * 3
        widths[axis] = (max(0, before), max(0, after))
        wanted = np.pad(wanted[tuple(kept)], widths, constant_values=1.5)
    found = run("Pad", [x], [wanted], {"pads": pads, "axes": axes, "value": 1.5})[0]
    assert (found == wanted).all()


# -- elementwise ---------------------------------------------------------------------------------------------------

RANGES = {
    "Tan": (-1.5, 1.5),
    "Asin": (-1, 1),
    "Acos": (-1, 0.9),
    "Atan": (-3, 3),
    "Sinh": (-3, 3),
    "Cosh": (-3, 3),
    "Asinh": (-3, 3),
    "Acosh": (1.1, 4),
    "Atanh": (-0.9, 0.9),
    "ThresholdedRelu": (-3, 3),
}


@pytest.mark.parametrize("op", RANGES)
def test_functions_of_the_c_library(op):
    low, high = RANGES[op]
    check(op, [values(3, 35, low=low, high=high)])


def test_shrink_and_swish():
    x = values(3, 21)
    check("Shrink", [x], {"bias": 0.25, "lambd": 1.0})
    base.agree(run("Swish", [x], [x], {"alpha": 0.5})[0], base.wide(x) / (1 + np.exp(-0.5 * base.wide(x))))


def test_rounding_is_to_even():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, 3.7, -3.2, 8388609.0], F)
    assert run("Round", [x], [x])[0].tolist() == np.rint(x).tolist()


def test_what_is_no_number_and_what_is_infinite():
    x = np.array([1, np.nan, np.inf, -np.inf, 0] * 5, F)
    for op, attributes in (
        ("IsNaN", {}),
        ("IsInf", {}),
        ("IsInf", {"detect_negative": 0}),
        ("IsInf", {"detect_positive": 0}),
    ):
        check(op, [x], attributes)


def test_remainders():
    x, y = indices(40, low=-9, high=9), np.where(indices(40, seed=1) == 0, -4, 3)
    for kind in (np.int64, np.int32):
        check("Mod", [x.astype(kind), y.astype(kind)])
        check("Mod", [x.astype(kind), y.astype(kind)], {"fmod": 1})
    check("Mod", [values(40), y.astype(F)], {"fmod": 1})
    assert run("Mod", [x, np.zeros_like(x)], [x])[0].tolist() == [0] * 40


@pytest.mark.parametrize("op", ["Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor"])
def test_logic_of_bits(op):
    kind = np.bool_ if op == "Xor" else np.int32
    x, y = indices(3, 21, high=2 if op == "Xor" else 99), indices(21, high=2 if op == "Xor" else 99, seed=1)
    check(op, [x.astype(kind), y.astype(kind)])


def test_the_complement_of_bits():
    check("BitwiseNot", [indices(3, 21, high=99, dtype=np.int32)])
