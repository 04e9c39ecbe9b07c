"""The torch baseline: the same network, the same values, the layers that people write."""

import collections
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from source_files import load

import bnfuse
from bnfuse.baselines import BASELINES, TorchStep, torch_module
from bnfuse.baselines.network import torch_loss
from bnfuse.build import build, build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import TrainingGraph, open_graph, without_dropout
from bnfuse.models import MODELS, build_forward
from bnfuse.ort.oracle import OrtGraph

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SMALLER: dict[str, object] = {"hidden": 32, "width": 0.25, "depth": 16}  # metaparameters


def zoo_graph(name: str, *, image: int = 32, classes: int = 7, **how: object) -> TrainingGraph:
    forward = build_forward(name, batch=3, image=image, classes=classes, **how)
    return open_graph(ir.from_proto(build_training_graph(forward)), name=name)


def graph_of(forward: onnx.ModelProto, **how: object) -> TrainingGraph:
    return open_graph(ir.from_proto(build(forward, **how).model), name="g.onnx")


def forward_of(nodes, values, *, x=(2, 4, 9, 9), output="y") -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def randomised(graph: TrainingGraph) -> TrainingGraph:
    """BN scales and biases away from 1 and 0, so that a mistake with them shows."""
    rng = np.random.default_rng(5)
    for name in graph.signature.trainable:
        value = graph.model.graph.initializers[name]
        array = value.const_value.numpy()
        if array.ndim == 1:
            value.const_value = ir.tensor(array + 0.2 * rng.standard_normal(array.shape).astype(np.float32), name=name)
    return graph


def torch_results(graph: TrainingGraph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Loss and gradients by output name, in float64."""
    import torch

    module, criterion = torch_module(graph).double(), torch_loss(graph).double()
    tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
    data = [tensors[name].double() for name in graph.signature.data]
    labels = [
        value.double() if value.is_floating_point() else value for value in (tensors[n] for n in graph.signature.labels)
    ]
    loss = criterion(module(*data), *labels)
    loss.backward()
    found = {graph.signature.loss: loss.detach().numpy()}
    for name, gradient in graph.signature.gradients.items():
        found[gradient] = module.get_parameter(module.names[name]).grad.numpy()
    return found


def assert_agrees(graph: TrainingGraph, oracle: types.ModuleType) -> None:
    plain = TrainingGraph(without_dropout(graph.model), graph.signature, graph.name)
    feeds = draw_feeds(plain, np.random.default_rng(1))
    expected = oracle.evaluate(ir.to_proto(plain.model), feeds)
    found = torch_results(plain, feeds)
    assert set(found) == {graph.signature.loss, *graph.signature.gradients.values()}
    largest = max(np.abs(expected[name]).max() for name in graph.signature.gradients.values())
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6 * largest, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_network_of_the_zoo(name, oracle):
    how = {key: value for key, value in SMALLER.items() if key in MODELS[name].metaparameters}
    if name.startswith("vgg"):
        how["width"] = 16  # channels there, a factor elsewhere
    assert_agrees(randomised(zoo_graph(name, **how)), oracle)


@pytest.mark.torch
@pytest.mark.parametrize("bypass", ["simple", "complex"])
def test_a_bypass_reads_what_a_relu_must_not_overwrite(bypass, oracle):
    assert_agrees(zoo_graph("squeezenet", bypass=bypass), oracle)


# Beside definitions written by hand


def by_hand(name: str):
    file = "torch_densenet" if name == "densenet121" else "torch_networks"
    module = load(BENCHMARKS / f"{file}.py")
    if name == "densenet121":
        return module.DenseNet121(7)
    return getattr(module, name)(7, **({"image": 32} if name == "vgg16" else {}))


def kinds(module) -> collections.Counter:
    """How many layers of each type; activations by their uses cannot be counted (a module may serve twice)."""
    leaves = [type(m).__name__ for m in module.modules() if not list(m.children())]
    return collections.Counter(kind for kind in leaves if kind not in ("Identity", "Flatten"))


def settings(module, kind: str) -> list[str]:
    return [repr(m) for m in module.modules() if type(m).__name__ == kind]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "norms"),
    [("densenet121", 121), ("resnet18", 20), ("resnet50", 53), ("mobilenetv2", 52), ("vgg16", 13), ("squeezenet", 26)],
)
def test_the_baseline_is_what_is_written_by_hand(name, norms):
    import torch

    baseline, hand = torch_module(zoo_graph(name)), by_hand(name)
    assert kinds(baseline)["BatchNorm2d"] == norms
    shared = {"ReLU"} if name == "densenet121" else set()  # the one by hand calls one ReLU twice and pools by mean
    counted = {kind: n for kind, n in kinds(hand).items() if kind not in shared}
    pool = {"AdaptiveAvgPool2d"} if name == "densenet121" else set()
    assert {kind: n for kind, n in kinds(baseline).items() if kind not in shared | pool} == counted
    for kind in counted:
        assert settings(baseline, kind) == settings(hand, kind)
    ours, theirs = list(baseline.parameters()), list(hand.parameters())
    assert [p.shape for p in ours] == [p.shape for p in theirs]
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            other.copy_(mine)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    for module in (baseline, hand):
        module.double()
        for dropout in (m for m in module.modules() if isinstance(m, torch.nn.Dropout)):
            dropout.p = 0.0
    assert torch.allclose(baseline(x), hand(x), rtol=1e-9, atol=1e-9)
    for (name, mine), other in zip(baseline.named_buffers(), hand.buffers(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-9), name


@pytest.mark.torch
def test_activations_and_additions_are_in_place():
    import torch

    module = torch_module(zoo_graph("resnet18"))
    assert all(m.inplace for m in module.modules() if isinstance(m, torch.nn.ReLU))
    assert module.code.count(" += ") == 8


@pytest.mark.torch
def test_what_others_read_is_not_overwritten(oracle):
    """A ReLU of a BN that an addition reads too; one of a sigmoid, which needs its result; an addition to itself."""
    rng = np.random.default_rng(0)
    values = {"w": rng.standard_normal((4, 4, 3, 3)).astype(np.float32), "z": np.zeros(4, np.float32)}
    values |= {"g": np.full(4, 1.5, np.float32), "m": np.zeros(4, np.float32), "v": np.ones(4, np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["c", "g", "z", "m", "v"], ["n", "nm", "nv"], name="norm", training_mode=1
        ),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("Add", ["n", "r"], ["a"], name="add"),
        helper.make_node("Sigmoid", ["a"], ["s"], name="sigmoid"),
        helper.make_node("Relu", ["s"], ["t"], name="relu2"),
        helper.make_node("Add", ["t", "t"], ["u"], name="twice"),
        helper.make_node("GlobalAveragePool", ["u"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["y"], name="flat"),
    ]
    graph = graph_of(forward_of(nodes, values))
    module = torch_module(graph)
    assert not module.relu.inplace and not module.relu2.inplace
    assert_agrees(graph, oracle)


@pytest.mark.torch
def test_less_usual_nodes(oracle):
    """Uneven and wide padding, clips, per-channel arithmetic, PRelu, splits, a product and a squared loss."""
    rng = np.random.default_rng(0)
    values = {
        "w": rng.standard_normal((4, 2, 3, 3)).astype(np.float32),
        "b": rng.standard_normal(4).astype(np.float32),
        "scale": rng.standard_normal((1, 4, 1, 1)).astype(np.float32),
        "slope": rng.standard_normal((4, 1, 1)).astype(np.float32),
        "low": np.float32(-1.5),
        "high": np.float32(2.5),
        "sizes": np.array([1, 3], np.int64),
        "product": rng.standard_normal((4, 5)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[0, 1, 2, 1], strides=[2, 1], group=2),
        helper.make_node("Mul", ["c", "scale"], ["d"], name="scaled"),
        helper.make_node("PRelu", ["d", "slope"], ["e"], name="prelu"),
        helper.make_node("Clip", ["e", "low", "high"], ["f"], name="clip"),
        helper.make_node("MaxPool", ["f"], ["g"], name="max", kernel_shape=[2, 2], pads=[0, 0, 1, 1]),
        helper.make_node("AveragePool", ["g"], ["h"], name="avg", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("Split", ["h", "sizes"], ["i", "j"], name="split", axis=1),
        helper.make_node("Concat", ["j", "i"], ["l"], name="concat", axis=1),
        helper.make_node("HardSwish", ["l"], ["n"], name="swish"),
        helper.make_node("ReduceMean", ["n"], ["o"], name="mean", axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["o", "product"], ["p"], name="product"),
        helper.make_node("Softplus", ["p"], ["y"], name="softplus"),
    ]
    graph = graph_of(forward_of(nodes, values), loss="mse")
    assert "mse_loss" in torch_loss(graph).code
    assert_agrees(graph, oracle)


@pytest.mark.torch
def test_shapes_and_functions():
    """Beside onnxruntime: slices, transposes, reshapes, pads, and what has one operand."""
    rng = np.random.default_rng(0)
    values = {
        "w": rng.standard_normal((4, 4, 3, 3)).astype(np.float32),
        "starts": np.array([1, -7], np.int64),
        "ends": np.array([2**62, -1], np.int64),
        "axes": np.array([3, 2], np.int64),
        "steps": np.array([1, 2], np.int64),
        "pads": np.array([0, 0, 1, 0, 0, 0, 0, 2], np.int64),
        "flat": np.array([2, 4, -1], np.int64),
        "last": np.array([2], np.int64),
        "two": np.float32(2.0),
        "half": np.float32(0.5),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Slice", ["c", "starts", "ends", "axes", "steps"], ["s"], name="slice"),
        helper.make_node("Pad", ["s", "pads", "half"], ["p"], name="pad"),
        helper.make_node("Reshape", ["p", "flat"], ["f"], name="flat"),
        helper.make_node("Transpose", ["f"], ["t"], name="turn", perm=[0, 2, 1]),
        helper.make_node("Tanh", ["t"], ["u"], name="tanh"),
        helper.make_node("HardSigmoid", ["u"], ["v"], name="hard", alpha=0.25, beta=0.5),
        helper.make_node("LeakyRelu", ["v"], ["k"], name="leaky", alpha=0.2),
        helper.make_node("Exp", ["k"], ["e"], name="exp"),
        helper.make_node("Div", ["e", "two"], ["d"], name="div"),
        helper.make_node("Pow", ["d", "two"], ["q"], name="pow"),
        helper.make_node("Sum", ["q", "v"], ["m"], name="sum"),
        helper.make_node("ReduceSum", ["m", "last"], ["r"], name="total", keepdims=1),
        helper.make_node("Squeeze", ["r", "last"], ["y"], name="squeeze"),
    ]
    graph = graph_of(forward_of(nodes, values))
    feeds = draw_feeds(graph, np.random.default_rng(1))
    found = torch_results(graph, feeds)
    expected = OrtGraph(graph.model, name="g", threads=1).run({**graph.state(), **feeds}, found)
    for name, value in found.items():
        np.testing.assert_allclose(expected[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.torch
def test_batch_norm_numbers_and_running_statistics():
    import torch

    graph = zoo_graph("resnet20")
    module = torch_module(graph)
    norm = module.get_submodule(module.names["stem/norm/scale"].rsplit(".", 1)[0])
    assert (norm.eps, norm.momentum) == (1e-5, 0.1)
    assert set(graph.state()) == set(module.names)
    for name, value in graph.state().items():
        owner, attribute = module.names[name].rsplit(".", 1)
        assert np.array_equal(getattr(module.get_submodule(owner), attribute).detach().numpy(), value), name
    module(torch.randn(3, 3, 32, 32))
    assert not np.array_equal(norm.running_mean.numpy(), graph.state()["stem/norm/running_mean"])
    assert torch.equal(module.stem_norm.running_mean, norm.running_mean)


@pytest.mark.torch
def test_a_norm_for_inference_is_in_eval_mode():
    """As in a file of others, whose first BN reads its running statistics."""
    import torch

    graph = zoo_graph("resnet20")
    node = next(node for node in graph.model.graph if node.name == "stem/norm")
    node.op_type, node.domain = "BatchNormalization", ""
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    module = torch_module(graph)
    assert [m.training for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)] == [False] + [True] * 20
    module(torch.randn(3, 3, 32, 32))
    assert torch.equal(module.stem_norm.running_mean, torch.zeros(16))


@pytest.mark.torch
def test_frozen_parameters_stay():
    graph = graph_of(build_forward("resnet20", batch=2, image=32, classes=7), freeze=["stem/*"])
    feeds = draw_feeds(graph, np.random.default_rng(0))
    step = TorchStep(graph, "torch-cl", feeds, threads=1)
    assert not step.module.stem_conv.weight.requires_grad and step.module.classifier.weight.requires_grad
    step.run()
    assert np.array_equal(step.module.stem_conv.weight.numpy(), graph.state()["stem/conv/weight"])
    assert not np.array_equal(step.module.classifier.weight.detach().numpy(), graph.state()["classifier/weight"])


@pytest.mark.torch
@pytest.mark.parametrize("baseline", ["torch", "torch-cl"])
def test_a_step_is_the_files(baseline):
    """After one step every parameter moved against the file's gradient; the file's own values did not move."""
    import torch

    graph = zoo_graph("resnet20")
    before = {name: value.copy() for name, value in graph.state().items()}
    feeds = draw_feeds(graph, np.random.default_rng(0))
    wanted = [graph.signature.loss, *graph.signature.gradients.values()]
    expected = OrtGraph(graph.model, name="r", threads=1).run({**graph.state(), **feeds}, wanted)
    step = TorchStep(graph, baseline, feeds, lr=0.5, threads=1)
    assert step.name == baseline
    assert step.data[0].is_contiguous(memory_format=torch.channels_last) == (baseline == "torch-cl")
    times = step.run()
    assert 0 < times.forward < times.step
    assert float(step.loss) == pytest.approx(float(expected[graph.signature.loss]), rel=1e-4)
    for name, gradient in graph.signature.gradients.items():
        after = step.module.get_parameter(step.module.names[name]).detach().numpy()
        np.testing.assert_allclose(after, before[name] - 0.5 * expected[gradient], rtol=1e-3, atol=1e-3, err_msg=name)
    assert all(np.array_equal(value, before[name]) for name, value in graph.state().items())


@pytest.mark.torch
def test_steps_train():
    graph = zoo_graph("resnet20")
    step = TorchStep(graph, "torch-cl", draw_feeds(graph, np.random.default_rng(0)), lr=0.02, threads=1)
    losses = []
    for _ in range(6):
        step.run()
        losses.append(float(step.loss))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.torch
def test_torch_compile_takes_the_whole_module():
    """One graph without a break, the same results; by the backend that needs no C++ compiler."""
    import torch

    module = torch_module(zoo_graph("mobilenetv2", dropout=0.0)).double()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), module(x), rtol=1e-9, atol=1e-9)


@pytest.mark.torch
def test_torch_compile_without_a_compiler(monkeypatch):
    graph = zoo_graph("resnet20")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BnfuseError, match=r"install g\+\+ or leave torch-compile out"):
        TorchStep(graph, "torch-compile", draw_feeds(graph, np.random.default_rng(0)))


# Refusals, and what needs no torch


@pytest.mark.torch
def test_an_op_without_a_counterpart_is_named():
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Tile", ["x", "times"], ["t"], name="tiled"),
        helper.make_node("Conv", ["t", "w"], ["c"], name="conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["y"], name="flat"),
    ]
    values = {"w": rng.standard_normal((4, 4, 3, 3)).astype(np.float32), "times": np.array([1, 1, 2, 1], np.int64)}
    with pytest.raises(BnfuseError, match=r"^g\.onnx: node 'tiled' \(Tile\) has no counterpart in torch") as error:
        torch_module(graph_of(forward_of(nodes, values)))
    assert "\n" not in str(error.value)


@pytest.mark.torch
def test_a_rewritten_graph_is_refused():
    graph = zoo_graph("resnet20")
    rewritten = open_graph(bnfuse.rewrite(graph.model, level="icf").model, name="fused.onnx")
    with pytest.raises(BnfuseError, match=r"fused\.onnx: node .* of a rewritten graph: pass the file that"):
        torch_module(rewritten)


@pytest.mark.torch
def test_an_unknown_baseline():
    with pytest.raises(BnfuseError, match="no torch baseline 'jax': there is torch, torch-cl, torch-compile"):
        TorchStep(zoo_graph("resnet20"), "jax", {})


def test_without_torch_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import onnx_ir as ir, bnfuse.baselines\n"
        "from bnfuse.core.errors import BnfuseError\n"
        "from bnfuse.models import build_forward\n"
        "from bnfuse.build import build_training_graph\n"
        "from bnfuse.graph.training_graph import open_graph\n"
        "model = build_training_graph(build_forward('resnet20', batch=2))\n"
        "try:\n    bnfuse.baselines.torch_module(open_graph(ir.from_proto(model), name='r'))\n"
        "except BnfuseError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "torch is not installed: pip install 'bnfuse[bench]'", done.stderr


def test_the_baselines():
    assert BASELINES == ("torch", "torch-cl", "torch-compile")
