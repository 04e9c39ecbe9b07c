"""A training step in torch, timed: zero_grad, forward and loss, backward, SGD with momentum."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

import numpy as np

from bnfuse.benchmarking.times import Times
from bnfuse.errors import BnfuseError
from bnfuse.oracle import first_line
from bnfuse.peers.names import PEERS, import_torch
from bnfuse.peers.network import torch_loss, torch_module
from bnfuse.training_graph import TrainingGraph

Arrays = dict[str, np.ndarray]


class TorchStep:
    """The step of one of PEERS on one batch (data and labels by name): a candidate of the benchmark.

    torch         the module as it is, NCHW
    torch-cl      module and images in torch.channels_last
    torch-compile the same through torch.compile

    The batch is a tensor in the network's memory format before the first step, and torch-compile has compiled both
    directions, so neither is in the times. `loss` is that of the last step, a torch scalar.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        peer: str,
        feeds: Arrays,
        *,
        lr: float = 0.01,
        momentum: float = 0.9,
        threads: int | None = None,
    ) -> None:
        if peer not in PEERS:
            raise BnfuseError(f"there is no torch peer '{peer}': there is {', '.join(PEERS)}")
        torch = import_torch()
        torch.set_num_threads(threads or default_threads())
        self.name = peer
        layout = torch.contiguous_format if peer == "torch" else channels_last(torch, graph)
        self.module = torch_module(graph)
        self.module.to(memory_format=layout)  # type: ignore[call-overload]  # in place
        self.criterion = torch_loss(graph)
        self.data = [laid_out(torch.from_numpy(np.array(feeds[name])), layout) for name in graph.roles.data]
        self.labels = [labels_tensor(torch, feeds[name]) for name in graph.roles.labels]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=lr, momentum=momentum, fused=True)
        self.forward = self.module
        self.loss: Any = None
        if peer == "torch-compile":
            need_compiler()
            self.forward = torch.compile(self.module)
            self._compile(graph.name)

    def run(self) -> Times:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.forward(*self.data), *self.labels)
        middle = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        end = time.perf_counter()
        self.loss = loss.detach()
        return Times(end - start, middle - start)

    def _compile(self, file: str) -> None:
        """Runs both directions once, which compiles them, and takes back what that did to the running statistics."""
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            self.criterion(self.forward(*self.data), *self.labels).backward()
        except Exception as error:  # torch's compiler has a class per stage and no common one of its own
            raise BnfuseError(f"{file}: torch.compile failed: {first_line(error)}. Leave torch-compile out.") from None
        for buffer, old in kept:
            buffer.copy_(old)
        self.optimizer.zero_grad(set_to_none=True)


def channels_last(torch: Any, graph: TrainingGraph) -> Any:
    """torch has a format for each rank, and none for [N, C, L]."""
    rank = max(len(graph.shape_of(name)) for name in graph.roles.data)
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank, torch.contiguous_format)


def laid_out(images: Any, memory_format: Any) -> Any:
    return images.to(memory_format=memory_format) if images.dim() in (4, 5) else images


def labels_tensor(torch: Any, labels: np.ndarray) -> Any:
    """Class numbers are int64 in torch, whatever the file has."""
    made = torch.from_numpy(np.array(labels))
    return made if made.is_floating_point() else made.to(torch.int64)


def default_threads() -> int:
    from bnfuse.runtime.targets import physical_cores

    return physical_cores()


def need_compiler() -> None:
    """torch.compile makes C++ of the module, and looks for the compiler by $CXX or this name."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if sys.platform != "win32" and shutil.which(compiler) is None:
        raise BnfuseError(
            f"torch-compile needs a C++ compiler, and {compiler} is not there: install g++ or leave torch-compile out"
        )
