"""Exchanges between ranks in a program: what is computed around them, how many there are, and when they begin."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from source_files import load

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.batches import with_batch
from bnfuse.graph.training_graph import open_graph
from bnfuse.opset.reference_ranks import moments_of_all, terms_of_all
from bnfuse.parallel.ranks import ONE, Ranks
from bnfuse.passes import rewrite
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.kernels.cpu import coefficients
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.plan import Interval, lifetimes

TARGET = resolve("cpu", 1)
nets = load(pathlib.Path(__file__).parent / "test_session.py")


def lowered(net, level: str = "icf", ranks: Ranks = ONE, **sync) -> p.Program:
    model = rewrite(open_graph(build_training_graph(net())).model, level=level, **sync).model
    return lower_graph(open_graph(model), TARGET, None, ranks=ranks)[0].program


# -- what is per channel ---------------------------------------------------------------------------------------------


def test_moments_of_all_ranks():
    rng, function = np.random.default_rng(0), None
    for channels, counted in ((24, 3), (7, 3)):
        means = (1e3 + rng.standard_normal((3, channels))).astype(np.float32)
        variances = rng.uniform(0.5, 2, (3, channels)).astype(np.float32)
        kernel = coefficients.coefficients((("all_moments", (channels, 3, counted)),), TARGET)
        function = function or execute.compile_kernel(kernel)  # one kernel serves every number of channels
        found = execute.call(kernel, {"mean": means, "variance": variances}, function=function)
        wide = (means.astype(np.float64), variances.astype(np.float64))
        for name, value in zip(("all_mean", "all_variance"), moments_of_all(*wide, {}), strict=True):
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_a_ranks_part_of_the_terms_of_some_channels():
    rng = np.random.default_rng(1)
    terms = {name: rng.standard_normal(40).astype(np.float32) for name in ("beta_term", "gamma_term")}
    kernel = coefficients.coefficients((("all_terms", (21, 40, 4)),), TARGET)
    found = execute.call(kernel, terms, {"beta_term": 5, "gamma_term": 5})
    alike = ([value.astype(np.float64)] * 4 for value in terms.values())
    for name, value in zip(terms, terms_of_all(*alike, 0, {"start": 5, "stop": 26}), strict=True):
        np.testing.assert_allclose(4 * found[f"all_{name}"], value, rtol=1e-6, err_msg=name)


# -- programs --------------------------------------------------------------------------------------------------------


def exchanged(program: p.Program, phase: p.Phase) -> list[tuple[int, int]]:
    """Kind and number of buffers of each exchange of statistics or their gradients in a phase."""
    return [(launch.kernel, len(launch.buffers)) for launch in of_statistics(program) if launch.phase == phase]


def of_statistics(program: p.Program) -> list[p.Launch]:
    """The exchanges within the network: losses, running statistics and gradients lie elsewhere."""
    return [
        launch
        for launch in program.launches
        if launch.exchanges and all(program.storages[b.storage].region == p.ARENA for b in launch.buffers)
    ]


def test_what_is_ready_together_goes_in_one_message():
    """The BatchNorms of a shortcut and of the path beside it, forward and backward; those before it by themselves."""
    program = lowered(nets.residual_net, ranks=Ranks(2), sync=True)
    p.check(program)
    assert exchanged(program, "forward") == [(p.GATHER, 4), (p.GATHER, 4), (p.GATHER, 8)]
    assert exchanged(program, "backward") == [(p.SUM, 4), (p.SUM, 2), (p.SUM, 2)]


@pytest.mark.parametrize(("net", "level"), [("dense", "icf"), ("residual", "none"), ("residual", "bnff")])
def test_all_else_is_what_it_is_in_a_step_of_one_rank(net, level):
    level_of_one = "bnff" if level == "none" else level
    alone, program = lowered(nets.NETS[net], level_of_one), lowered(nets.NETS[net], level, Ranks(2), sync=True)
    channels = sum(s.elements for s in (program.storages[t.storage] for t in program.running.values())) // 2
    sent = [program.storages[b.storage] for x in of_statistics(program) for b in x.buffers if b.access != "out"]
    if level != "bnff" or net == "residual":  # at bnff each BatchNorm behind a concatenation has statistics of its own
        assert sum(s.elements for s in sent) <= 2 * 2 * channels
    if level != "none":
        kernels = [name for name in alone.kernels if "Finalize" not in name and "Terms" not in name]
        assert {*kernels} <= {*program.kernels}


def test_one_rank_runs_the_program_of_the_graph_without_exchanges():
    plain, synced = lowered(nets.dense_net), lowered(nets.dense_net, sync=True)
    assert p.to_json(synced) == p.to_json(plain)


def test_an_exchange_begins_right_behind_what_it_sends():
    """That of the path beside a shortcut waits for the shortcut's, and both for nothing else."""
    program = lowered(nets.residual_net, ranks=Ranks(2), sync=True)
    for index, launch in enumerate(program.launches):
        if launch.kernel != p.GATHER:
            continue
        own = {buffer.storage for buffer in launch.buffers if buffer.access == "in"}
        before = program.launches[index - 1]
        assert own & {buffer.storage for buffer in before.buffers if buffer.access != "in"}


def test_memory_of_an_exchange_is_nobody_elses_while_it_may_be_under_way():
    send = p.Launch("forward", p.GATHER, "sync", (p.Buffer(0, "in"), p.Buffer(1, "out")))
    other = p.Launch("forward", 0, "other", (p.Buffer(2, "out"),))
    read = p.Launch("forward", 0, "read", (p.Buffer(1, "in"), p.Buffer(2, "in")))
    sizes = {0: 64, 1: 128, 2: 64}
    assert lifetimes([send, other, read], sizes) == [
        Interval(0, 64, 0, 2),
        Interval(1, 128, 0, 2),
        Interval(2, 64, 1, 2),
    ]
    assert lifetimes([send, other], sizes) == [Interval(0, 64, 0, 1), Interval(1, 128, 0, 1), Interval(2, 64, 1, 1)]


@pytest.mark.parametrize("net", nets.NETS)
def test_what_is_read_was_written_before(net):
    program = lowered(nets.NETS[net], ranks=Ranks(2), sync=True)
    written: set[tuple[int, int]] = set()
    for launch in program.launches:
        for buffer in launch.buffers:  # a group's members one after the other, operands before results
            where = program.storages[buffer.storage]
            place = where.offset, where.offset + where.bytes
            if where.region == p.ARENA and buffer.access != "out":
                assert any(first < place[1] and place[0] < end for first, end in written), launch.node
            if where.region == p.ARENA and buffer.access != "in":
                written.add(place)


def test_statistics_of_more_ranks_than_there_are_is_one_line():
    with pytest.raises(BnfuseError, match=r"takes the statistics of 3 ranks, and 2 run the step: start as many, or"):
        lowered(nets.residual_net, ranks=Ranks(2), sync=True, sync_ranks=3)


def test_another_batch_is_counted_with_its_exchanges():
    model = open_graph(build_training_graph(nets.residual_net(), running_variance="torch")).model
    synced = open_graph(rewrite(model, sync=True).model)
    halves = [node for node in with_batch(synced, 3 * nets.BATCH).model.graph if node.op_type == "BatchNormFinalize"]
    before = [node for node in synced.model.graph if node.op_type == "BatchNormFinalize"]
    assert len(halves) == 4
    for old, new in zip(before, halves, strict=True):
        assert new.attributes["elements"].as_float() == 3 * old.attributes["elements"].as_float()
        assert new.attributes["of_ranks"].as_int() == 0
