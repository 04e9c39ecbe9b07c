"""One of two processes that train a module together, the plain one, then fused. As a script it is the second one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from fused_networks import images, loss_of, made
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bnfuse.torch

STEPS = 3


def trained(rank: int, meeting: Path, fused: nn.Module | None = None) -> dict[str, Any]:
    """Losses and state after some steps of each, in this process."""
    torch.set_num_threads(1)
    x = images(seed=10 + rank)
    ours = bnfuse.torch.fuse(made(), x) if fused is None else fused
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    try:
        return {name: steps(module, x) for name, module in (("plain", made()), ("fused", ours))}
    finally:
        torch.distributed.destroy_process_group()


def steps(module: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    node = type(wrapped(x).grad_fn).__name__
    state = {name: value.clone() for name, value in module.state_dict().items() if "num_batches" not in name}
    return {"losses": torch.stack(losses), "state": state, "node": node}


if __name__ == "__main__":
    torch.save(trained(1, Path(sys.argv[1])), sys.argv[2])
