"""A whole step whose convolutions multiply by AMX's tiles, emulated."""

from __future__ import annotations

import pathlib

import tiles
from halves import HALVES, TARGET
from source_files import load

from bnfuse.runtime import SGD, compile_step
from bnfuse.runtime.codegen import build
from bnfuse.runtime.targets import cpus

halves = load(pathlib.Path(__file__).with_name("test_halves_step.py"))
emulated = tiles.emulated


@tiles.NEEDS
def test_gradients_are_those_of_steps_without_tiles_within_rounding(emulated, monkeypatch):
    """Of one batch in four, as in test_halves_step.py: it rounds weights and activated pixels, which others do not.

    Where a ReLU hangs on that, it is open in one of the steps without tiles, in 16 bits and in 32, and closed in the
    other.
    """
    graph = halves.gpu.graph_of("icf")
    plain = [compile_step(graph, target=target) for target in (HALVES, TARGET)]
    monkeypatch.setattr(build, "usable_cpus", lambda: 1)  # workers would write the instructions
    monkeypatch.setattr(cpus, "AMX", ())  # which this processor need not have
    by_tiles = compile_step(graph, target=tiles.TARGET, optimizer=SGD(0.02), cache=False)
    batches = [halves.nets.batch(i) for i in range(4)]
    errors = [max(halves.gpu.gradient_errors(by_tiles, one, batch).values()) for one in plain for batch in batches]
    assert 1e-4 < min(errors) < halves.TOLERANCE, errors
