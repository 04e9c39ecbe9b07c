"""Gradients that nothing reads are computed as soon as they can be, and not before."""

from __future__ import annotations

import pathlib
import types

from source_files import load

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import open_graph
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.lowering.early import gradients_early
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.pieces import last_uses
from bnfuse.runtime.targets.target import CpuTarget

nets = load(pathlib.Path(__file__).parent / "test_session.py")


def moved(launches: list[tuple[str, dict[int, str]]], gradients: set[int], parts: dict[int, int]) -> list[str]:
    """Names of the launches in their new order. Each is `phase name` and its storages, with how it accesses them."""
    storages = [p.Storage(p.GRADIENTS if index in gradients else p.ARENA, 0, 16) for index in range(10)]
    made = [
        p.Launch(text.split()[0], 0, text.split()[1], tuple(p.Buffer(*pair) for pair in accesses.items()))
        for text, accesses in launches
    ]
    low = types.SimpleNamespace(
        launches=made, storages=storages, parts={part: (base, 0) for part, base in parts.items()}
    )
    gradients_early(low)
    return [launch.node for launch in low.launches]


def test_they_move_up_to_what_they_need_within_backward():
    launches = [
        ("forward f", {0: "out"}),
        ("backward loss", {0: "in", 1: "out"}),
        ("backward a", {1: "in", 2: "out"}),
        ("backward b", {2: "in", 3: "out", 9: "out"}),
        ("backward sum", {1: "in", 8: "out"}),
        ("backward known", {0: "in", 7: "out"}),
        ("update u", {8: "in", 6: "inout"}),
    ]
    assert moved(launches, {7, 8, 9}, {}) == ["f", "known", "loss", "sum", "a", "b", "u"]


def test_they_stay_behind_what_changes_their_operands_and_themselves():
    launches = [
        ("backward loss", {1: "out"}),
        ("backward adds", {1: "inout", 2: "in"}),
        ("backward part", {4: "inout"}),  # of 3
        ("backward other", {5: "out"}),
        ("backward sum", {1: "in", 8: "out"}),
        ("backward sum3", {3: "in", 9: "out"}),
        ("backward once", {5: "in", 8: "inout"}),
    ]
    assert moved(launches, {8, 9}, {4: 3}) == ["loss", "adds", "sum", "part", "sum3", "other", "once"]


def test_the_bias_of_a_classifier_is_among_the_first():
    graph = open_graph(build_training_graph(nets.residual_net(), loss="none"))
    program = lower_graph(graph, CpuTarget("x86-64", 4, 1), None)[0].program
    bias = next(name for name, tensor in program.gradients.items() if tensor.shape == (5,))
    assert last_uses(program)[bias] == 0 < len(program.phase("backward")) - 1
