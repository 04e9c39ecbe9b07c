"""From a file back to a step at work."""

from __future__ import annotations

import pathlib

from bnfuse.core.heap import release_heap
from bnfuse.parallel.world import World
from bnfuse.runtime.artifact import read_artifact, reading
from bnfuse.runtime.session import Step


def load_step(path: str | pathlib.Path, *, threads: int | None = None, world: World | None = None) -> Step:
    """Load the step of a file that `Step.export` wrote, ready to run. Refuses one for another kind of CPU, and for
    another number of ranks than those of `world`, which begin with the state of rank 0.

    One for a GPU loads everywhere, without TVM; where it finds no such GPU, running it is refused.
    """
    path = pathlib.Path(path)
    with reading(path):
        found = read_artifact(path, threads)
        first, *others = found.compiled
        step = Step(*first, *others, target=found.target, optimizer=found.optimizer, model=found.model, world=world)
        step.load_state_dict(found.state)
    del found, first, others
    release_heap()
    step.share_state()
    return step
