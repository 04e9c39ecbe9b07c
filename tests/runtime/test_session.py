"""The compiled step: gradients against onnxruntime, optimisers, state, evaluation, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import onnx
import onnx.helper as h
import onnx_ir as ir
import pytest
import safetensors.numpy

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.ort.oracle import OrtGraph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, AdamW, Step, compile_step
from bnfuse.runtime.program.program import ARENA, GRADIENTS, NEW_RUNNING, OUTPUTS

pytestmark = pytest.mark.usefixtures("optimized")

BATCH, CLASSES, SIDE = 4, 5, 8


class Net:
    """A forward graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        results = [name, *(f"{name}_{i}" for i in range(1, outputs))]
        self.nodes.append(h.make_node(kind, inputs, results, name=name, **attributes))
        return name

    def conv(self, x: str, cin: int, cout: int, side: int = 1, stride: int = 1) -> str:
        w = self.weight(self.rng.standard_normal((cout, cin, side, side)) * np.sqrt(2 / (cin * side * side)))
        pads, kernel = [side // 2] * 4, [side, side]
        return self.op("Conv", x, w, kernel_shape=kernel, pads=pads, strides=[stride, stride])

    def bn(self, x: str, c: int) -> str:
        scale, bias = self.weight(1 + 0.1 * self.rng.standard_normal(c)), self.weight(0.1 * self.rng.standard_normal(c))
        statistics = self.weight(np.zeros(c)), self.weight(np.ones(c))
        return self.op("BatchNormalization", x, scale, bias, *statistics, outputs=3, training_mode=1)

    def model(self, x: str, features: int) -> onnx.ModelProto:
        """With global pooling and a classifier behind x."""
        flat = self.op("Flatten", self.op("GlobalAveragePool", x))
        w, b = self.weight(self.rng.standard_normal((CLASSES, features))), self.weight(np.zeros(CLASSES))
        y = self.op("Gemm", flat, w, b, transB=1)
        image = h.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [BATCH, 3, SIDE, SIDE])
        logits = h.make_tensor_value_info(y, onnx.TensorProto.FLOAT, [BATCH, CLASSES])
        graph = h.make_graph(self.nodes, "net", [image], [logits], self.weights)
        return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)


def dense_net() -> onnx.ModelProto:
    """A dense block of two layers, flat concatenations, a transition with average pooling, BN before the head."""
    net = Net()
    x = net.op("Relu", net.bn(net.conv("image", 3, 16, 3), 16))
    y1 = net.conv(net.op("Relu", net.bn(x, 16)), 16, 8, 3)
    t1 = net.op("Concat", x, y1, axis=1)
    y2 = net.conv(net.op("Relu", net.bn(t1, 24)), 24, 8)
    t2 = net.op("Concat", x, y1, y2, axis=1)
    down = net.conv(net.op("Relu", net.bn(t2, 32)), 32, 16)
    pooled = net.op("AveragePool", down, kernel_shape=[2, 2], strides=[2, 2])
    return net.model(net.op("Relu", net.bn(pooled, 16)), 16)


def residual_net() -> onnx.ModelProto:
    """A max pool, and a block whose skip is a strided convolution with its own BN."""
    net = Net()
    stem = net.op("Relu", net.bn(net.conv("image", 3, 8, 3), 8))
    x = net.op("MaxPool", stem, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
    y = net.op("Relu", net.bn(net.conv(x, 8, 16, 3, 2), 16))
    y = net.bn(net.conv(y, 16, 16, 3), 16)
    skip = net.bn(net.conv(x, 8, 16, 1, 2), 16)
    return net.model(net.op("Relu", net.op("Add", y, skip)), 16)


NETS = {"dense": dense_net, "residual": residual_net}


def graph_of(net: Callable[[], onnx.ModelProto], level: str = "none") -> TrainingGraph:
    model = build_training_graph(net())
    return open_graph(model if level == "none" else rewrite(open_graph(model).model, level=level))


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((BATCH, 3, SIDE, SIDE)).astype(np.float32)
    return images, rng.integers(0, CLASSES, BATCH)


@pytest.fixture(scope="module")
def fused() -> Step:
    """One step for the tests that do not care for the network. They restore its state."""
    with pytest.MonkeyPatch.context() as patch:  # it is made before what `optimized` says of a test
        patch.setenv("BNFUSE_LLVM_LEVEL", "3")
        return compile_step(graph_of(residual_net, "icf"), threads=2, optimizer=SGD(lr=0.1, momentum=0.9))


@pytest.fixture
def step(fused):
    state, steps = fused.state_dict(), fused.steps
    yield fused
    fused.load_state_dict(state)
    fused.reset_optimizer()
    fused.lr, fused.steps = 0.1, steps


# -- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("level", ["none", "mvf", "icf"])
def test_results_are_those_of_onnxruntime_on_the_source_graph(net, level):
    source = graph_of(NETS[net])
    images, labels = batch()
    names = [v.name for v in source.model.graph.outputs]
    feeds = {"image": images, source.signature.labels[0]: labels, **source.state()}
    expected = OrtGraph(source.model, name="source").run(feeds, names)
    made = compile_step(graph_of(NETS[net], level), threads=2)
    loss = made.forward(images, labels)
    made.backward()
    found = made.outputs
    assert found.keys() == expected.keys()
    assert loss == pytest.approx(float(expected[source.signature.loss]), rel=1e-6)
    largest = max(np.linalg.norm(expected[name]) for name in source.signature.gradients.values())
    for name in names:
        error = np.linalg.norm(found[name] - expected[name])
        assert error <= 2e-5 * np.linalg.norm(expected[name]) + 1e-6 * largest, name
    gradients = made.gradients()
    assert gradients.keys() == source.signature.gradients.keys()
    for name, output in source.signature.gradients.items():
        np.testing.assert_array_equal(gradients[name], found[output])


def test_levels_launch_less_and_need_less(capsys):
    reports = {level: compile_step(graph_of(dense_net, level), threads=2).report for level in ("none", "icf")}
    launches = {level: sum(report.launches.values()) for level, report in reports.items()}
    assert launches["icf"] < 0.6 * launches["none"]
    assert reports["icf"].feature_map_bytes < 0.5 * reports["none"].feature_map_bytes
    assert reports["icf"].arena_bytes < reports["none"].arena_bytes
    assert [line for line in reports["icf"].copies if "NCHW" not in line] == []


# -- optimisers ----------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1),
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, no_decay=("w1", "w2")),
        AdamW(0.01, weight_decay=0.1),
    ],
    ids=["sgd", "nesterov", "adamw"],
)
def test_updates_are_those_of_torch(optimizer):
    import torch

    made = compile_step(graph_of(residual_net, "icf"), threads=2, optimizer=optimizer)
    names = list(made.program.signature["trainable"])
    ours = {name: torch.nn.Parameter(torch.tensor(made.state_dict()[name])) for name in names}
    exempt = set(optimizer.no_decay)
    groups = [
        {"params": [ours[n] for n in names if n not in exempt], "weight_decay": optimizer.weight_decay},
        {"params": [ours[n] for n in names if n in exempt], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if isinstance(optimizer, SGD):
        theirs = torch.optim.SGD(groups, optimizer.lr, momentum=optimizer.momentum, nesterov=optimizer.nesterov)
    else:
        theirs = torch.optim.AdamW(groups, optimizer.lr, betas=optimizer.betas, eps=optimizer.epsilon)
    for seed in range(3):
        made(*batch(seed))
        for name, gradient in made.gradients().items():
            ours[name].grad = torch.tensor(gradient)
        theirs.step()
    for name in names:
        np.testing.assert_allclose(made.state_dict()[name], ours[name].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_the_learning_rate_is_read_at_each_step(step):
    before = step.state_dict()
    step.lr = 0.0
    step(*batch())
    for name in step.program.signature["trainable"]:
        np.testing.assert_array_equal(step.state_dict()[name], before[name])
    step.lr = 0.1
    step(*batch())
    assert any((step.state_dict()[name] != before[name]).any() for name in step.program.signature["trainable"])


def test_a_step_learns_one_batch_and_evaluates_it(step):
    images, labels = batch()
    losses = [step(images, labels) for _ in range(12)]
    assert losses[-1] < 0.3 * losses[0]
    assert (step.evaluate(images).argmax(1) == labels).mean() >= 0.75
    assert set(step.times) == {"forward", "backward", "update"}
    assert all(seconds > 0 for seconds in step.times.values())


def test_evaluation_uses_running_statistics(step):
    images, _ = batch()
    one = np.repeat(images[:1], BATCH, axis=0)
    np.testing.assert_allclose(step.evaluate(one)[0], step.evaluate(images)[0], rtol=1e-4, atol=1e-5)


def test_backward_needs_the_maps_of_a_forward(step):
    images, labels = batch()
    step.forward(images, labels)
    step.evaluate(images)
    with pytest.raises(BnfuseError, match="forward"):
        step.backward()
    step.forward(images, labels)
    step.backward()


def test_update_needs_gradients_and_applies_them_once(step):
    step(*batch())
    state = step.state_dict()
    with pytest.raises(BnfuseError, match="backward"):
        step.update()
    step.forward(*batch())
    with pytest.raises(BnfuseError, match="backward"):
        step.update()
    with pytest.raises(BnfuseError, match="shape"):
        step.forward(batch()[0], np.zeros(BATCH + 1, np.int64))
    with pytest.raises(BnfuseError, match="forward"):
        step.backward()
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(value, state[name])


def test_evaluation_between_any_two_steps_changes_nothing(step):
    state = step.state_dict()
    losses = [step(*batch(seed)) for seed in range(3)]
    step.load_state_dict(state)
    step.reset_optimizer()
    for seed in range(3):
        images, labels = batch(seed)
        step.evaluate(images)
        assert step.forward(images, labels) == losses[seed]
        step.backward()
        step.evaluate(images)
        step.update()


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("level", ["none", "bnff", "icf"])
def test_nothing_is_read_that_was_not_written(net, level):
    made = compile_step(graph_of(NETS[net], level), threads=2)
    images, labels = batch()
    found = []
    for fill in (0x00, 0xFF):  # zeros, NaNs
        for region in (ARENA, GRADIENTS, NEW_RUNNING, OUTPUTS):
            if region in made._train.memory.regions:
                made._train.memory.regions[region][:] = fill
        made.forward(images, labels)
        made.backward()
        found.append({**made.outputs, "evaluated": made.evaluate(images)})
    for name, value in found[0].items():
        assert np.isfinite(value).all(), name
        np.testing.assert_array_equal(found[1][name], value)


def test_steps_in_turns_and_in_threads_do_not_disturb_one_another():
    graph = graph_of(residual_net, "icf")
    made = [compile_step(graph, threads=threads, optimizer=SGD(lr=0.1, momentum=0.9)) for threads in (2, 2, 2)]
    expected = [made[0](*batch(seed)) for seed in range(4)]
    found: dict[int, list[float]] = {1: [], 2: []}
    for seed in range(2):
        for index in found:
            found[index].append(made[index](*batch(seed)))

    def rest(index: int) -> None:
        found[index] += [made[index](*batch(seed)) for seed in range(2, 4)]

    threads = [threading.Thread(target=rest, args=(index,)) for index in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: expected, 2: expected}


# -- state ---------------------------------------------------------------------------------------------------------


def test_a_step_waits_for_the_twin_that_it_takes_programs_from(step):
    twin, taken = step.twin(), threading.Event()
    thread = threading.Thread(target=lambda: (twin.add_from(step), taken.set()))
    with step._lock:  # as a call in another thread has it
        thread.start()
        assert not taken.wait(0.2)
    thread.join()
    assert taken.is_set() and twin.batches == step.batches


def test_arrays_of_any_form_are_read_and_never_changed(step):
    images, labels = batch()
    expected = step.forward(images, labels)
    wide = np.zeros((BATCH, 3, SIDE, 2 * SIDE), np.float32)
    wide[..., ::2] = images
    sealed = images.copy()
    sealed.setflags(write=False)
    forms = (wide[..., ::2], np.asfortranarray(images), sealed, images.astype(np.float64), images.tolist())
    for given in forms:
        assert step.forward(given, labels.astype(np.int32)) == expected
    assert step.forward(images.astype(">f4"), labels.tolist()) == expected
    assert np.isnan(step.forward(np.full_like(images, np.nan), labels))


@pytest.mark.torch
def test_tensors_of_torch_are_read_through_dlpack(step):
    import torch

    images, labels = batch()
    expected = step.forward(images, labels)
    given = torch.tensor(images).to(memory_format=torch.channels_last)
    assert step.forward(given, torch.tensor(labels)) == expected
    np.testing.assert_array_equal(given.numpy(), images)
    with pytest.raises(BnfuseError, match=r"input 'image' cannot be read as an array: .*gradient"):
        step.forward(given.requires_grad_(), labels)


def test_callers_arrays_are_left_alone_and_results_are_copies(step):
    images, labels = batch()
    kept = images.copy(), labels.copy()
    state = step.state_dict()
    step(images, labels)
    np.testing.assert_array_equal(images, kept[0])
    np.testing.assert_array_equal(labels, kept[1])
    outputs = step.outputs
    name = next(iter(step.program.signature["running"]))
    assert (step.state_dict()[name] != state[name]).any()
    step(*batch(1))
    assert any((step.outputs[key] != value).any() for key, value in outputs.items())


def test_a_checkpoint_continues_exactly(step, tmp_path):
    for seed in range(2):
        step(*batch(seed))
    step.save(tmp_path / "check.safetensors")
    expected = [step(*batch(seed)) for seed in range(2, 5)]
    for seed in range(3):
        step(*batch(seed))
    step.load(tmp_path / "check.safetensors")
    assert [step(*batch(seed)) for seed in range(2, 5)] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["check.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("w0"), r"lacks 'w0' \(1 of the graph's \d+ names\): is it of this network\?"),
        (
            lambda s: s.update({"other.w0": s.pop("w0")}),
            r"lacks 'w0' \(1 of .*\) and has 'other.w0' \(1 names\), which",
        ),
        (lambda s: s.update(other=np.zeros(1)), "has 'other'"),
        (lambda s: s.update(w0=np.zeros(3)), "'w0' has the shape"),
        (lambda s: s.update(w0=s["w0"].astype(np.complex64)), "'w0' is complex64"),
        (lambda s: s.update(w0=[[1], [1, 2]]), "'w0' cannot be read as an array"),
    ],
)
def test_a_state_of_another_network_is_refused(step, change, message):
    state = step.state_dict()
    change(state)
    with pytest.raises(BnfuseError, match=message):
        step.load_state_dict(state)


def test_a_broken_checkpoint_is_one_line(step, tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(BnfuseError, match=r"broken.safetensors: no checkpoint") as caught:
        step.load(path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_a_strange_count_of_steps_is_one_line(step, tmp_path):
    path = tmp_path / "strange.safetensors"
    for count in ("x", "-7", "", "9" * 5000):
        safetensors.numpy.save_file(step.state_dict(), path, {"optimizer.step": count})
        with pytest.raises(BnfuseError, match=r"strange.safetensors: its count of steps"):
            step.load(path)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((BATCH, 3, SIDE, SIDE + 1), np.float32), np.zeros(BATCH, np.int64), "shape"),
        (np.zeros((BATCH, 3, SIDE, SIDE), np.float32), np.full(BATCH, CLASSES), f"classes 0 to {CLASSES - 1}"),
        (np.zeros((BATCH, 3, SIDE, SIDE), np.float32), np.zeros(BATCH, np.float32), "float32"),
    ],
)
def test_wrong_inputs_are_refused(step, images, labels, message):
    with pytest.raises(BnfuseError, match=message):
        step(images, labels)


def test_a_label_that_the_loss_ignores_is_taken():
    graph = graph_of(residual_net)
    for node in graph.model.graph:
        if node.op_type.startswith("SoftmaxCrossEntropyLoss"):
            node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", -100)
    made = compile_step(graph, threads=2)
    images, labels = batch()
    labels[1] = -100
    feeds = {"image": images, graph.signature.labels[0]: labels, **graph.state()}
    expected = OrtGraph(graph.model, name="source").run(feeds, [graph.signature.loss])
    assert made.forward(images, labels) == pytest.approx(float(expected[graph.signature.loss]), rel=1e-6)
    labels[1] = -1
    with pytest.raises(BnfuseError, match="labels from -1"):
        made.forward(images, labels)


def test_frozen_parameters_stay_and_have_no_gradient():
    graph = open_graph(build_training_graph(residual_net(), freeze=["w0"]))
    made = compile_step(graph, threads=2, optimizer=AdamW(0.1))
    before = made.state_dict()
    made(*batch())
    after = made.state_dict()
    assert "w0" not in made.gradients()
    np.testing.assert_array_equal(before["w0"], after["w0"])
    assert (before["w1"] != after["w1"]).any()


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(BnfuseError, match="'bais'"):
        compile_step(graph_of(residual_net), optimizer=SGD(0.1, weight_decay=0.1, no_decay=("bais",)))


def test_only_the_runtime_imports_tvm():
    script = """
import sys, pkgutil, importlib, bnfuse
for module in pkgutil.walk_packages(bnfuse.__path__, "bnfuse."):
    compiles = module.name.startswith(("bnfuse.runtime", "bnfuse.torch"))  # the latter at once
    if not compiles and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        assert "tvm" not in sys.modules, module.name
import bnfuse.runtime.program.optim
assert "tvm" not in sys.modules
assert "runtime" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- as a guest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_step_is_not_pickled_or_copied_but_says_what_does_that(step, make):
    with pytest.raises(BnfuseError, match=r"step\.export") as caught:
        make(step)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["momentum", "weight_decay", "learning_rate", "optimizer"])
def test_setting_what_a_step_does_not_have_is_refused(step, name):
    with pytest.raises(BnfuseError, match=f"{name}.*compile the step again") as caught:
        setattr(step, name, 0.5)
    assert isinstance(caught.value, AttributeError) or name == "optimizer"


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 1e39), ("lr", -0.1), ("lr", float("nan")), ("lr", "0.1"), ("seed", 2**63), ("seed", -1), ("steps", 0.5)],
)
def test_what_is_set_is_in_range(step, name, value):
    before = getattr(step, name)
    with pytest.raises(BnfuseError, match=f"{name}=.* is out of range"):
        setattr(step, name, value)
    assert getattr(step, name) == before
    setattr(step, name, np.int64(before))
