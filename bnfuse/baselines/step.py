"""A training step in torch, timed: zero_grad, forward and loss, backward, SGD with momentum."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

import numpy as np

from bnfuse.baselines import cuda
from bnfuse.baselines.names import baselines_of, import_torch, is_graph, without_graph
from bnfuse.baselines.network import torch_loss, torch_module
from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.processors import bounded_threads, physical_cores
from bnfuse.core.times import STEPS_A_RUN, Times
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import TrainingGraph
from bnfuse.runtime.targets.arch import CPU_PRECISIONS

Arrays = dict[str, np.ndarray]


class TorchStep:
    """The step of a baseline on one batch (data and labels by name): a candidate of the benchmark.

    torch         the module as it is, NCHW
    torch-cl      module and images in torch.channels_last
    torch-compile the same through torch.compile
    BASELINE+graph    on a GPU: the same, the whole step captured in a CUDA graph, and replayed

    The batch is a tensor in the network's memory format, on the device, before the first step, and torch-compile has
    compiled both directions, so neither is in the times. `loss` is that of the last step, a torch scalar. `precision`
    is fp32, by autocast bf16, or on a GPU tf32, or by autocast fp16 with torch's loss scaling. `module` and
    `criterion` (of what it gives, and the labels) stand in for those that are written from the graph.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        baseline: str,
        feeds: Arrays,
        *,
        lr: float = 0.01,
        momentum: float = 0.9,
        threads: int | None = None,
        device: str = "cpu",
        precision: str = "fp32",
        module: Any = None,
        criterion: Any = None,
    ) -> None:
        check_names(baseline, device, precision)
        self.torch = torch = import_torch()
        if device == "cpu" or threads:
            torch.set_num_threads(bounded_threads(threads) or physical_cores())
        if device == "cuda":
            cuda.set_precision(torch, precision)
        self.name, self.device, self.precision = baseline, device, precision
        base = without_graph(baseline)
        layout = torch.contiguous_format if base == "torch" else channels_last(torch, graph)
        self.module = torch_module(graph) if module is None else module
        self.module.to(device=device, memory_format=layout)  # type: ignore[call-overload]  # in place
        self.criterion = torch_loss(graph).to(device) if criterion is None else criterion
        self.signature = graph.signature
        data, labels = batch_of(torch, self.signature, feeds)
        self.data = [laid_out(images.to(device), layout) for images in data]
        self.labels = [one.to(device) for one in labels]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=lr, momentum=momentum, fused=True)
        self.scaler = cuda.scaler(torch, precision)
        self.loss_of: Any = loss_function(self.module, self.criterion)
        self.loss: Any = None
        self._graph: Any = None
        if base == "torch-compile":
            need_compiler()
            self.loss_of = self._compiled()
            self._run_once(graph.name)
        if is_graph(baseline):
            with cuda.unchanged(torch, (*self.module.parameters(), *self.module.buffers()), self.optimizer):
                self._graph, self.loss = cuda.capture(torch, self._step, self.optimizer)

    def run(self) -> Times:
        """Run a step and time it; on a GPU the mean of some steps in a row, and no time of the forward phase: a graph
        is one piece."""
        if self.device == "cuda":
            return Times(cuda.seconds_a_step(self.torch, self.step, STEPS_A_RUN), None)
        start = time.perf_counter()
        loss = self.forward()
        middle = time.perf_counter()
        self._backward(loss)
        end = time.perf_counter()
        self.loss = loss.detach()
        return Times(end - start, middle - start)

    def step(self) -> Any:
        """Run one step; on a GPU it is only enqueued. Gives the loss, a torch scalar that the next step may
        overwrite."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.loss = self._step()
        return self.loss

    def feed(self, feeds: Arrays) -> None:
        """Put another batch of the same sizes into the tensors that the steps read."""
        data, labels = batch_of(self.torch, self.signature, feeds)
        for held, given in zip((*self.data, *self.labels), (*data, *labels), strict=True):
            held.copy_(given)

    def _step(self) -> Any:
        loss = self.forward()
        self._backward(loss)
        return loss.detach()

    def forward(self) -> Any:
        """Give the loss, with what its gradient needs; gradients are cleared."""
        self.optimizer.zero_grad(set_to_none=True)
        with cuda.autocast(self.torch, self.precision, self.device):
            return self.loss_of(self.data, self.labels)

    def _backward(self, loss: Any) -> None:
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            return
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _compiled(self) -> Any:
        """On a GPU the loss is compiled too, in one piece with the network: it is a dozen small kernels there."""
        if self.device == "cuda":
            return self.torch.compile(self.loss_of)
        return loss_function(self.torch.compile(self.module), self.criterion)

    def _run_once(self, file: str) -> None:
        """Run both directions once, which compiles them, and takes back what that did to the running statistics."""
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        try:
            self.forward().backward()
        except Exception as error:  # torch's compiler has a class per stage and no common one of its own
            raise BnfuseError(f"{file}: torch.compile failed: {first_line(error)}. Leave torch-compile out.") from None
        for buffer, old in kept:
            buffer.copy_(old)
        self.optimizer.zero_grad(set_to_none=True)


def check_names(baseline: str, device: str, precision: str) -> None:
    """Raise BnfuseError for a baseline or precision that the device has not."""
    if baseline not in baselines_of(device):
        where = "" if device == "cpu" else f" on {device}"
        raise BnfuseError(f"there is no torch baseline '{baseline}'{where}: there is {', '.join(baselines_of(device))}")
    if device == "cpu" and precision not in CPU_PRECISIONS:
        has = " or ".join(CPU_PRECISIONS)
        raise BnfuseError(f"on a CPU torch's step is {has}, not {precision}: leave the precision out")


def batch_of(torch: Any, signature: GraphSignature, feeds: Arrays) -> tuple[list[Any], list[Any]]:
    """Give data and labels as torch has them, on the host."""
    data = [torch.from_numpy(np.array(feeds[name])) for name in signature.data]
    return data, [labels_tensor(torch, feeds[name]) for name in signature.labels]


def loss_function(network: Any, criterion: Any) -> Any:
    """Join a network and its loss: data and labels to the loss."""
    return lambda data, labels: criterion(network(*data), *labels)


def channels_last(torch: Any, graph: TrainingGraph) -> Any:
    """Give torch's format with the channels last for this rank; there is none for [N, C, L]."""
    rank = max(len(graph.shape_of(name)) for name in graph.signature.data)
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank, torch.contiguous_format)


def laid_out(images: Any, memory_format: Any) -> Any:
    """Bring images of four or five axes into a memory format."""
    return images.to(memory_format=memory_format) if images.dim() in (4, 5) else images


def labels_tensor(torch: Any, labels: np.ndarray) -> Any:
    """Make labels a tensor: class numbers are int64 in torch, whatever the file has."""
    made = torch.from_numpy(np.array(labels))
    return made if made.is_floating_point() else made.to(torch.int64)


def need_compiler() -> None:
    """Raise BnfuseError where there is no compiler: torch.compile makes C++ of the module, and looks for one by $CXX or
    this name."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if sys.platform != "win32" and shutil.which(compiler) is None:
        raise BnfuseError(
            f"torch-compile needs a C++ compiler, and {compiler} is not there: install g++ or leave torch-compile out"
        )
