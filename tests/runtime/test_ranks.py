"""A step as one of several ranks, which are threads here: the same numbers as one rank at the whole batch, or the means
of the ranks where statistics are each rank's own."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np
import onnx
import onnx.helper as h
import onnx_ir as ir
import pytest
from small_training import BATCH, CLASSES, normalised_graph, small_graph
from thread_ranks import ThreadWorld, together
from two_layers import graph_of

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.parallel.ranks import Ranks
from bnfuse.runtime import SGD, AdamW, Step, compile_step, load_step
from bnfuse.runtime.backends.draws import Draws
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.targets.target import CpuTarget
from bnfuse.runtime.together import Shared, agree_on_virtual

STEPS, WHOLE = 20, 8
SMALL_BUCKET = 1000  # bytes


@functools.cache
def normalised() -> onnx.ModelProto:
    """Two convolutions with BatchNorms."""
    return normalised_graph()


@functools.cache
def plain(rows: int = 4) -> onnx.ModelProto:
    """A convolution and a classifier: what a sample gives does not depend on the others."""
    rng = np.random.default_rng(0)
    shapes = {"conv/weight": (6, 1, 3, 3), "conv/bias": (6,), "head/weight": (CLASSES, 96), "head/bias": (CLASSES,)}
    weights = [onnx.numpy_helper.from_array(rng.normal(0, 0.3, s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        h.make_node("Conv", ["x", "conv/weight", "conv/bias"], ["a"], "conv", pads=[1, 1, 1, 1], strides=[2, 2]),
        h.make_node("Relu", ["a"], ["r"], "relu"),
        h.make_node("Flatten", ["r"], ["f"], "flatten"),
        h.make_node("Gemm", ["f", "head/weight", "head/bias"], ["logits"], "head", transB=1),
    ]
    x, y = (h.make_tensor_value_info(n, 1, s) for n, s in (("x", [rows, 1, 8, 8]), ("logits", [rows, CLASSES])))
    model = h.make_model(h.make_graph(nodes, "plain", [x], [y], weights), opset_imports=[h.make_opsetid("", 17)])
    model.ir_version = 8
    return ir.to_proto(bnfuse.rewrite(build_training_graph(model), level="icf").model)


def batch(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 1, 8, 8)).astype(np.float32), rng.integers(0, CLASSES, rows)


def part(of: tuple[np.ndarray, ...], world: ThreadWorld) -> list[np.ndarray]:
    """What a rank is given of a whole batch."""
    return [np.array_split(array, world.size)[world.rank] for array in of]


def close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        apart = np.linalg.norm(found[name].astype(np.float64) - value)
        assert apart <= tolerance * max(np.linalg.norm(value), 1e-2), name


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_gradients_loss_and_statistics_are_the_means_of_the_ranks(oracle) -> None:
    model, size = normalised(), 3
    whole = batch(0, size * BATCH)

    def work(world: ThreadWorld) -> tuple[Any, ...]:
        step = compile_step(model, threads=1, world=world, bucket=SMALL_BUCKET, evaluates=False)
        loss = step.forward(*part(whole, world))
        step.backward()
        found = step.gradients()
        step.update()
        return (
            loss,
            found,
            step.state_dict(),
            step.outputs[step.program.signature["loss"]].item(),
            step.program.signature,
        )

    found = together(size, work)
    own = []
    for rank in range(size):
        x, y = (np.array_split(array, size)[rank] for array in whole)
        own.append(oracle.evaluate(model, dict(zip(input_names(model), (x, y), strict=True))))
    mean = {name: np.mean([one[name] for one in own], axis=0) for name in own[0]}
    for rank, (loss, gradients, state, own_loss, signature) in enumerate(found):
        assert loss == pytest.approx(float(mean["loss"]), rel=1e-6)
        assert own_loss == pytest.approx(float(own[rank]["loss"]), rel=1e-6), "an output of the file is the rank's own"
        close(gradients, {name: mean[output] for name, output in signature["gradients"].items()}, 2e-6)
        running = {name: mean[output] for name, output in signature["running"].items()}
        close({name: state[name] for name in running}, running, 1e-6)


def input_names(model: onnx.ModelProto) -> list[str]:
    held = {tensor.name for tensor in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in held]


@pytest.mark.parametrize(
    ("size", "optimizer"),
    [
        (2, SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)),
        (4, AdamW(lr=0.01, clip_norm=0.5, ema=0.9)),
        (4, SGD(lr=0.1, momentum=0.9, accumulate=2, clip_norm=1.0)),
    ],
    ids=["sgd", "adamw, clipped and averaged", "accumulated"],
)
def test_twenty_steps_are_those_of_one_rank_at_the_whole_batch(size: int, optimizer: Optimizer) -> None:
    rows = WHOLE
    model = plain(rows // size)
    one = compile_step(model, threads=1, optimizer=optimizer, batches=(rows,))
    losses = [one(*batch(seed, rows)) for seed in range(STEPS)]

    def work(world: ThreadWorld) -> tuple[Any, ...]:
        step = compile_step(model, threads=1, optimizer=optimizer, world=world, bucket=SMALL_BUCKET)
        found = [step(*part(batch(seed, rows), world)) for seed in range(STEPS)]
        step.same_everywhere()
        norm = step.gradient_norm if optimizer.clip_norm else 0.0
        return found, step.state_dict(), step.state_dict(ema=optimizer.ema is not None), norm

    for found, state, averaged, norm in together(size, work):
        np.testing.assert_allclose(found, losses, rtol=2e-6)
        close(state, one.state_dict(), 5e-6)
        close(averaged, one.state_dict(ema=optimizer.ema is not None), 5e-6)
        assert not norm or norm == pytest.approx(one.gradient_norm, rel=2e-6)


def test_what_is_left_over_of_accumulated_gradients_is_their_mean_and_no_file_holds_a_part(tmp_path) -> None:
    optimizer = SGD(lr=0.1, accumulate=3)
    one = compile_step(plain(), threads=1, optimizer=optimizer, batches=(8,))
    for seed in range(2):
        one(*batch(seed, 8))
    one.flush()

    def work(world: ThreadWorld) -> dict[str, np.ndarray]:
        step = compile_step(plain(), threads=1, optimizer=optimizer, world=world)
        for seed in range(2):
            step(*part(batch(seed, 8), world))
        with pytest.raises(BnfuseError, match="added up on each rank, which a file does not hold: call flush"):
            step.save(tmp_path / "no.safetensors")
        step.flush()
        step.save(tmp_path / f"{world.rank}.safetensors")
        return step.state_dict()

    for state in together(2, work):
        close(state, one.state_dict(), 1e-6)


# -- state that is the same everywhere --------------------------------------------------------------------------------


def test_the_first_rank_says_what_all_begin_with() -> None:
    def work(world: ThreadWorld) -> tuple[Step, dict[str, np.ndarray]]:
        model = onnx.ModelProto.FromString(plain().SerializeToString())
        for tensor in model.graph.initializer:
            if tensor.name == "conv/weight":
                other = onnx.numpy_helper.to_array(tensor) + world.rank
                tensor.CopyFrom(onnx.numpy_helper.from_array(other, tensor.name))
        step = compile_step(model, threads=1, optimizer=SGD(lr=0.1, momentum=0.9), world=world)
        begun = step.state_dict()
        step(*batch(world.rank, 4))
        if world.rank:
            step.steps = 7
        step.share_state()
        return step.steps, begun

    wanted = compile_step(plain(), threads=1).state_dict()
    for steps, begun in together(2, work):
        close(begun, wanted, 0)
        assert steps == 1


def test_ranks_that_went_astray_are_named() -> None:
    def work(world: ThreadWorld) -> str:
        step = compile_step(plain(), threads=1, optimizer=SGD(lr=0.1, momentum=0.9), world=world)
        step(*batch(world.rank, 4))
        step.same_everywhere()
        if world.rank == 1:
            state = step.state_dict()
            state["head/bias"][3] = np.nextafter(state["head/bias"][3], np.float32(1))
            step.load_state_dict(state)
        with pytest.raises(BnfuseError) as error:
            step.same_everywhere()
        return str(error.value)

    message = "rank 1 has gone astray: the state differs in 1 of 9 tensors (head/bias): go on from the last checkpoint"
    assert together(3, work) == [message] * 3
    assert together(2, work) == [message.replace("rank 1 has", "ranks 0, 1 have")] * 2


def test_ranks_with_another_step_or_another_batch_are_refused() -> None:
    def other_step(world: ThreadWorld) -> Step:
        return compile_step(plain(), threads=1, optimizer=SGD(lr=0.1 * (1 + world.rank)), world=world)

    with pytest.raises(BnfuseError, match="rank 1 has another step than rank 0"):
        together(2, other_step)

    def other_batch(world: ThreadWorld) -> float:
        step = compile_step(plain(), threads=1, world=world, batches=(4, 8))
        step(*batch(0, 4))
        return step(*batch(0, 4 + 4 * world.rank))  # for rank 0 as many as before

    with pytest.raises(BnfuseError, match=r"batches of \[4, 8\] samples: give all of them as many"):
        together(2, other_batch)


def test_an_error_of_the_rank_that_compiles_is_that_of_all() -> None:
    def work(world: ThreadWorld) -> str:
        optimizer = SGD(lr=0.1, no_decay=() if world.rank else ("nothing*",))
        with pytest.raises(BnfuseError, match="no parameter is named like 'nothing") as error:
            compile_step(plain(), threads=1, optimizer=optimizer, world=world)
        return str(error.value)

    first, second = together(2, work)
    assert first == second


def test_a_file_is_for_as_many_ranks_as_it_was_compiled_for(tmp_path) -> None:
    path = tmp_path / "step.bnf"

    def export(world: ThreadWorld) -> float:
        step = compile_step(plain(), threads=1, optimizer=SGD(lr=0.1), world=world)
        if world.rank == 0:
            step.export(path)
        return step(*batch(world.rank, 4))

    losses = together(2, export)
    assert together(2, lambda world: load_step(path, world=world)(*batch(world.rank, 4))) == losses
    with pytest.raises(BnfuseError, match=r"compiled for 2 ranks, and this is one process alone: start so many"):
        load_step(path)
    with pytest.raises(BnfuseError, match=r"compiled for 2 ranks, and there are 3"):
        together(3, lambda world: load_step(path, world=world))
    compile_step(plain(), threads=1).export(path)
    with pytest.raises(BnfuseError, match=r"for one process alone, and there are 2 ranks: give them the graph itself"):
        together(2, lambda world: load_step(path, world=world))


# -- what is drawn --------------------------------------------------------------------------------------------------


def test_each_rank_draws_for_its_own_samples_and_the_first_as_one_process_does() -> None:
    x, y = batch(0, BATCH)

    def logits(step: Step) -> np.ndarray:
        step.forward(x, y)
        return step.outputs["logits"]

    ranks = together(3, lambda world: logits(compile_step(small_graph(None), threads=1, world=world)))
    assert np.array_equal(ranks[0], logits(compile_step(small_graph(None), threads=1)))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(ranks[a], ranks[b])


def test_virtual_samples_and_places_are_the_same_on_each_rank() -> None:
    """So statistics of virtual samples are of all ranks without an exchange."""
    program = lowered(small_graph(), SMALL_BUCKET)
    one, first, second = (Draws(program, *rank).changed(seed=0, epoch=0, step=0) for rank in ((), (0,), (1,)))
    sampling = Draws(program).sampling
    assert sampling.places and sampling.virtual
    for name, value in one.items():
        assert np.array_equal(value, first[name])
        assert np.array_equal(value, second[name]), name


def test_ranks_that_would_draw_other_virtual_samples_are_refused() -> None:
    draws = Draws(lowered(small_graph(), SMALL_BUCKET))

    def agree(world: ThreadWorld, seed: int) -> Shared:
        step = types.SimpleNamespace(world=world, seed=seed, _shared=Shared())
        agree_on_virtual(step, draws)
        return step._shared

    assert [shared.virtual for shared in together(2, lambda world: agree(world, 7))] == [True, True]
    with pytest.raises(BnfuseError, match=r"rank 1 has another seed or virtual_statistics than rank 0, and would draw"):
        together(2, lambda world: agree(world, world.rank))


# -- the program ----------------------------------------------------------------------------------------------------


def lowered(model: onnx.ModelProto, bucket: int, optimizer: Optimizer | None = None) -> p.Program:
    ranks = Ranks(4, bucket)
    return lower_graph(open_graph(model), CpuTarget("x86-64", 4, 1), optimizer, evaluates=False, ranks=ranks)[0].program


@pytest.mark.parametrize("bucket", [1, SMALL_BUCKET, 1 << 30])
def test_each_gradient_is_in_one_bucket_that_begins_as_soon_as_it_is_whole(bucket: int) -> None:
    program = lowered(normalised(), bucket)
    backward = program.phase("backward")
    seen: dict[str, int] = {}
    sizes = []
    for index, launch in enumerate(backward):
        if not launch.exchanges:
            continue
        held = [program.storages[buffer.storage] for buffer in launch.buffers]
        sizes.append(sum(s.bytes for s in held))
        assert len(held) == 1, "a bucket is one range"
        inside = [name for name in program.gradients if within(gradient(program, name), held[0])]
        assert inside and not seen.keys() & inside
        seen |= dict.fromkeys(inside, index)
        wrote = max(
            i for i, other in enumerate(backward[:index]) if not other.exchanges and touches(program, other, held)
        )
        assert wrote == index - 1 or all(other.exchanges for other in backward[wrote + 1 : index])
        assert not any(touches(program, other, held) for other in backward[index + 1 :])
    assert seen.keys() == program.gradients.keys()
    assert all(size >= bucket for size in sizes[:-1])
    assert len(sizes) == (1 if bucket > SMALL_BUCKET else len(sizes)) and (bucket > 1 or len(sizes) > 4)


def gradient(program: p.Program, name: str) -> p.Storage:
    return program.storages[program.gradients[name].storage]


def within(inner: p.Storage, outer: p.Storage) -> bool:
    same = inner.region == outer.region
    return same and outer.offset <= inner.offset and inner.offset + inner.bytes <= outer.offset + outer.bytes


def touches(program: p.Program, launch: p.Launch, held: list[p.Storage]) -> bool:
    own = [program.storages[buffer.storage] for buffer in launch.buffers]
    return any(
        a.region == b.region and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes
        for a in own
        for b in held
    )


def test_sums_of_several_steps_are_exchanged_at_the_update_alone() -> None:
    program = lowered(normalised(), SMALL_BUCKET, SGD(lr=0.1, accumulate=2))
    exchanged = [(launch.phase, launch.kernel) for launch in program.launches if launch.exchanges]
    assert exchanged == [("forward", p.SUM)] + [("update", p.SUM)] * (len(exchanged) - 1)
    held = [program.storages[b.storage] for x in program.phase("update") if x.exchanges for b in x.buffers]
    assert sum(s.bytes for s in held) == program.regions[p.ACCUMULATED]
    assert [s.offset for s in held] == [sum(s.bytes for s in held[:index]) for index in range(len(held))]
    first = next(index for index, launch in enumerate(program.phase("update")) if not launch.exchanges)
    assert first == len(held)


def test_one_rank_exchanges_nothing() -> None:
    with pytest.raises(BnfuseError, match="wire 'fp8' is unknown"):
        compile_step(normalised(), threads=1, wire="fp8")
    program = lower_graph(open_graph(normalised()), CpuTarget("x86-64", 4, 1), None, ranks=Ranks(1))[0].program
    assert not any(launch.exchanges for launch in program.launches)
    assert (program.ranks, program.mean_loss) == (1, None)


def test_a_program_of_ranks_is_written_and_read() -> None:
    program = lowered(normalised(), SMALL_BUCKET, SGD(lr=0.1))
    again = p.from_json(p.to_json(program), program.initial)
    assert (again.ranks, again.mean_loss, again.launches) == (4, program.mean_loss, program.launches)
    assert again.mean_loss is not None and any(launch.exchanges for launch in again.launches)
    damaged = p.to_json(program).replace('"ranks": 4', '"ranks": 1')
    with pytest.raises(BnfuseError, match="exchanges no such buffers"):
        p.from_json(damaged, program.initial)


def test_the_gradient_of_a_constant_is_its_mean_in_every_step() -> None:
    """A parameter whose gradient no launch writes: it is not summed again and again."""
    model = plain()
    graph = open_graph(onnx.ModelProto.FromString(model.SerializeToString()))
    name, output = "head/bias", graph.signature.gradients["head/bias"]
    value = next(v for v in graph.model.graph.outputs if v.name == output)
    place = graph.model.graph.outputs.index(value)
    tensor = ir.tensor(np.full(CLASSES, 0.5, np.float32), name="known")
    known = ir.Value(name=output, const_value=tensor, shape=value.shape, type=value.type)
    value.name = f"{output}/before"
    graph.model.graph.initializers[output] = known
    graph.model.graph.outputs[place] = known

    def work(world: ThreadWorld) -> np.ndarray:
        step = compile_step(graph, threads=1, optimizer=SGD(lr=0.1), world=world)
        for seed in range(3):
            step(*part(batch(seed, 8), world))
        assert (step.gradients()[name] == 0.5).all()
        return step.state_dict()[name]

    before = compile_step(plain(), threads=1).state_dict()[name]
    for found in together(2, work):
        np.testing.assert_allclose(found, before - 3 * 0.1 * 0.5, rtol=1e-5)


def test_a_graph_without_a_loss_is_left_to_its_framework() -> None:
    with pytest.raises(BnfuseError, match="a graph without a loss is not trained by several ranks"):
        together(2, lambda world: compile_step(graph_of("none"), threads=1, world=world))


def test_a_profile_has_the_exchanges() -> None:
    def work(world: ThreadWorld) -> list[tuple[str, str, str, int]]:
        step = compile_step(normalised(), threads=1, world=world, bucket=SMALL_BUCKET)
        lines = step.profile(*batch(world.rank, BATCH))
        return [(x.phase, x.kernel, x.work.kind, x.work.bytes) for x in lines if x.work and x.work.kind == "exchange"]

    first, second = together(2, work)
    assert first == second and first[0][:3] == ("forward", "sum", "exchange")
    assert {line[:3] for line in first[1:]} == {("backward", "sum", "exchange")}
    total = sum(line[3] for line in first[1:])
    assert total >= 4 * sum(array.size for array in compile_step(normalised(), threads=1).gradients().values())
