"""Gradients of one step against float64: ours beside torch's own in the same precision.

A tensor's error is ||found - reference|| / ||reference||; norms below a millionth of the largest count as that much.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np

from bnfuse.baselines import TorchStep, torch_module
from bnfuse.baselines.network import torch_loss
from bnfuse.graph.training_graph import TrainingGraph

LOSS = ""  # its name among the gradients
SMALLEST = 1e-6
FP16_SCALE = 1024.0
WHOLE = 2.0  # times torch's error of the whole gradient: what ours may have
# errors below which nothing is asked of the ratio to torch's
ENOUGH = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 2e-3, "bf16": 1e-2}

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Errors of all gradients as one vector, of the loss, and of each tensor: ours and torch's."""

    ours: float
    torch: float
    loss: tuple[float, float]
    tensors: dict[str, tuple[float, float]]
    enough: float

    @property
    def ok(self) -> bool:
        return self.ours <= max(self.enough, WHOLE * self.torch)  # also False for a NaN

    @property
    def worst(self) -> str:
        """The tensor that is furthest from torch's error, in torch's errors."""
        return max(self.tensors, key=lambda name: ratio(self.tensors[name], self.enough))

    @property
    def text(self) -> str:
        a, b = self.tensors[self.worst]
        return (
            f"{'ok' if self.ok else 'WRONG'}: error {self.ours:.2e}, torch {self.torch:.2e}; loss {self.loss[0]:.2e}, "
            f"{self.loss[1]:.2e}; worst {self.worst} {a:.2e}, {b:.2e}"
        )

    def to_json(self) -> dict[str, Any]:
        ratios = [ratio(pair, self.enough) for pair in self.tensors.values()]
        ranked = sorted(self.tensors, key=lambda name: -ratio(self.tensors[name], self.enough))
        return {
            "ok": self.ok,
            "error": self.ours,
            "torch_error": self.torch,
            "loss": self.loss,
            "median_ratio": statistics.median(ratios),
            "largest_ratio": max(ratios),
            "worst": {name: self.tensors[name] for name in ranked[:8]},
        }


def ratio(pair: tuple[float, float], enough: float) -> float:
    """Ours to torch's, both no less than what is enough."""
    ours, torch = pair
    return max(ours, enough) / max(torch, enough) if ours == ours else float("inf")


def reference_gradients(graph: TrainingGraph, feeds: Tensors) -> Tensors:
    """In float64 on the CPU, by parameter; the loss under ""."""
    import torch

    module, criterion = torch_module(graph).double(), torch_loss(graph).double()
    tensors = [torch.from_numpy(feeds[name]) for name in (*graph.signature.data, *graph.signature.labels)]
    count = len(graph.signature.data)
    loss = criterion(module(*(tensor.double() for tensor in tensors[:count])), *tensors[count:])
    loss.backward()
    return gradients_of(graph, module, loss)


def torch_gradients(graph: TrainingGraph, feeds: Tensors, precision: str) -> Tensors:
    """torch's on the GPU, channels_last, as people set the precision; fp16 with a fixed scale of the loss."""
    step = TorchStep(graph, "torch-cl", feeds, lr=0.0, device="cuda", precision=precision)
    scale = FP16_SCALE if precision == "fp16" else 1.0
    loss = step.forward()
    (loss * scale).backward()
    found = gradients_of(graph, step.module, loss)
    return {name: value if name == LOSS else value / scale for name, value in found.items()}


def gradients_of(graph: TrainingGraph, module: Any, loss: Any) -> Tensors:
    names = [name for name in graph.signature.gradients if name in module.names]
    found = {name: module.get_parameter(module.names[name]).grad.double().cpu().numpy() for name in names}
    return {LOSS: loss.detach().double().cpu().numpy(), **found}


def compared(graph: TrainingGraph, expected: Tensors, ours: Tensors, torch: Tensors, precision: str) -> Verdict:
    names = [name for name in expected if name != LOSS]
    floor = SMALLEST * max(np.linalg.norm(expected[name]) for name in names)

    def errors(found: Tensors) -> dict[str, float]:
        return {
            name: float(np.linalg.norm(found[name].reshape(expected[name].shape) - expected[name]))
            / max(float(np.linalg.norm(expected[name])), floor)
            for name in names
        }

    def whole(found: Tensors) -> float:
        parts = [(found[n].reshape(expected[n].shape) - expected[n]).ravel() for n in names]
        return float(np.linalg.norm(np.concatenate(parts)) / norm)

    norm = np.linalg.norm(np.concatenate([expected[name].ravel() for name in names]))
    a, b = errors(ours), errors(torch)
    off = [abs(float(found[LOSS]) - float(expected[LOSS])) / abs(float(expected[LOSS])) for found in (ours, torch)]
    pairs = {name: (a[name], b[name]) for name in names}
    return Verdict(whole(ours), whole(torch), (off[0], off[1]), pairs, ENOUGH[precision])
