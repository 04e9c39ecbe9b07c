"""Several processes that train one network: who started them, and how they exchange what they have.

    world = open_world()                    # by what mpirun, torchrun or SLURM said; None: one process
    step = compile_step(graph, optimizer=SGD(lr=0.1), world=world)
    loss = step(images, labels)             # this rank's part of the batch; gradients, loss are means over the ranks

There is no launcher and no wire protocol here: MPI, gloo and NCCL carry what is exchanged (docs/parallel.md).
"""

from __future__ import annotations

from bnfuse.parallel.launched import Launched, launched
from bnfuse.parallel.ranks import Ranks
from bnfuse.parallel.world import Exchanged, Request, World, open_world

__all__ = ["Exchanged", "Launched", "Ranks", "Request", "World", "launched", "open_world"]
