"""What a torch step does otherwise on a GPU: precision as people set it, whole-step CUDA graphs, times by events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.targets.arch import PRECISIONS

WARM_UP = 4  # steps before a capture: cuDNN measures its algorithms, the optimiser makes its buffers


def set_precision(torch: Any, precision: str) -> None:
    """Set the process's switches for float32 arithmetic, each outright; cuDNN tries its algorithms.

    They hold for whatever runs next in this process: steps of one benchmark have one precision.
    """
    if precision not in PRECISIONS:
        raise BnfuseError(f"there is no precision '{precision}': there is {', '.join(PRECISIONS)}")
    if not torch.cuda.is_available():
        raise BnfuseError("this torch reaches no GPU: install a torch with CUDA, or leave --target cuda out")
    tf32 = precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True


def autocast(torch: Any, precision: str, device: str = "cuda") -> Any:
    """Round forward and loss: nothing for fp32 and tf32, whose switches are the process's."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def scaler(torch: Any, precision: str) -> Any:
    """Make torch's loss scaling, which fp16 needs; None for the others."""
    return torch.amp.GradScaler("cuda") if precision == "fp16" else None


def capture(torch: Any, step: Callable[[], Any], optimizer: Any) -> tuple[Any, Any]:
    """Give the CUDA graph of a whole step, and the loss that each replay writes.

    Warm-up on a side stream, as torch asks for it. Then the gradients are dropped, so that those of the graph lie in
    its own memory, which no replay has to clear. Peak memory counts from here on.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


@contextlib.contextmanager
def unchanged(torch: Any, tensors: Iterable[Any], optimizer: Any) -> Any:
    """Put back what steps inside change: these tensors, in place, and the momentum, to zero."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, old in kept:
            tensor.copy_(old)
        for state in optimizer.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].zero_()


def seconds_a_step(torch: Any, step: Callable[[], Any], steps: int) -> float:
    """Time some steps in a row by events, so that gaps between them count and the host's clock does not."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / steps
