"""A step as a part of a torch loop on a GPU: views, pieces, the caller's stream and CUDA graph. Built here, run there.

    python benchmarks/gpu_hosting.py build --folder gpu-hosting               # no GPU needed; minutes
    PYTHONPATH=. python benchmarks/gpu_hosting.py run --folder gpu-hosting    # numpy, torch, cuda-bindings; no TVM

bits      forward, backward, statistics and gradients through views, in 1 and 4 pieces, on torch's stream, and replayed
          from torch's CUDA graph: the same bits as step.forward and step.backward; a parameter that torch writes counts
waiting   how long the host is in a forward and a backward, and whether the GPU was still at work when it returned
timing    the step by itself, in 4 pieces, in torch's CUDA graph, each with and without an optimiser of torch's
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_pack import pack_step, recipes_of, redraw, unpack

CASES = {  # network, its settings, batch, image, precision
    "resnet-small": ("resnet20", {"classes": 10}, 8, 32, "fp32"),
    "densenet-small": ("densenet40", {"growth": 12, "depth": 4, "classes": 10}, 5, 16, "bf16"),
    "densenet121": ("densenet121", {}, 64, 224, "bf16"),
}
SMALL = ("resnet-small", "densenet-small")
REPETITIONS = 20


def build(folder: Path, names: list[str], arch: str) -> None:
    from bnfuse import passes, runtime
    from bnfuse.build import build_training_graph
    from bnfuse.graph.training_graph import open_graph
    from bnfuse.models import build_forward

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        network, settings, batch, image, precision = CASES[name]
        forward = build_forward(network, batch=batch, image=image, **settings)
        model = redraw(build_training_graph(forward, loss="none"))
        rewritten = passes.rewrite(open_graph(model).model, level="icf").model
        start = time.perf_counter()
        step = runtime.compile_step(rewritten, target=f"cuda:{arch}", precision=precision)
        with tempfile.TemporaryDirectory(prefix="bnfuse-gpu-") as place:
            step.export(Path(place) / "step.bnf")
            pack_step(Path(place) / "step.bnf", recipes_of(model), folder / f"{name}.step")
        print(f"{name}: {time.perf_counter() - start:.0f} s, {len(step.pieces(4))} pieces of 4", flush=True)


class Loop:
    """A step in torch's memory, as a framework drives it."""

    def __init__(self, torch: Any, path: Path) -> None:
        from bnfuse.runtime import load_step

        self.torch, self.step = torch, load_step(path)
        self.step.stream = torch.cuda.current_stream()
        signature = self.step.program.signature
        ((self.output, given),) = signature["output_gradients"].items()
        rng = np.random.default_rng(0)

        def drawn(name: str) -> Any:
            values = rng.standard_normal(self.step.program.inputs[name].shape).astype(np.float32)
            return torch.from_numpy(values).cuda()

        self.x, self.dy = drawn(signature["data"][0]), drawn(given) / 64
        self.state = {name: torch.from_dlpack(view) for name, view in self.step.state_views().items()}
        self.trainable = [name for name in signature["trainable"] if name in self.step.program.gradients]
        self.step.run_forward(self.x)
        self.logits = torch.from_dlpack(self.step.output_views()[self.output])
        self.views = self.step.gradient_views()
        self.flat = torch.from_dlpack(self.views.flat)

    def use(self) -> None:
        self.step.stream = self.torch.cuda.current_stream()

    def once(self, pieces: int = 1) -> tuple[Any, Any]:
        """Logits and gradients of their own."""
        ticket = self.step.run_forward(self.x, commit_statistics=True)
        logits = self.logits.clone()
        for piece in self.step.pieces(pieces):
            self.step.backward_piece(piece, *([] if piece.index else [self.dy]), ticket=ticket)
        return logits, self.flat.clone()

    def captured(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph of torch's, and what the call gave in it."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.use()
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.use()
            found = call()
        self.use()
        return graph, found

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.state[name].copy_(value)

    def kept(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.state.items()}


def bits(torch: Any, path: Path) -> dict[str, Any]:
    loop = Loop(torch, path)
    step, start = loop.step, loop.kept()
    for name, value in step.state_dict().items():
        assert np.array_equal(loop.state[name].cpu().numpy(), value), f"the view of {name} is not the state"
    wanted = torch.from_dlpack(step.forward(loop.x)).clone()
    step.commit_statistics()
    step.backward(loop.dy)
    gradients, after = loop.flat.clone(), loop.kept()
    assert float(gradients.abs().sum()) > 0 and torch.isfinite(gradients).all()

    def same(what: str, found: tuple[Any, Any]) -> None:
        torch.cuda.synchronize()
        assert torch.equal(found[0], wanted), f"{what}: other logits"
        assert torch.equal(found[1], gradients), f"{what}: other gradients"
        for name, value in after.items():
            assert torch.equal(loop.state[name], value), f"{what}: another {name}"

    for pieces in (1, 4):
        loop.restore(start)
        same(f"{pieces} pieces", loop.once(pieces))
    for pieces in (1, 4):
        graph, found = loop.captured(lambda pieces=pieces: loop.once(pieces))
        for _ in range(2):
            loop.restore(start)
            graph.replay()
            same(f"captured in {pieces} pieces", found)
    x = loop.x.clone()
    loop.x.copy_(x.flip(0)), loop.restore(start), graph.replay(), torch.cuda.synchronize()
    turned = loop.once(4)[0] if loop.restore(start) is None else None
    assert torch.equal(found[0], turned) and not torch.equal(turned, wanted), "a replay does not read the images anew"
    loop.x.copy_(x)
    loop.restore(start)
    for name in loop.trainable:
        loop.state[name].mul_(1.01)
    moved, _ = loop.once()
    loop.restore(start)
    step.load_state_dict({**step.state_dict(), **{n: (start[n] * 1.01).cpu().numpy() for n in loop.trainable}})
    assert torch.equal(torch.from_dlpack(step.forward(loop.x)), moved), "what torch writes is not computed with"
    return {"largest gradient": float(gradients.abs().max()), "pieces": len(step.pieces(4))}


def waiting(torch: Any, path: Path) -> dict[str, Any]:
    loop = Loop(torch, path)
    for _ in range(3):
        loop.once(4)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    busy, host = [], []
    for _ in range(REPETITIONS):
        done = torch.cuda.Event()
        start = time.perf_counter()
        loop.once(4)
        host.append(time.perf_counter() - start)
        done.record()
        busy.append(not done.query())
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    assert all(busy), "the host waited for the GPU"
    return {"host_ms": 1e3 * statistics.median(host)}


def timing(torch: Any, path: Path) -> dict[str, Any]:
    loop = Loop(torch, path)
    parameters = [torch.nn.Parameter(loop.state[name]) for name in loop.trainable]
    assert all(p.data_ptr() == loop.state[n].data_ptr() for n, p in zip(loop.trainable, parameters, strict=True))
    optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, foreach=True)

    def bare() -> None:
        loop.step.run_forward(loop.x, commit_statistics=True)
        (piece,) = loop.step.pieces(1)
        loop.step.backward_piece(piece, loop.dy)

    def trained(pieces: int = 4) -> None:
        _, flat = loop.once(pieces)
        found = loop.views.of(flat)
        for name, parameter in zip(loop.trainable, parameters, strict=True):
            parameter.grad = found[name]
        optimizer.step()

    ways: dict[str, Callable[[], Any]] = {
        "bare": bare,
        "copied out": loop.once,
        "copied out, 4 pieces": lambda: loop.once(4),
        "with SGD": trained,
    }
    graphs = {f"{name}, in torch's graph": loop.captured(call)[0].replay for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in (*ways, *graphs)}
    for _ in range(5):
        for name, call in {**ways, **graphs}.items():
            call()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPETITIONS):
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / REPETITIONS)
    return {f"{name} ms": round(statistics.median(found), 3) for name, found in times.items()}


def run(folder: Path, names: list[str]) -> bool:
    import torch

    torch.cuda.init()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="bnfuse-gpu-") as place:
        for name in names:
            path = unpack(folder / f"{name}.step", Path(place))
            for part in (bits, waiting, timing):
                if name in SMALL and part is not bits:
                    continue
                try:
                    found = part(torch, path)
                    print(json.dumps({"case": name, "part": part.__name__, **found}), flush=True)
                except Exception as error:
                    good = False
                    print(f"{name} {part.__name__}: FAILED: {type(error).__name__}: {error}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("--folder", type=Path, default=Path("gpu-hosting"))
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--arch", default="sm_90")
    args = parser.parse_args()
    names = args.case or list(CASES)
    if args.what == "build":
        build(args.folder, names, args.arch)
    else:
        sys.exit(0 if run(args.folder, names) else 1)


if __name__ == "__main__":
    main()
