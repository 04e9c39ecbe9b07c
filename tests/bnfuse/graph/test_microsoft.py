"""Operators of onnxruntime-training in our dialect: they compute what they did, under the same names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from microsoft_graphs import MICROSOFT, Arrays, converted, model_of, node, normal, pool_model, run, same
from onnx import helper, numpy_helper

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.microsoft import convert
from bnfuse.graph.training_graph import without_dropout
from bnfuse.opset.activations import ACTIVATIONS

random = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# Norms


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 5, 3), (2, 4, 2, 3, 2)])
@pytest.mark.ort_training
def test_a_batch_norm_and_its_gradient(shape):
    c = shape[1]
    feeds = {"x": normal(0, *shape), "scale": normal(1, c), "bias": normal(2, c), "rm": normal(3, c)}
    feeds |= {"rv": np.abs(normal(4, c)), "dy": normal(5, *shape)}
    forward = node("BatchNormInternal", ["x", "scale", "bias", "rm", "rv"], ["y", "nm", "nv", "mean", "inv"],
                   epsilon=1e-3, momentum=0.8)  # fmt: skip
    backward = node("BatchNormalizationGrad", ["dy", "x", "scale", "mean", "inv"], ["dx", "dscale", "dbias"],
                    epsilon=1e-3)  # fmt: skip
    wanted = {"y": shape, "nm": (c,), "nv": (c,), "dx": shape, "dscale": (c,), "dbias": (c,)}
    model = model_of([forward, backward], feeds, list(wanted), shapes={k: list(v) for k, v in wanted.items()})
    assert same(model, feeds, 1e-4) == ["BatchNorm", "BatchNormGrad"]


def test_a_batch_norm_with_the_attributes_left_out():
    feeds = {"x": normal(0, 2, 3, 4, 4), **{name: np.abs(normal(i, 3)) for i, name in enumerate("abcd")}}
    forward = node("BatchNormInternal", ["x", "a", "b", "c", "d"], ["y", "nm", "nv", "mean", "inv"])
    model = converted(model_of([forward], feeds, ["y", "nm"], shapes={"y": [2, 3, 4, 4], "nm": [3]}))
    given = {a.name: round(a.f, 7) for a in model.graph.node[0].attribute}
    assert given == {"epsilon": 1e-5, "momentum": 0.9}
    assert list(model.graph.node[0].output) == ["y", "nm", "nv", "mean", "inv"]


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.ort_training
def test_a_layer_norm(axis):
    shape = (2, 5, 6)
    inner = shape[axis % 3 :]
    feeds = {"x": normal(0, *shape), "scale": normal(1, *inner), "bias": normal(2, *inner), "dy": normal(3, *shape)}
    forward = node("LayerNormalization", ["x", "scale", "bias"], ["y", "mean", "inv"], "", axis=axis)
    backward = node("LayerNormalizationGrad", ["dy", "x", "scale", "mean", "inv"], ["dx", "ds", "db"], axis=axis)
    shapes = {"dx": list(shape), "ds": list(inner), "db": list(inner)}
    row = [*shape[: axis % 3], *(1 for _ in inner)]
    same(model_of([forward, backward], feeds, list(shapes), shapes={**shapes, "mean": row, "inv": row}), feeds, 1e-4)


# Convolutions and poolings


@st.composite
def windows(draw):
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    strides = draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    dilations = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    pads = draw(st.tuples(*(st.integers(0, (k - 1) // 2) for k in (*kernel, *kernel))))
    return {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}


def conv_model(window, group, wanted, rank=2, auto_pad=None):
    x, w = normal(0, 2, 4, *(9, 8)[:rank]), normal(1, 6, 4 // group, *window["kernel_shape"])
    given = {**window, "group": group}
    if auto_pad is not None:
        given["auto_pad"] = auto_pad
        given.pop("pads")
    forward = helper.make_model(
        helper.make_graph(
            [helper.make_node("Conv", ["x", "w"], ["y"], **given)], "g",
            [helper.make_tensor_value_info(n, 1, v.shape) for n, v in (("x", x), ("w", w))],
            [helper.make_tensor_value_info("y", 1, None)],
        ), opset_imports=[helper.make_opsetid("", 17)], ir_version=8,
    )  # fmt: skip
    y = run(forward, {"x": x, "w": w})["y"].shape
    feeds = {"dy": normal(2, *y), "x": x, "w": w}
    shapes = {"dx": list(x.shape), "dw": list(w.shape), "db": [6]}
    outputs = [name if name in wanted else "" for name in shapes]
    backward = node("ConvGrad", ["dy", "x", "w"], outputs, **given)
    return model_of([backward], feeds, list(wanted), shapes={n: shapes[n] for n in wanted}), feeds


@random
@given(
    window=windows(),
    group=st.sampled_from([1, 2]),
    wanted=st.sampled_from([("dx",), ("dw",), ("dx", "dw"), ("dx", "dw", "db"), ("dw", "db"), ("dx", "db")]),
)
@pytest.mark.ort_training
def test_a_convolution(window, group, wanted):
    spec = "ConvGrad" if {"dx", "dw"} <= {*wanted} else "ConvGradInput" if "dx" in wanted else "ConvGradWeight"
    (op,) = same(*conv_model(window, group, wanted), 1e-4)
    assert op == spec + ("BiasGrad" if "db" in wanted else "")


@pytest.mark.ort_training
def test_a_bias_alone():
    window = {"kernel_shape": (3, 3), "strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0)}
    assert same(*conv_model(window, 1, ("db",))) == ["ReduceSum"]


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_padding_that_follows_from_the_sizes(auto_pad):
    """Against the convolution itself, <dy, conv(v)> = <dx, v>: onnxruntime's gradient pads otherwise."""
    window = {"kernel_shape": (3, 2), "strides": (2, 1), "dilations": (1, 1), "pads": ()}
    model, feeds = conv_model(window, 1, ("dx", "dw"), auto_pad=auto_pad)
    found, v = run(converted(model), feeds), normal(7, *feeds["x"].shape)
    window.pop("pads")
    y = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=auto_pad, **window)
    forward = model_of([y], {"x": v, "w": feeds["w"]}, ["y"])
    response = float(np.vdot(feeds["dy"], run(forward, {"x": v, "w": feeds["w"]})["y"]))
    assert abs(response - float(np.vdot(found["dx"], v))) < 1e-4 * (1 + abs(response))


@pytest.mark.parametrize("wanted", [("dx", "dw", "db"), ("dx",), ("dw",)])
@pytest.mark.ort_training
def test_a_convolution_of_one_dimension(wanted):
    window = {"kernel_shape": (3,), "strides": (2,), "dilations": (2,), "pads": (1, 2)}
    same(*conv_model(window, 2, wanted, rank=1), 1e-4)


@random
@given(window=windows(), ceil_mode=st.integers(0, 1))
@pytest.mark.ort_training
def test_a_max_pooling(window, ceil_mode):
    assert same(*pool_model("MaxPool", {**window, "ceil_mode": ceil_mode})) == ["MaxPool", "MaxPoolGrad"]


@random
@given(window=windows(), count=st.integers(0, 1))
@pytest.mark.ort_training
def test_an_average_pooling(window, count):
    window.pop("dilations")
    model, feeds = pool_model("AveragePool", {**window, "count_include_pad": count})
    assert same(model, feeds) == ["AveragePool", "AveragePoolGrad"]


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3, 5, 4, 6)])
@pytest.mark.ort_training
def test_poolings_of_other_dimensions(shape):
    count = len(shape) - 2
    window = {"kernel_shape": [2] * count, "strides": [2] * count}
    assert "ScatterElements" in same(*pool_model("MaxPool", window, shape))
    model, feeds = pool_model("AveragePool", window, shape)
    if count == 1:
        assert "AveragePoolGrad" in same(model, feeds)
    else:
        with pytest.raises(BnfuseError, match="is of an average pooling that is not read"):
            convert(ir.from_proto(model))


@pytest.mark.ort_training
def test_an_average_pooling_under_another_name_is_found_by_its_window():
    model, feeds = pool_model("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]})
    model.graph.node[1].name = "gradient"
    same(model, feeds)
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.append(helper.make_attribute("kernel_shape", [3, 2]))
    with pytest.raises(BnfuseError, match="has the window of no AveragePool in the graph"):
        convert(ir.from_proto(model))


@pytest.mark.ort_training
def test_a_global_average_pooling():
    feeds = {"x": normal(0, 2, 3, 4, 5), "dy": normal(1, 2, 3, 1, 1)}
    nodes = [
        node("Shape", ["x"], ["x_shape"], "", start=0),
        node("Scale", ["dy", "size"], ["scaled"], scale_down=1),
        node("Expand", ["scaled", "x_shape"], ["dx"], ""),
    ]
    model = model_of(nodes, feeds, ["dx"], {"size": np.array(20, np.int64)}, {"dx": [2, 3, 4, 5]})
    assert same(model, feeds) == ["GlobalAveragePoolGrad"]
    model = model_of(nodes, feeds, ["dx"], {"size": np.array(7, np.int64)}, {"dx": [2, 3, 4, 5]})
    assert "GlobalAveragePoolGrad" not in same(model, feeds)  # of something else


# Activations


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("ReluGrad", {}),
        ("SigmoidGrad", {}),
        ("TanhGrad", {}),
        ("LeakyReluGrad", {"alpha": 0.25}),
        ("QuickGeluGrad", {"alpha": 1.3}),
        ("QuickGeluGrad", {}),
        ("GeluGrad", {}),
        ("FastGeluGrad", {}),
    ],
)
@pytest.mark.ort_training
def test_gradients_of_activations(op, attributes, shape):
    feeds = {"dy": normal(0, *shape), "x": normal(1, *shape)}
    model = model_of([node(op, ["dy", "x"], ["dx"], **attributes)], feeds, ["dx"], shapes={"dx": list(shape)})
    found = same(model, feeds)
    if op in ("ReluGrad", "QuickGeluGrad"):
        assert found == [f"PointwiseGrad{op}"]


@pytest.mark.parametrize("op", ["Sigmoid", "Tanh", "LeakyRelu"])
@pytest.mark.ort_training
def test_gradients_that_read_the_result_of_an_activation(op):
    feeds = {"dy": normal(0, 2, 3, 4, 4), "x": normal(1, 2, 3, 4, 4)}
    nodes = [node(op, ["x"], ["y"], ""), node(f"{op}Grad", ["dy", "y"], ["dx"])]
    found = same(model_of(nodes, feeds, ["dx"], shapes={"y": [2, 3, 4, 4], "dx": [2, 3, 4, 4]}), feeds)
    assert (f"PointwiseGrad{op}Grad" in found) == (op in ACTIVATIONS)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize(
    ("op", "operands"),
    [("QuickGelu", 1), ("Gelu", 1), ("FastGelu", 1), ("FastGelu", 2), ("BiasGelu", 2)],
)
def test_activations_of_onnxruntime(op, operands, opset):
    feeds = {"x": normal(1, 2, 3, 4, 5), "bias": normal(2, 5)}
    feeds = dict([*feeds.items()][:operands])
    shapes = {"y": [2, 3, 4, 5]}
    same(model_of([node(op, list(feeds), ["y"])], feeds, ["y"], shapes=shapes, opset=opset), feeds)


@pytest.mark.parametrize("op", ["BiasGeluGrad_dX", "BiasFastGeluGrad_dX"])
@pytest.mark.ort_training
def test_gradients_of_activations_of_a_sum(op):
    feeds = {"dy": normal(0, 2, 5), "x": normal(1, 2, 5), "bias": normal(2, 5)}
    same(model_of([node(op, list(feeds), ["dx"])], feeds, ["dx"], shapes={"dx": [2, 5]}), feeds)


@pytest.mark.parametrize("bounds", [("low", "high"), ("low",), ("high",)])
@pytest.mark.ort_training
def test_the_gradient_of_a_clip(bounds):
    feeds = {"dy": normal(0, 2, 3, 4, 4), "x": normal(1, 2, 3, 4, 4)}
    tests = {"low": ("GreaterOrEqual", -0.5), "high": ("LessOrEqual", 0.75)}
    nodes = [node(tests[name][0], ["x", name], [f"is_{name}"], "") for name in bounds]
    both = len(bounds) == 2
    nodes += [node("And", ["is_low", "is_high"], ["both"], "")] if both else []
    nodes += [node("Cast", ["both" if both else f"is_{bounds[0]}"], ["mask"], "", to=1)]
    nodes += [node("Mul", ["dy", "mask"], ["dx"], ""), node("Scale", ["dx", "two"], ["twice"])]
    constants = {name: np.array(tests[name][1], np.float32) for name in bounds} | {"two": np.array(2.0, np.float32)}
    model = model_of(nodes, feeds, ["twice"], constants, {"dx": [2, 3, 4, 4], "twice": [2, 3, 4, 4]})
    assert same(model, feeds) == ["PointwiseGradClipGrad", "Mul"]


# Moves


@random
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), axis=st.sampled_from([0, 1, -1]))
@pytest.mark.ort_training
def test_a_concatenation_and_the_pieces_of_its_gradient(lengths, axis):
    def shape(size):
        sizes = [3, 4, 2]
        sizes[axis] = size
        return sizes

    feeds = {f"x{i}": normal(i, *shape(size)) for i, size in enumerate(lengths)}
    pieces = [f"d{i}" for i in range(len(lengths))]
    nodes = [node("ConcatTraining", list(feeds), ["y", "lengths"], axis=axis)]
    nodes += [node("SplitTraining", ["y", "lengths"], pieces, axis=axis)]
    shapes = {"y": shape(sum(lengths))} | {name: shape(size) for name, size in zip(pieces, lengths, strict=True)}
    model = model_of(nodes, feeds, ["y", *pieces], shapes=shapes)
    assert same(model, feeds) == ["Concat", "Split"]
    (tensor,) = converted(model).graph.initializer
    assert (tensor.name, numpy_helper.to_array(tensor).tolist()) == ("lengths", lengths)


@random
@given(data=st.data())
def test_a_slice(data):
    shape = data.draw(st.tuples(st.integers(2, 5), st.integers(2, 6), st.integers(1, 4)))
    axes = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    ranges = [(st.integers(-shape[a], shape[a]), st.integers(-shape[a], shape[a] + 2)) for a in axes]
    parts = [data.draw(st.tuples(start, end, st.sampled_from([1, 2, -1]))) for start, end in ranges]
    x = normal(0, *shape)
    index = [slice(None)] * 3
    for axis, (start, end, step) in zip(axes, parts, strict=True):
        read = range(*slice(start, end, step).indices(shape[axis]))
        index[axis] = slice(read.start, read.stop if read.stop >= 0 else None, step)
    y = x[tuple(index)].shape
    if 0 in y:
        return
    starts, ends, steps = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    constants = {"shape": np.array(shape), "starts": starts, "ends": ends, "axes": np.array(axes), "steps": steps}
    feeds = {"dy": normal(1, *y)}
    same(model_of([node("SliceGrad", ["dy", *constants], ["dx"])], feeds, ["dx"], constants, {"dx": [*shape]}), feeds)


@random
@given(axis=st.integers(-3, 2), rows=st.sampled_from([(), (4,), (2, 3)]), kind=st.sampled_from([np.int32, np.int64]))
@pytest.mark.ort_training
def test_a_look_up(axis, rows, kind):
    shape = [3, 4, 2]
    indices = np.random.default_rng(0).integers(-shape[axis], shape[axis], rows).astype(kind)
    place = axis % 3
    dy = normal(1, *shape[:place], *rows, *shape[place + 1 :])
    constants = {"shape": np.array(shape, np.int64)}
    feeds = {"indices": indices, "dy": dy}
    gradient = node("GatherGrad", ["shape", "indices", "dy"], ["dx"], axis=axis)
    if indices.size and (indices < 0).any():  # onnxruntime's kernel does not count from the end
        feeds["indices"] = indices % np.array(shape[axis], kind)
    same(model_of([gradient], feeds, ["dx"], constants, {"dx": shape}), feeds)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.ort_training
def test_a_look_up_of_elements(axis):
    indices = np.random.default_rng(0).integers(0, 2, (2, 3)).astype(np.int64)
    feeds, constants = {"dy": normal(1, 2, 3), "indices": indices}, {"shape": np.array([2, 3], np.int64)}
    gradient = node("GatherElementsGrad", ["dy", "shape", "indices"], ["dx"], axis=axis)
    same(model_of([gradient], feeds, ["dx"], constants, {"dx": [2, 3]}), feeds)


def dropout_model(ratio: float) -> tuple[onnx.ModelProto, Arrays]:
    feeds = {"x": normal(0, 4, 6), "dy": normal(1, 4, 6)}
    constants = {"ratio": np.array(ratio, np.float32), "training": np.array(True)}
    nodes = [node("Dropout", ["x", "ratio", "training"], ["y", "mask"], "", seed=3)]
    nodes += [node("DropoutGrad", ["dy", "mask", "ratio", "training"], ["dx"])]
    return model_of(nodes, feeds, ["y", "dx"], constants, {"y": [4, 6], "dx": [4, 6]}), feeds


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5])
@pytest.mark.ort_training
def test_a_dropout(ratio):
    same(*dropout_model(ratio))


def test_a_dropout_that_is_taken_out_afterwards_leaves_its_gradient_as_it_comes():
    model, feeds = dropout_model(0.5)
    found = run(ir.to_proto(without_dropout(convert(ir.from_proto(model)))), feeds)
    np.testing.assert_array_equal(found["dx"], feeds["dy"])
    np.testing.assert_array_equal(found["y"], feeds["x"])


@pytest.mark.parametrize("down", [0, 1])
@pytest.mark.parametrize("kind", [np.float32, np.int64])
@pytest.mark.ort_training
def test_a_scale(down, kind):
    feeds, constants = {"x": normal(0, 2, 3)}, {"factor": np.array(3, kind)}
    nodes = [node("Scale", ["x", "factor"], ["y"], scale_down=down)]
    assert same(model_of(nodes, feeds, ["y"], constants, {"y": [2, 3]}), feeds) == ["Div" if down else "Mul"]


# Products, quotients, softmaxes, losses


@random
@given(
    batch=st.sampled_from([(), (3,), (2, 3)]),
    a=st.integers(0, 1),
    b=st.integers(0, 1),
    alpha=st.sampled_from([1.0, 0.5]),
)
def test_a_matrix_product(batch, a, b, alpha):
    left, right = (4, 5)[:: -1 if a else 1], (5, 6)[:: -1 if b else 1]
    feeds = {"a": normal(0, *batch, *left), "b": normal(1, *batch, *right)}
    product = node("FusedMatMul", ["a", "b"], ["y"], transA=a, transB=b, alpha=alpha)
    found = same(model_of([product], feeds, ["y"], shapes={"y": [*batch, 4, 6]}), feeds)
    assert batch or found == ["Gemm"]


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (2, 3)), ((3,), (2, 3)), ((2, 3), ())])
@pytest.mark.ort_training
def test_a_quotient(shapes):
    a, b = shapes
    y = np.broadcast_shapes(*shapes)
    feeds = {"dy": normal(0, *y), "a": normal(1, *a), "b": np.asarray(2 + np.abs(normal(2, *b)), np.float32)}
    model = model_of(
        [node("DivGrad", ["dy", "a", "b"], ["da", "db"])], feeds, ["da", "db"], shapes={"da": [*a], "db": [*b]}
    )
    same(model, feeds)


@pytest.mark.parametrize("op", ["SoftmaxGrad_13", "LogSoftmaxGrad_13"])
@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.ort_training
def test_softmaxes(op, axis):
    feeds = {"dy": normal(0, 2, 3, 4), "y": -np.abs(normal(1, 2, 3, 4))}
    same(model_of([node(op, ["dy", "y"], ["dx"], axis=axis)], feeds, ["dx"], shapes={"dx": [2, 3, 4]}), feeds)


@pytest.mark.parametrize("inner", [(), (3, 2)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, 1, -100])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.ort_training
def test_a_cross_entropy(inner, reduction, ignored, weighted, internal):
    n, classes = 4, 5
    labels = np.random.default_rng(0).integers(0, classes, (n, *inner))
    if ignored is not None:
        labels.reshape(-1)[1] = ignored
    feeds = {"scores": normal(0, n, classes, *inner), "labels": labels}
    feeds["dloss"] = normal(1, n, *inner) if reduction == "none" else np.array(0.7, np.float32)
    constants = {"weights": np.abs(normal(2, classes))} if weighted else {}
    weights, given = list(constants), {"reduction": reduction}
    more: list[str] = []
    if ignored is not None and internal:
        constants["ignored"] = np.array(ignored, np.int64)
        more = [*([] if weighted else [""]), "ignored"]
    elif ignored is not None:
        given["ignore_index"] = ignored
    name, domain = ("SoftmaxCrossEntropyLossInternal", MICROSOFT) if internal else ("SoftmaxCrossEntropyLoss", "")
    forward = node(name, ["scores", "labels", *weights, *more], ["loss", "log_prob"], domain, **given)
    backward = node(f"{name}Grad", ["dloss", "log_prob", "labels", *weights, *more], ["dscores"], **given)
    whole = [n, classes, *inner]
    shapes = {"loss": [n, *inner] if reduction == "none" else [], "dscores": whole, "log_prob": whole}
    model = model_of([forward, backward], feeds, ["loss", "dscores"], constants, shapes)
    assert "SoftmaxCrossEntropyGrad" in same(model, feeds)
