"""The same network in torch, data parallel as its users write it: DistributedDataParallel, SyncBatchNorm.

    torch-cl, torch-compile         one process: what DDP's own efficiency is measured against
    ddp, ddp-compile                DistributedDataParallel, eager and through torch.compile
    ddp-sync, ddp-compile-sync      with torch.nn.SyncBatchNorm in the place of each BatchNorm
    ...+graph                       on GPUs: the whole step captured in a CUDA graph, and replayed

All of them channels_last; on GPUs in the precision asked for, by autocast. NCCL between GPUs, gloo between CPUs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bnfuse.baselines import cuda
from bnfuse.baselines.network import torch_loss, torch_module
from bnfuse.baselines.step import batch_of, channels_last, laid_out
from bnfuse.graph.training_graph import TrainingGraph

NAMES = ("torch-cl", "torch-compile", "ddp", "ddp-compile", "ddp-sync", "ddp-compile-sync")
WARM_UP = 12  # DDP makes its buckets anew in the first steps, and a capture wants eleven behind it
LR, MOMENTUM = 1e-6, 0.9


def alone_of(name: str) -> str:
    """The step of one process that a parallel one is compared with."""
    return "torch-compile" if "compile" in name else "torch-cl"


def by_torchrun() -> bool:
    return "MASTER_ADDR" in os.environ and "RANK" in os.environ


def begin(device: str, world: Any = None) -> None:
    """Open torch's own group of processes: by torchrun's variables, or at a port that rank 0 of a world finds."""
    import torch

    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a capture must not be asked how it is
    how: dict[str, Any] = {}
    if not by_torchrun():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            mine = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        said = world.broadcast(mine.encode()).decode()
        how = {"init_method": said, "rank": world.rank, "world_size": world.size}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **how)


class TorchParallel:
    """A step of one of NAMES on this rank's batch, its update included."""

    def __init__(
        self, graph: TrainingGraph, name: str, feeds: dict[str, np.ndarray], device: str, precision: str
    ) -> None:
        import torch

        self.torch, self.name, self.device, self.precision = torch, name, device, precision
        base = name.removesuffix("+graph")
        if device == "cuda":
            cuda.set_precision(torch, precision)
        layout = channels_last(torch, graph)
        module: Any = torch_module(graph).to(device=device, memory_format=layout)  # type: ignore[call-overload]
        if base.endswith("sync"):
            module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
        self.criterion: Any = torch_loss(graph).to(device)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM, fused=True)
        if base.startswith("ddp"):
            ids = {"device_ids": [torch.cuda.current_device()]} if device == "cuda" else {}
            side = torch.cuda.Stream() if name != base else None  # where it is captured, it is made there too
            with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
                module = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **ids)
        if "compile" in base:
            module = torch.compile(module)
            self.criterion = torch.compile(self.criterion)
        self.module = module
        data, labels = batch_of(torch, graph.signature, feeds)
        self.data = [laid_out(images.to(device), layout) for images in data]
        self.labels = [one.to(device) for one in labels]
        self._once: Callable[[], Any] = self._step
        if name != base:
            captured, _ = self._captured()
            self._once = captured.replay
        for _ in range(WARM_UP if device == "cuda" else 2):
            self._once()
        self._wait()

    def _step(self) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        with cuda.autocast(self.torch, self.precision) if self.device == "cuda" else contextlib.nullcontext():
            loss = self.criterion(self.module(*self.data), *self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _captured(self) -> Any:
        for _ in range(WARM_UP):
            self._step()
        return cuda.capture(self.torch, self._step, self.optimizer)

    def seconds(self, steps: int) -> float:
        """Of a step, in a row of some."""
        if self.device == "cuda":
            return cuda.seconds_a_step(self.torch, self._once, steps)
        start = time.perf_counter()
        for _ in range(steps):
            self._once()
        return (time.perf_counter() - start) / steps

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def all_reduces(device: str, sizes: list[int], repetitions: int) -> dict[int, float]:
    """Seconds of a sum of so many bytes between the ranks, the shortest of some, by torch's own group."""
    import torch

    found = {}
    for size in sizes:
        tensor = torch.zeros(size // 4, device=device)

        def once(tensor: Any = tensor) -> None:
            torch.distributed.all_reduce(tensor)

        for _ in range(3):
            once()
        times = []
        for _ in range(repetitions):
            if device == "cuda":
                torch.cuda.synchronize()
                torch.distributed.barrier()
                times.append(cuda.seconds_a_step(torch, once, 10))
            else:
                torch.distributed.barrier()
                start = time.perf_counter()
                once()
                times.append(time.perf_counter() - start)
        found[size] = min(times)
    return found
