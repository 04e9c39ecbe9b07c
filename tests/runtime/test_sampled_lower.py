"""Lowering of sampled, local and baseline statistics: numbers, places in memory, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.sampling import NOTHING, Box, Points, Sampling
from bnfuse.graph.signature import GraphSignature
from bnfuse.opset import reference
from bnfuse.opset.plain import BASELINE_OPS, LOCAL_OPS, PLAIN_OPS, SAMPLING_OPS
from bnfuse.opset.spec import attribute_type
from bnfuse.runtime.backends.cpu.runner import CpuRunner
from bnfuse.runtime.backends.draws import sampling_of
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.program.program import ARENA, Program

TARGET = resolve("cpu", 2)
SHAPE = (6, 21, 5, 4)
MAPS = ("x", "dz", "acc")
PLACES = {"offset": np.array([1, 2, 0]), "points": np.array([0, 17, 18, 63, 119])}


def lowered(
    inputs: dict[str, np.ndarray],
    nodes: list[onnx.NodeProto],
    outputs: dict[str, tuple[int, ...]],
    sampling: Sampling = NOTHING,
    constants: dict[str, np.ndarray] | None = None,
    offsets: tuple[str, ...] = ("offset", "points"),
) -> Lowered:
    """The program of a graph all of whose inputs are data, but for where samples lie."""
    kinds = {np.dtype("float32"): onnx.TensorProto.FLOAT, np.dtype("int64"): onnx.TensorProto.INT64}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(n, kinds[v.dtype], v.shape) for n, v in inputs.items()],
        [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape) for n, shape in outputs.items()],
        [onnx.numpy_helper.from_array(v, n) for n, v in (constants or {}).items()],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.bnfuse", 1)]
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets))
    drawn = tuple(name for name in inputs if name in offsets)
    data = tuple(name for name in inputs if name not in drawn)
    signature = GraphSignature(data, (), (), (), running={}, gradients={}, loss="", offsets=drawn)
    return lower(model.graph, signature, TARGET, opset=17, sampling=sampling)


def run(made: Lowered, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    runner = CpuRunner(Compiled(made.program, objects(made.requests, Cache(default_folder()))), TARGET)
    runner.memory.regions[ARENA][:] = 0xFF  # NaNs: nothing may be read that was not written
    runner.feed(list(feeds), list(feeds.values()))
    runner.run([runner.program.whole("forward")], {"forward": {}})
    return {name: runner.memory.array(tensor).copy() for name, tensor in made.program.outputs.items()}


def node(op: str, inputs: list[str], outputs: list[str], **attributes: object) -> onnx.NodeProto:
    domain = "ai.bnfuse" if op in PLAIN_OPS or op == "PointwiseGradScale" else ""
    return onnx.helper.make_node(op, inputs, outputs, name=f"{op}_{outputs[0]}", domain=domain, **attributes)


def kernels(program: Program) -> list[str]:
    return [program.kernels[launch.kernel].partition("_")[0] for launch in program.launches]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


ATTRIBUTES = {
    "extent": (2, 3, 3),
    "weight": 0.3,
    "count": 18,
    "first": 1,
    "rows": 2,
    "samples": 3,
    "epsilon": 1e-5,
    "momentum": 0.9,
}
GROUPED = ("MixStatistics", "SampledGradFinalize", "BatchNormGradTerms")  # of a group or of the batch
CASES = [
    *((op.name, False, channels) for op in (*SAMPLING_OPS, *LOCAL_OPS, *BASELINE_OPS) for channels in (21, 16)),
    *((name, True, channels) for name in GROUPED for channels in (21, 16)),
]


def operands_of(name: str, grouped: bool, channels: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    found: dict[str, np.ndarray] = {}
    shape = (SHAPE[0], channels, *SHAPE[2:])
    for operand in PLAIN_OPS[name].operands:
        is_local = name.startswith("Local") and not operand.startswith(("running", "scale", "bias"))
        if operand in MAPS:
            found[operand] = numbers(*shape, seed=len(found))
        elif operand in PLACES:
            found[operand] = PLACES[operand].astype(np.int64)
        else:
            sizes = (2, channels) if is_local or grouped else (channels,)
            found[operand] = rng.uniform(0.5, 2, sizes).astype(np.float32)
    if name == "RangeGradInput":
        found["low"], found["high"] = (f(found["x"], (0, 2, 3)) for f in (np.amin, np.amax))
    return found


@pytest.mark.parametrize(("name", "grouped", "channels"), CASES)
def test_every_operator_computes_what_the_reference_says(name, grouped, channels):
    op, operands = PLAIN_OPS[name], operands_of(name, grouped, channels)
    attributes = {key: ATTRIBUTES[key] for key in op.attributes}
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in operands.items()}
    wanted = reference.run(op, wide, attributes)
    made = lowered(
        operands,
        [node(name, list(op.operands), list(op.results), **attributes)],
        {result: value.shape for result, value in wanted.items()},
    )
    found = run(made, operands)
    for result, value in wanted.items():
        error = np.abs(found[result] - value).max()
        assert error <= 2e-6 * np.abs(value).max(), (result, error)


def test_attributes_have_the_types_of_the_grammar():
    for name, value in ATTRIBUTES.items():
        kind = "INTS" if isinstance(value, tuple) else "FLOAT" if isinstance(value, float) else "INT"
        assert attribute_type(name) == kind


# -- in place ------------------------------------------------------------------------------------------------------


def chain(reads_again: bool) -> tuple[dict[str, np.ndarray], list[onnx.NodeProto]]:
    """s = p*dz, then two boxes are added to it; the sum is read, and s perhaps too."""
    feeds = {"dz": numbers(*SHAPE), "x": numbers(*SHAPE, seed=1), "offset": PLACES["offset"].astype(np.int64)}
    feeds |= {name: numbers(SHAPE[1], seed=2 + i) for i, name in enumerate("pqw")}
    nodes = [
        node("PointwiseGradScale", ["dz", "p"], ["s"]),
        node("AddSampled", ["s", "x", "q", "w", "offset"], ["t"], extent=(2, 3, 3)),
        node("AddSampled", ["t", "x", "q", "w", "origin"], ["u"], extent=(1, 5, 4)),
        node("Relu", ["u"], ["y"]),
    ]
    if reads_again:
        nodes.append(node("Relu", ["s"], ["z"]))
    return feeds, nodes


@pytest.mark.parametrize("reads_again", [False, True])
def test_what_nobody_else_reads_is_added_to_where_it_lies(reads_again):
    feeds, nodes = chain(reads_again)
    outputs = {"y": SHAPE, **({"z": SHAPE} if reads_again else {})}
    made = lowered(feeds, nodes, outputs, constants={"origin": np.zeros(3, np.int64)})
    steps = [k for k in kernels(made.program) if k not in ("NchwToNhwc", "NhwcToNchw")]
    copied = ["CopyMap"] if reads_again else []
    assert steps == [
        "PointwiseGradScale",
        *copied,
        "AddSampled",
        "AddSampled",
        "ReluPointwise",
        *(["ReluPointwise"] * reads_again),
    ]
    scaled = feeds["p"].reshape(1, -1, 1, 1) * feeds["dz"]
    total = scaled.copy()
    for where in ((slice(1, 3), slice(None), slice(2, 5), slice(0, 3)), (slice(0, 1),)):
        total[where] += (feeds["q"].reshape(1, -1, 1, 1) * feeds["x"] + feeds["w"].reshape(1, -1, 1, 1))[where]
    found = run(made, feeds)
    np.testing.assert_allclose(found["y"], np.maximum(total, 0), rtol=1e-5, atol=1e-6)
    if reads_again:
        np.testing.assert_array_equal(found["z"], np.maximum(scaled, 0))


def test_a_slot_of_a_concatenation_is_sampled_and_normalised_where_it_lies():
    feeds = {"x": numbers(4, 8, 3, 3), "z": numbers(4, 5, 3, 3, seed=1), "a": numbers(2, 5), "b": numbers(2, 5, seed=2)}
    nodes = [
        node("LocalNormalize", ["z", "a", "b"], ["y"], samples=2),
        node("Relu", ["x"], ["r"]),
        node("Concat", ["r", "y"], ["all"], axis=1),
        node("LocalStatistics", ["all"], ["mean", "variance"], first=0, rows=2, samples=2),
        node("SampledStatistics", ["y", "offset"], ["m", "v"], extent=(2, 2, 3)),
    ]
    feeds["offset"] = np.array([2, 1, 0])
    shapes = {"mean": (2, 13), "variance": (2, 13), "m": (5,), "v": (5,)}
    model = lowered(feeds, nodes, shapes)
    assert (
        kernels(model.program).count("NormalizePointwise") == kernels(model.program).count("BatchNormStatistics") == 2
    )
    assert kernels(model.program).count("CopyMap") == 2  # a and b alone, whose rows have to begin on cache lines
    found = run(model, feeds)
    grouped = feeds["z"].reshape(2, 2, 5, 3, 3).astype(np.float64)
    y = grouped * feeds["a"].reshape(2, 1, 5, 1, 1) + feeds["b"].reshape(2, 1, 5, 1, 1)
    whole = np.concatenate([np.maximum(feeds["x"], 0).reshape(2, 2, 8, 3, 3), y], 2)
    np.testing.assert_allclose(found["mean"], whole.mean((1, 3, 4)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["variance"], whole.var((1, 3, 4)), rtol=1e-5)
    box = y.reshape(4, 5, 3, 3)[2:4, :, 1:3]
    np.testing.assert_allclose(found["m"], box.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["v"], box.var((0, 2, 3)), rtol=1e-5)


# -- the batch -----------------------------------------------------------------------------------------------------


def test_virtual_samples_before_the_batch_are_turned_with_it():
    feeds = {"virtual": numbers(1, 3, 4, 4), "data": numbers(4, 3, 4, 4, seed=1)}
    nodes = [node("Concat", ["virtual", "data"], ["all"], axis=0), node("Relu", ["all"], ["y"])]
    made = lowered(feeds, nodes, {"y": (5, 3, 4, 4)})
    assert kernels(made.program) == ["NchwToNhwc", "NchwToNhwc", "ReluPointwise", "NhwcToNchw"]
    np.testing.assert_array_equal(run(made, feeds)["y"], np.maximum(np.concatenate(list(feeds.values())), 0))


# -- where samples lie ---------------------------------------------------------------------------------------------


def of_box(**more: object) -> Lowered:
    feeds = {"x": numbers(*SHAPE), "offset": PLACES["offset"].astype(np.int64)}
    nodes = [node("SampledStatistics", ["x", "offset"], ["mean", "variance"], extent=(2, 3, 3))]
    return lowered(feeds, nodes, {"mean": (SHAPE[1],), "variance": (SHAPE[1],)}, **more)


def test_the_program_says_what_is_drawn():
    assert sampling_of(of_box().program) == Sampling({"offset": Box((0, 0, 0), (4, 2, 1))})
    narrow = Sampling({"offset": Box((1, 0, 0), (2, 2, 1))})
    assert sampling_of(of_box(sampling=narrow).program) == narrow


@pytest.mark.parametrize("place", [Box((0, 0, 0), (5, 2, 1)), Points(3, 0, 120)])
def test_metadata_that_leads_out_of_the_map_is_refused(place):
    with pytest.raises(BnfuseError, match="by its map within"):
        of_box(sampling=Sampling({"offset": place}))


def one_box(extent: tuple[int, ...], offset: list[int] | None, kind: type = np.int64) -> Lowered:
    feeds = {"x": numbers(*SHAPE)}
    constants = {"at": np.array(offset, kind)}
    nodes = [node("SampledStatistics", ["x", "at"], ["mean", "variance"], extent=extent)]
    return lowered(feeds, nodes, {"mean": (SHAPE[1],)}, constants=constants)


def test_samples_outside_of_their_maps_are_refused():
    with pytest.raises(BnfuseError, match="samples \\[7, 1, 1\\] of a map"):
        one_box((7, 1, 1), [0, 0, 0])
    with pytest.raises(BnfuseError, match="outside of its map"):
        one_box((2, 5, 4), [5, 0, 0])
    with pytest.raises(BnfuseError, match="outside of its map"):
        one_box((2, 5, 4), [-1, 0, 0])
    with pytest.raises(BnfuseError, match="groups of 4 of 6"):
        nodes = [node("LocalStatistics", ["x"], ["mean", "variance"], first=0, rows=4, samples=4)]
        lowered({"x": numbers(*SHAPE)}, nodes, {"mean": (1, SHAPE[1])})


def test_a_computed_place_is_refused():
    feeds = {"x": numbers(*SHAPE), "k": np.array([1, 0, 0], np.int64)}
    nodes = [
        node("Add", ["k", "k"], ["at"]),
        node("SampledStatistics", ["x", "at"], ["mean", "variance"], extent=(2, 3, 3)),
    ]
    with pytest.raises(BnfuseError, match="only inputs and constants"):
        lowered(feeds, nodes, {"mean": (SHAPE[1],)})


def test_a_place_that_would_be_fed_unchecked_is_refused():
    with pytest.raises(BnfuseError, match="from input 'offset', which has another role"):
        of_box(offsets=())


def test_an_input_is_never_added_to_in_place():
    feeds = {"acc": numbers(4, 8, 1, 1), "x": numbers(4, 8, 1, 1, seed=1), "q": numbers(8), "w": numbers(8, seed=2)}
    nodes = [node("AddSampled", ["acc", "x", "q", "w", "at"], ["y"], extent=(2, 1, 1))]
    made = lowered(feeds, nodes, {"y": (4, 8, 1, 1)}, constants={"at": np.array([1, 0, 0])})
    assert "CopyMap" in kernels(made.program)
