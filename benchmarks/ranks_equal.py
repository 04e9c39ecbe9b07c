"""Whether several ranks train as one rank with the whole batch does, over many updates.

    mpirun -n 4 python benchmarks/ranks_equal.py resnet20 densenet40 --steps 50 --batch 4 [--sync] [--deterministic]

Statistics are each rank's own, so the one rank takes them over groups of as many samples (rewrite --local-bn); with
--sync they are those of the whole batch on either side. What both differ by is the order of float32 sums.

    each step     one rank begins each step with the state of the ranks: how far apart are the changes that it makes?
    all steps     one rank trains by itself: what rounding has grown to, beside that of a rank that began with other
                  last bits of its weights, for training lets any difference grow

Prints a line for each network, of relative differences: the largest of a loss, and that of all changes of weights and
statistics together. Ends with status 1 where steps differ by more than rounding (a ReLU that flips may let a single one
differ by more), or the whole by more than ten times the other last bits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from parallel_cases import case_of, training_model

import bnfuse
from bnfuse.parallel import World, open_world

LIMIT = 1200.0  # seconds: the others wait for the rank that also trains alone
ROUNDING = 1e-4  # of the changes of a usual step: where sums over pixels cancel, what is left is a small part of them
OPTIMIZER = bnfuse.SGD(lr=0.05, momentum=0.9, weight_decay=1e-4)
State = dict[str, np.ndarray]


class Alone:
    """One rank with the whole batch, and how far from the others' its losses and changes are."""

    def __init__(self, graph: Any) -> None:
        self.step = bnfuse.compile(graph, optimizer=OPTIMIZER, threads=1)
        self.losses: list[float] = []

    def take(self, x: np.ndarray, y: np.ndarray) -> float:
        self.losses.append(self.step(x, y))
        return self.losses[-1]


def apart(found: State, wanted: State, before: State) -> float:
    """Relative difference of all changes together."""
    change = {name: value.astype(np.float64) - before[name] for name, value in wanted.items()}
    differs = sum(float(np.sum((found[name].astype(np.float64) - wanted[name]) ** 2)) for name in wanted)
    return float(np.sqrt(differs / sum(float(np.sum(value**2)) for value in change.values())))


def compare(name: str, world: World, options: argparse.Namespace, kept: Path) -> None:
    """Train by all ranks, and on the first by one rank beside them: step by step, freely, and from other last bits."""
    model = training_model(case_of(f"{name}:{options.batch}"))
    graph = bnfuse.rewrite(model, level=options.level, **({"sync": True} if options.sync else {}))
    ours = bnfuse.compile(graph, optimizer=OPTIMIZER, threads=1, world=world)
    begun = ours.state_dict()
    alone: list[Alone] = []
    if world.rank == 0:
        whole = training_model(case_of(f"{name}:{options.batch * world.size}"))
        group = None if options.sync else options.batch
        alone = [Alone(bnfuse.rewrite(whole, level=options.level, local_bn=group)) for _ in range(3)]
        for one in alone:
            one.step.load_state_dict(begun)
        alone[2].step.load_state_dict({n: np.nextafter(v, np.float32(9)) for n, v in begun.items()})
    images, labels = (ours.program.inputs[each].shape for each in ours.inputs)
    losses, steps = [], []
    for seed in range(options.steps):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((images[0] * world.size, *images[1:])).astype(np.float32)
        y = rng.integers(0, 10, (labels[0] * world.size, *labels[1:]))
        if world.rank == 0:
            ours.save(kept)
            alone[0].step.load(kept)
        before = ours.state_dict()
        losses.append(ours(np.array_split(x, world.size)[world.rank], np.array_split(y, world.size)[world.rank]))
        for one in alone:
            one.take(x, y)
        if world.rank == 0:
            steps.append(apart(ours.state_dict(), alone[0].step.state_dict(), before))
    ours.same_everywhere()
    if world.rank:
        return
    each, free, nudged = (one.losses for one in alone)
    found = relative(losses, free), apart(ours.state_dict(), alone[1].step.state_dict(), begun)
    other = relative(nudged, free), apart(alone[2].step.state_dict(), alone[1].step.state_dict(), begun)
    how = f"{world.size} ranks of {options.batch}, {options.steps} steps{', sync' * options.sync}"
    print(
        f"{name}, {how}: each step: loss {relative(losses, each):.1e}, changes {max(steps):.1e} (median "
        f"{np.median(steps):.1e}); all: losses {found[0]:.1e}, changes {found[1]:.1e}, from other last bits "
        f"{other[0]:.1e}, {other[1]:.1e}",
        flush=True,
    )
    if np.median(steps) > ROUNDING or found[0] > 10 * other[0] or found[1] > 10 * other[1]:
        world.end(f"{name}: that is more than rounding", 1)


def relative(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference."""
    return float(np.abs(np.array(found) / np.array(wanted) - 1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--level", default="icf")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    world = open_world(limit=LIMIT, deterministic=options.deterministic)
    if world is None:
        raise SystemExit("start it with mpirun -n N")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            compare(name, world, options, Path(folder) / "state.safetensors")
            world.gather(b"")


if __name__ == "__main__":
    main()
