"""A sampled step: gradients against float64, what it draws and when, no sweep for statistics, evaluation, artifacts."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.sampling import virtual_samples
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, Step, compile_step, load_step
from bnfuse.runtime.backends.draws import sampling_of
from bnfuse.runtime.program import program as p
from bnfuse.verifying.noise import FLOOR, distance

BODY = """
    stem = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(image, w0)
    n1, rm1, rv1 = BatchNormalization<training_mode = 1>(stem, g1, b1, m1, v1)
    r1 = Relu(n1)
    y1 = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(r1, w1)
    t2 = Concat<axis = 1>(stem, y1)
    n2, rm2, rv2 = BatchNormalization<training_mode = 1>(t2, g2, b2, m2, v2)
    r2 = Relu(n2)
    y2 = Conv<kernel_shape = [1,1]>(r2, w2)
    t3 = Concat<axis = 1>(t2, y2)
    n3, rm3, rv3 = BatchNormalization<training_mode = 1>(t3, g3, b3, m3, v3)
    r3 = Relu(n3)
    pooled = GlobalAveragePool(r3)
    flat = Flatten(pooled)
    logits = Gemm<transB = 1>(flat, fc, fb)
"""
WEIGHTS = {"w0": (8, 3, 3, 3), "w1": (4, 8, 3, 3), "w2": (8, 12, 1, 1), "fc": (5, 20), "fb": (5,)}
SAMPLERS = ["ns:2", "bs:2", "fs:1/4", "frs:1/4"]
FULL = ("BatchNormStatistics", "ConcatStatistics", "BatchNormGradPointwise")


def network() -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[4,3,8,8] image) => (float[4,5] logits) {{ {BODY} }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for name, shape in WEIGHTS.items()}
    for index, channels in enumerate((8, 12, 20), 1):
        arrays |= {f"g{index}": rng.uniform(0.5, 1.5, channels), f"b{index}": rng.standard_normal(channels) / 10}
        arrays |= {f"m{index}": np.zeros(channels), f"v{index}": np.ones(channels)}
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type.lower()}{index}"
    return model


@functools.cache
def graph_of(sample: str | None, level: str = "icf", local_bn: int | None = None) -> TrainingGraph:
    source = open_graph(build_training_graph(network()))
    return open_graph(rewrite(source.model, level=level, sample=sample, local_bn=local_bn))


@functools.cache
def compiled(sample: str | None, level: str = "icf", local_bn: int | None = None) -> Step:
    return compile_step(graph_of(sample, level, local_bn), threads=2)


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    return rng.standard_normal((4, 3, 8, 8)).astype(np.float32), rng.integers(0, 5, 4)


def placed(step: Step) -> dict[str, np.ndarray]:
    """What lies in the memory of the inputs that the step draws."""
    names = (*step.sampling.places, *step.sampling.virtual)
    return {name: step._train.memory.read(step.program.inputs[name]) for name in names}


def kernels(program: p.Program) -> list[str]:
    return [program.kernels[launch.kernel].rpartition("_")[0] for launch in program.launches]


# -- numbers -------------------------------------------------------------------------------------------------------

CASES = [
    *((sample, level, None) for sample in SAMPLERS for level in ("none", "bnff", "icf")),
    ("vdn:1", "icf", None),
    ("fs:1/4+vdn:1@0.25", "icf", None),
    ("l1bn", "icf", None),
    ("rbn", "icf", None),
    (None, "none", 2),
    ("bn+vdn:1@0.3", "icf", 2),
]


@pytest.mark.torch
@pytest.mark.parametrize(("sample", "level", "local_bn"), CASES)
def test_errors_against_float64_are_no_worse_than_torchs_own(oracle, sample, level, local_bn):
    graph, step = graph_of(sample, level, local_bn), compiled(sample, level, local_bn)
    feeds, state = draw_feeds(graph, np.random.default_rng(2)), graph.state()
    model = ir.to_proto(graph.model)
    exact, torch32 = (oracle.evaluate(model, {**feeds, **state}, dtype) for dtype in ("float64", "float32"))
    step.fix({name: feeds[name] for name in (*graph.signature.offsets, *graph.signature.virtual)})
    try:
        loss = step.forward(*(feeds[name] for name in step.inputs))
        step.backward()
    finally:
        step.fix(None)
    found = step.outputs
    assert loss == pytest.approx(float(exact[graph.signature.loss]), rel=1e-5)
    floor = FLOOR * max(np.linalg.norm(exact[key]) for key in graph.signature.gradients.values())
    for name in (*graph.signature.gradients.values(), *graph.signature.running.values(), graph.signature.logits):
        error, own = distance(found[name], exact[name], floor), distance(torch32[name], exact[name], floor)
        assert error <= 2 * own + 2e-6, name


# -- structure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["none", "bnff", "icf"])
@pytest.mark.parametrize("sample", SAMPLERS)
def test_nothing_sweeps_a_map_for_statistics(sample, level):
    step = compiled(sample, level)
    names = kernels(step.program)
    assert not [
        name for name in names if name.startswith(FULL) or "PointwiseStatistics" in name or "ConvStatistics" in name
    ]
    assert names.count("PointStatistics" if sample.startswith("frs") else "SampledStatistics") == 3
    assert "CopyMap" not in names  # sums are added where the gradients lie
    for launch in step.program.launches:
        work = step.program.works[launch.kernel]
        if work.op in ("SampledStatistics", "PointStatistics"):
            whole = 4 * np.prod([int(size) for size in work.shape.split("x")])
            assert work.bytes < 0.6 * whole


def test_a_sampled_step_launches_less_work_than_a_full_one():
    full, sampled = (compiled(sample, "none").program for sample in (None, "fs:1/4"))

    def moved(program: p.Program) -> int:
        return sum(program.works[launch.kernel].bytes for launch in program.launches)

    assert moved(sampled) < moved(full)


# -- what is drawn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["bs:2", "fs:1/4", "frs:1/4"])
def test_places_change_with_the_epoch_and_not_with_the_step(sample, batch):
    step = compiled(sample)
    assert step.inputs == ("image", "labels")
    count = step.report.kernels
    step.epoch = 0
    losses, places = [], []
    for epoch in (0, 0, 1, 2, 0):
        step.epoch = epoch
        losses.append(step(*batch))
        places.append(placed(step))
    assert losses[0] == losses[1] == losses[4]  # without an optimiser only running statistics move
    assert len({losses[i] for i in (0, 2, 3)}) == 3 or sample == "bs:2"  # there are three places for two of four
    for name, value in sampling_of(step.program).offsets(seed=0, epoch=2).items():
        np.testing.assert_array_equal(places[3][name], value)
    assert any(not np.array_equal(places[0][name], places[2][name]) for name in places[0])
    assert step.report.kernels == count
    step.epoch = 0


def test_the_seed_moves_the_samples(batch):
    step = compiled("fs:1/4")
    step(*batch)
    before = placed(step)
    step.seed = 1
    step(*batch)
    assert any(not np.array_equal(value, before[name]) for name, value in placed(step).items())
    step.seed = 0


def test_a_fixed_sample_is_no_input_and_is_not_drawn(batch):
    step = compiled("ns:2")
    assert not step.sampling.places
    assert not step.program.signature["offsets"]
    step(*batch)


def test_virtual_samples_change_with_the_step_and_follow_the_data(batch):
    step = compiled("vdn:1")
    steps = step.steps
    first = step.forward(*batch)
    assert step.forward(*batch) == first  # nothing was updated: the step is the same one
    np.testing.assert_array_equal(
        placed(step)["virtual"], virtual_samples((1, 3, 8, 8), [0.0], [1.0], seed=0, step=steps)
    )
    step.virtual_statistics = ([5.0, 6.0, 7.0], 0.5)
    assert step.forward(*batch) != first
    wanted = virtual_samples((1, 3, 8, 8), [5.0, 6.0, 7.0], [0.5], seed=0, step=steps)
    np.testing.assert_array_equal(placed(step)["virtual"], wanted)
    step.virtual_statistics = (0.0, 1.0)
    losses = [step(*batch) for _ in range(3)]
    assert losses[0] == first
    assert len(set(losses)) == 3


def test_given_values_replace_draws_until_they_are_taken_back(batch):
    step = compiled("fs:1/4+vdn:1@0.25")
    loss = step.forward(*batch)
    before = placed(step)
    name = next(iter(step.sampling.places))
    corner = np.array(step.sampling.places[name].high)
    noise = np.full((1, 3, 8, 8), 0.25, np.float32)
    step.fix({name: corner, "virtual": noise})
    assert step.forward(*batch) != loss
    after = placed(step)
    np.testing.assert_array_equal(after[name], corner)
    np.testing.assert_array_equal(after["virtual"], noise)
    step.epoch = 7
    step.forward(*batch)
    np.testing.assert_array_equal(placed(step)[name], corner)
    step.epoch = 0
    step.fix(None)
    assert step.forward(*batch) == loss
    for key, value in placed(step).items():
        np.testing.assert_array_equal(value, before[key])


def test_a_batch_that_is_refused_leaves_the_draws_to_the_next(batch):
    step = compiled("fs:1/4")
    step.epoch = 3
    with pytest.raises(BnfuseError, match="has the shape"):
        step(batch[0][:2], batch[1])
    step(*batch)
    for name, value in step.sampling.offsets(seed=0, epoch=3).items():
        np.testing.assert_array_equal(placed(step)[name], value)
    step.epoch = 0


def test_what_cannot_be_drawn_is_refused():
    step = compiled("fs:1/4+vdn:1@0.25")
    name = next(iter(step.sampling.places))
    bad = {name: np.array([1, 6, 0])}
    for values, message in [
        (bad, "must lie within"),
        ({name: np.array([1.0, 0.0, 0.0])}, "is float64: where a sample lies is int64"),
        ({name: np.array([1, 0])}, "must lie within"),
        ({"virtual": np.zeros((2, 3, 8, 8), np.float32)}, "has the shape"),
        ({"image": np.zeros(3)}, "none that the step draws"),
    ]:
        with pytest.raises(BnfuseError, match=message):
            step.fix(values)
    with pytest.raises(BnfuseError, match="have 3 channels"):
        step.virtual_statistics = ([1.0, 2.0], 1.0)
    with pytest.raises(BnfuseError, match="no deviation below 0"):
        step.virtual_statistics = (0.0, -1.0)
    with pytest.raises(BnfuseError, match="are a pair"):
        step.virtual_statistics = 3  # type: ignore[assignment]


@pytest.mark.parametrize(("what", "value"), [("epoch", -1), ("epoch", 1.5), ("seed", -3)])
def test_draws_follow_from_natural_numbers(what, value):
    step = compile_step(graph_of("fs:1/4+vdn:1@0.25"), threads=2)  # not the one that other tests share
    with pytest.raises(BnfuseError, match=f"^{what}={value} is out of range: it must be an integer from 0"):
        setattr(step, what, value)


# -- evaluation and artifacts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sample", "local_bn"), [("frs:1/4", None), ("fs:1/4+vdn:1@0.25", None), ("vdn:1", 2)])
def test_evaluation_draws_nothing_and_agrees_with_the_plain_network(sample, local_bn, batch):
    step, plain = compiled(sample, "icf", local_bn), compiled(None, "none")
    evaluation = step.compiled[1].program
    assert [name for name in evaluation.inputs if name not in ("image", "labels")] == []
    assert not [k for k in kernels(evaluation) if "Sampled" in k or "Points" in k or "PointStatistics" in k]
    rng = np.random.default_rng(4)
    state = {k: rng.uniform(0.5, 2, v.shape) if k in step.program.running else v for k, v in step.state_dict().items()}
    logits = []
    for each in (step, plain):
        before = each.state_dict()
        each.load_state_dict({k: v.astype(np.float32) for k, v in state.items()})
        logits.append(each.evaluate(batch[0]))
        each.load_state_dict(before)
    assert logits[0].shape == (4, 5)
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_a_file_draws_what_the_step_drew(tmp_path, batch):
    graph = graph_of("fs:1/4+vdn:1@0.25")
    step = compile_step(graph, threads=2, optimizer=SGD(0.1))
    step.export(tmp_path / "step.bnf")
    loaded = load_step(tmp_path / "step.bnf")
    assert loaded.sampling == step.sampling
    assert loaded.inputs == ("image", "labels")
    for epoch in (0, 1):
        step.epoch = loaded.epoch = epoch
        assert step(*batch) == loaded(*batch)


def test_a_file_of_an_earlier_version_draws_nothing():
    program = compiled(None, "none").program
    text = p.to_json(program).replace(', "sampling": ' + p.json.dumps(program.sampling), "")
    assert '"sampling"' not in text
    assert not sampling_of(p.from_json(text, {})).places
