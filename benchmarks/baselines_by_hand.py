"""The torch baseline of a zoo network beside the same network written by hand, in one process, taking turns.

    python benchmarks/baselines_by_hand.py [--batch 4] [--image 224] [--repetitions 7] [--threads 2] [NETWORK ...]

Prints the minimum and median seconds of a whole step in channels_last (forward, backward, SGD with momentum) and the
ratio of the minima. Needs torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
import torch_networks
from torch_densenet import DenseNet121

from bnfuse.baselines import TorchStep
from bnfuse.build import build_training_graph
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward

NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "densenet121": DenseNet121,
    **{name: getattr(torch_networks, name) for name in ("mobilenetv2", "resnet18", "resnet50", "squeezenet", "vgg16")},
}


def hand_run(net: torch.nn.Module, x: np.ndarray, y: np.ndarray, fused: bool) -> Callable[[], object]:
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=fused)
    images, labels = torch.from_numpy(x).to(memory_format=torch.channels_last), torch.from_numpy(y)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return run


def compare(name: str, args: argparse.Namespace) -> None:
    model = build_training_graph(build_forward(name, batch=args.batch, image=args.image))
    graph = open_graph(ir.from_proto(model), name=name)
    feeds = draw_feeds(graph, np.random.default_rng(0))
    x, y = feeds[graph.signature.data[0]], feeds[graph.signature.labels[0]]
    runs = {
        "by hand": hand_run(NETWORKS[name](), x, y, fused=True),
        "by hand, SGD not fused": hand_run(NETWORKS[name](), x, y, fused=False),
        "baseline": TorchStep(graph, "torch-cl", feeds, threads=args.threads).run,
    }
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(args.repetitions + 2):
        for kind, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                times[kind].append(time.perf_counter() - start)
    first = min(times["by hand"])
    for kind, found in times.items():
        print(
            f"{name:12} {kind:23} min {min(found):.4f} s  median {statistics.median(found):.4f} s"
            f"  {min(found) / first:.3f} of by hand"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=["resnet50", "mobilenetv2", "densenet121"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"load {os.getloadavg()[0]:.2f}; torch {torch.__version__}, {args.threads} threads, batch {args.batch}")
    for name in args.networks:
        compare(name, args)


if __name__ == "__main__":
    main()
