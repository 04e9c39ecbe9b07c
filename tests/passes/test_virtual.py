"""Virtual samples: rows of noise beside the batch, for the statistics alone."""

import autograd
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from random_networks import BATCH, DROP_PATH, training_graph
from small_networks import DENSE, RESIDUAL

import bnfuse
from bnfuse import runtime
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.drawing import separated
from bnfuse.graph.sampling import sampling_of
from bnfuse.graph.signature import signature_of
from bnfuse.models import build_forward
from bnfuse.opset.schemas import check_model
from bnfuse.passes import rewrite
from bnfuse.passes.pipeline import finish
from bnfuse.passes.sampling.virtual import AddVirtual

LEVELS = ("none", "rcf", "mvf", "bnff", "icf")
CHAIN = """
    a = conv(x, 4, k=3)
    n = bn(a)
    out = relu(n)
"""


def extended(model, count, groups=1):
    model = model.clone()
    AddVirtual(count, signature_of(model), groups=groups)(model)
    finish(model)
    return ir.to_proto(model)


def draw(count, groups=1, seed=1):
    """Virtual rows, images, labels; all rows and their labels in the order in which the network sees them."""
    rng = np.random.default_rng(seed)
    virtual, images = rng.standard_normal((groups * count, 3, 8, 8)), rng.standard_normal((2, 3, 8, 8))
    labels = rng.integers(0, 5, 2)
    ignored = np.full(groups * count, autograd.IGNORED)
    halves = [np.split(part, groups) for part in (virtual, images, ignored, labels)]
    rows = np.concatenate([part for pair in zip(halves[0], halves[1], strict=True) for part in pair])
    marks = np.concatenate([part for pair in zip(halves[2], halves[3], strict=True) for part in pair])
    return {"virtual": virtual, "x": images, "labels": labels}, rows, marks


def real(expected, marks):
    return {**expected, "logits": expected["logits"][marks != autograd.IGNORED]}


def test_the_graph_with_virtual_samples(training, golden):
    golden.check(extended(training(CHAIN), 3))


def test_the_graph_with_virtual_samples_in_groups(training, golden):
    golden.check(extended(training(CHAIN), 1, groups=2))


@pytest.mark.torch
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("body", [CHAIN, RESIDUAL, DENSE], ids=["chain", "residual", "dense"])
def test_gradients_are_those_of_all_rows_with_the_virtual_ones_out_of_the_loss(body, groups, network, oracle):
    """Statistics of all rows, so that the gradient comes to the virtual ones as well."""
    forward = network(body)
    feeds, rows, marks = draw(2, groups)
    expected = real(autograd.differentiate(oracle, forward, {"x": rows}, marks, autograd.full), marks)
    found = oracle.evaluate(extended(ir.from_proto(build_training_graph(forward)), 2, groups), feeds)
    assert {*expected} <= {*found}
    assert autograd.worst(expected, found) < 1e-12


def with_head(forward, head):
    """The network with another way from its last map to the classifier, one that names or computes sizes."""
    graph = forward.graph
    keep = [node for node in graph.node if node.name not in ("pooled", "flat")]
    at = next(index for index, node in enumerate(keep) if node.name == "logits")
    make = onnx.helper.make_node
    heads = {
        "mean": [make("ReduceMean", ["out"], ["flat"], name="flat", axes=[2, 3], keepdims=0)],
        "kept mean": [
            make("ReduceMean", ["out"], ["pooled"], name="pooled", axes=[2, 3], keepdims=1),
            make("Reshape", ["pooled", "shape"], ["flat"], name="flat"),
        ],
        "transposed": [
            make("GlobalAveragePool", ["out"], ["pooled"], name="pooled"),
            make("Transpose", ["pooled"], ["turned"], name="turned", perm=[2, 3, 0, 1]),
            make("Squeeze", ["turned", "axes"], ["flat"], name="flat"),
        ],
        "computed": [
            make("GlobalAveragePool", ["out"], ["pooled"], name="pooled"),
            make("Shape", ["pooled"], ["sizes"], name="sizes"),
            make("Slice", ["sizes", "zero", "two"], ["wanted"], name="wanted"),
            make("Reshape", ["pooled", "wanted"], ["flat"], name="flat"),
        ],
    }
    constants = {"shape": [2, 4], "axes": [0, 1], "zero": [0], "two": [2]}
    used = {name for node in heads[head] for name in node.input}
    graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value, np.int64), name)
        for name, value in constants.items()
        if name in used
    )
    del graph.node[:]
    graph.node.extend([*keep[:at], *heads[head], *keep[at:]])
    return forward


@pytest.mark.torch
@pytest.mark.parametrize("head", ["mean", "kept mean", "transposed", "computed"])
def test_sizes_in_constants_and_sizes_that_are_computed(head, network, oracle):
    forward = with_head(network(CHAIN), head)
    feeds, rows, marks = draw(2)
    model = ir.from_proto(build_training_graph(forward))
    found = oracle.evaluate(extended(model, 2), feeds)
    for tensor in forward.graph.initializer:
        if tensor.name == "shape":  # of the network that sees all rows
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([4, 4], np.int64), "shape"))
    expected = real(autograd.differentiate(oracle, forward, {"x": rows}, marks, autograd.full), marks)
    assert {*expected} <= {*found}
    assert autograd.worst(expected, found) < 1e-12


def of_virtual(count, weight=None):
    """Statistics of the virtual rows, mixed with those of the real ones where there is a weight."""

    def norm(name, x, p):
        parts = [x[:count]] if weight is None else [x[:count], x[count:]]
        means = [part.mean((0, 2, 3)) for part in parts]
        variances = [part.var((0, 2, 3), correction=0) for part in parts]
        if weight is None:
            return autograd.normalised(x, means[0], variances[0], p)
        mean, variance = (weight * first + (1 - weight) * second for first, second in (means, variances))
        return autograd.normalised(x, mean, variance, p)

    return norm


@pytest.mark.torch
@pytest.mark.parametrize(("spec", "weight"), [("vdn:2", None), ("bn+vdn:2@0.25", 0.25)])
@pytest.mark.parametrize("body", [CHAIN, RESIDUAL, DENSE], ids=["chain", "residual", "dense"])
def test_statistics_of_virtual_samples_at_every_level(spec, weight, body, network, oracle):
    forward = network(body)
    feeds, rows, marks = draw(2)
    expected = real(autograd.differentiate(oracle, forward, {"x": rows}, marks, of_virtual(2, weight)), marks)
    model = ir.from_proto(build_training_graph(forward))
    for level in LEVELS:
        after = ir.to_proto(rewrite(model, level=level, sample=spec).model)
        check_model(after)
        found = oracle.evaluate(after, feeds)
        assert {*expected} <= {*found}
        assert autograd.worst(expected, found) < 1e-12, level


@pytest.mark.parametrize("body", [RESIDUAL, DENSE], ids=["residual", "dense"])
def test_every_level_computes_the_same_in_onnxruntime(body, training, onnxruntime):
    model = training(body)
    virtual = {"virtual": np.random.default_rng(4).standard_normal((3, 3, 8, 8)).astype(np.float32)}
    results = []
    for level in LEVELS:
        after = ir.to_proto(rewrite(model, level=level, sample="bn+vdn:3").model)
        check_model(after)
        results.append(onnxruntime(after, **virtual))
        assert results[-1]["logits"].shape == (2, 5)
    for found in results[1:]:
        assert autograd.worst(results[0], found) < 2e-4


@pytest.mark.parametrize("name", ["densenet40", "mobilenetv2", "nin"])
def test_the_zoo_takes_more_rows(name, onnxruntime):
    model = ir.from_proto(build_training_graph(build_forward(name, batch=2, image=32, classes=5)))
    after = extended(model, 1)
    check_model(after)
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in after.graph.value_info}
    maps = [shape for shape in shapes.values() if len(shape) == 4 and shape[2] > 1]
    assert all(shape[0] in (3, 2) or shape[2] <= 11 for shape in maps)  # rows, or a gradient of a weight
    assert shapes["logits/with_virtual"] == [3, 5]


def test_roles_and_what_is_drawn(training):
    model = rewrite(training(CHAIN), sample="vdn:4").model
    assert signature_of(model).virtual == ("virtual",)
    assert sampling_of(model).virtual == ("virtual",)
    (value,) = (value for value in model.graph.inputs if value.name == "virtual")
    assert tuple(value.shape) == (4, 3, 8, 8)


def test_a_label_that_is_ignored_already_marks_the_virtual_rows(training):
    model = training(CHAIN)
    for node in model.graph:
        if node.op_type.startswith("SoftmaxCrossEntropyLoss"):
            node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", 255)
    after = extended(model, 1)
    marks = next(tensor for tensor in after.graph.initializer if tensor.name == "labels/ignored")
    assert onnx.numpy_helper.to_array(marks).tolist() == [255]


def with_node(model, op, value, **attributes):
    """The model with one more node, whose result is an output."""
    source = next(v for node in model.graph for v in node.outputs if v.name == value)
    node = ir.node(op, [source], attributes, name="more")
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "more", source.shape, source.type
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    return model


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("ReduceMean", {}, "node 'more' (ReduceMean) reduces over the batch"),
        ("Softmax", {"axis": 0}, "node 'more' (Softmax) works along the batch"),
        ("Det", {}, "node 'more' (Det) is not known to keep the rows of a batch apart"),
        ("Flatten", {"axis": 2}, "node 'more' (Flatten) flattens the batch together with other axes"),
        ("Size", {}, None),
    ],
)
def test_what_cannot_have_more_rows_is_named(op, attributes, message, training):
    model = with_node(training(CHAIN), op, "n", **attributes)
    if message is None:
        extended(model, 1)
        return
    with pytest.raises(BnfuseError) as caught:
        rewrite(model, sample="vdn:1")
    assert str(caught.value) == f"{message}: virtual samples cannot go through it. Leave vdn out."


@pytest.mark.parametrize("local_bn", [None, 1])
def test_a_batch_norm_over_a_matrix_would_mix_the_rows(local_bn, network):
    forward = network(CHAIN)
    at = next(i for i, node in enumerate(forward.graph.node) if node.op_type == "Gemm")
    names = [f"late/{name}" for name in ("scale", "bias", "mean", "var")]
    width = forward.graph.initializer[[v.name for v in forward.graph.initializer].index("fc/weight")].dims[1]
    for name in names:
        forward.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(width, np.float32), name))
    results = ["late", "late/new_mean", "late/new_var"]
    norm = onnx.helper.make_node("BatchNormalization", ["flat", *names], results, name="late", training_mode=1)
    forward.graph.node[at].input[0] = "late"
    forward.graph.node.insert(at, norm)
    model = ir.from_proto(build_training_graph(forward))
    with pytest.raises(BnfuseError, match=r"node 'late' \(BatchNorm\) would take statistics of both kinds"):
        rewrite(model, sample="bn+vdn:1", local_bn=local_bn)


def test_a_graph_has_virtual_samples_once(training):
    model = rewrite(training(CHAIN), level="none", sample="n=vdn:1").model
    with pytest.raises(BnfuseError, match="input 'virtual' takes virtual samples already"):
        AddVirtual(1, signature_of(model))(model)
    with pytest.raises(BnfuseError, match="there is no BatchNorm whose statistics to sample"):
        rewrite(model, sample="vdn:1")


def test_a_graph_that_is_sampled_takes_no_rows_more(training):
    """The places of its samples, and the numbers of their elements, are those of the batch as it was."""
    model = rewrite(training(RESIDUAL), level="none", sample="n2=fs:1/4").model
    with pytest.raises(BnfuseError, match="belongs to statistics of the batch as it is: virtual samples cannot"):
        rewrite(model, sample="vdn:1")


@pytest.mark.torch
@pytest.mark.parametrize("kept_affine", [False, True], ids=["gone", "affine"])
def test_removal_and_virtual_samples_go_together(kept_affine, network, oracle):
    forward = network(RESIDUAL)
    feeds, rows, marks = draw(2)

    def norm(name, x, p):
        if name != "n2":
            return of_virtual(2)(name, x, p)
        return (autograd.wide(p.scale) * x + autograd.wide(p.bias) if kept_affine else x), p.mean, p.variance

    expected = real(autograd.differentiate(oracle, forward, {"x": rows}, marks, norm), marks)
    model = ir.from_proto(build_training_graph(forward))
    for level in LEVELS:
        after = rewrite(model, level=level, remove="n2", keep_affine=kept_affine, sample="vdn:2").model
        found = oracle.evaluate(ir.to_proto(after), feeds)
        assert {name for name in expected if "n2" not in name} <= {*found}
        assert autograd.worst(expected, found) < 1e-12, level


def test_a_loss_that_cannot_ignore_is_named(network):
    model = ir.from_proto(build_training_graph(network(CHAIN), loss="mse"))
    with pytest.raises(BnfuseError, match="holds no class numbers, so virtual ones cannot be masked: no vdn"):
        rewrite(model, sample="vdn:1")


def test_a_row_more_for_every_output_is_cut_off(training, onnxruntime):
    model = training(CHAIN)
    model.graph.outputs.append(next(node for node in model.graph if node.name == "a").outputs[0])
    virtual = np.zeros((1, 3, 8, 8), np.float32)
    found = onnxruntime(extended(model, 1), virtual=virtual)
    assert found["a"].shape == (2, 4, 8, 8)


@pytest.mark.parametrize("level", ["none", "icf"])
def test_it_trains_compiled(level, training):
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((2, 3, 8, 8)).astype(np.float32), rng.integers(0, 5, 2)
    model = rewrite(training(DENSE), level=level, sample="bn+vdn:2").model
    step = runtime.compile_step(model, optimizer=runtime.SGD(lr=0.05), threads=1)
    losses = [step(images, labels) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert step.evaluate(images).shape == (2, 5)


@pytest.mark.parametrize(
    "body",
    [
        DROP_PATH,
        "u = RandomUniform<shape = [4,8,1,1]>() l = Less(u, keep) m = Cast<to = 1>(l) d = Mul(x, m)",
        "u = RandomUniformLike(x) a = Add(u, keep) m = Floor(a) d = Mul(x, m)",
        "m = Bernoulli(keeps) s = Div(m, keep) d = Mul(x, s)",
    ],
)
def test_virtual_rows_have_masks_of_their_own(body):
    source = ir.from_proto(training_graph(body))
    plain, fused = (rewrite(source, level=level, sample="vdn:2").model for level in ("none", "icf"))
    shapes = {tuple(value.shape) for value in separated(plain)[0].graph.inputs if value.name in separated(plain)[1]}
    assert {shape[0] for shape in shapes} == {BATCH + 2}
    found = bnfuse.verify(plain, fused, steps=2)
    assert found.equal
    assert len(set(found.curves.before)) == 2
