"""What a GPU's approximations of exponentials and divisions are worth: a network's kernels with them and without.

    python benchmarks/gpu_approximations.py efficientnet_b0 mobilenet_v3_large [--only Depthwise] -o kernels.zip
    python benchmarks/gpu_kernels.py run kernels.zip -o times.json      # on the GPU machine

The first is built anywhere. Of each problem with an activation that has such functions (docs/decisions.md, D86) there
are two kernels; the second script times them, and shows how far the results of the second are from those of the first.
Networks are those of beside_torch.py, and it needs what that needs.
"""

from __future__ import annotations

import argparse
import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import beside_torch
from networks.measured import networks

from bnfuse.opset.expressions import parts_of
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.kernels.cuda import approximations
from bnfuse.runtime.kernels.cuda.compile import compile_kernel

WAYS = {"exact": {}, "approximate": approximations.APPROXIMATIONS}


def lowered_network(name: str, arguments: argparse.Namespace) -> Any:
    """The program of a network's training step at level icf."""
    import torch

    from bnfuse.graph.training_graph import open_graph

    torch.manual_seed(0)
    network = beside_torch.of_batch(networks()[name], arguments.batch)
    graph = beside_torch.training_graph(name, network, network.make().train(), arguments.folder)
    target = resolve(arguments.target, precision=arguments.precision)
    return lower_graph(open_graph(rewrite(graph.model, level="icf").model), target, SGD(lr=0.1, momentum=0.9))[0]


def problems(arguments: argparse.Namespace) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The kernels that are written in another way, each once, with what is told of them."""
    seen = set()
    for name in arguments.networks:
        lowered = lowered_network(name, arguments)
        for request, work in zip(lowered.requests, lowered.program.works, strict=True):
            kernel = request.kernel()
            if kernel.key in seen or not has_any(work.op) or not asked_for(arguments.only, work, kernel):
                continue
            seen.add(kernel.key)
            told = {"network": name, "key": kernel.key, "op": work.op, "kind": work.kind, "shape": work.shape}
            yield kernel, told | {"flops": work.flops, "bytes": work.bytes}


def has_any(op: str) -> bool:
    """Tell whether an operator has a step whose formula has one of the approximations."""
    from bnfuse.opset.activations import ACTIVATIONS

    formulas = [part for each in ACTIVATIONS.values() if each.name in op for part in (each.value, each.gradient)]
    return any(part.operation in approximations.APPROXIMATIONS for one in formulas for part in parts_of(one))


def asked_for(only: list[str], work: Any, kernel: Any) -> bool:
    return not only or any(part in f"{work.kind} {work.shape} {kernel.name}" for part in only)


def main() -> None:
    """Read the command line; compile both kernels of each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--only", action="append", default=[], help="a part of a kernel's kind, shape or name")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=Path("build/approximations"))
    parser.add_argument("-o", "--output", default="kernels.zip")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    with zipfile.ZipFile(arguments.output, "w", zipfile.ZIP_DEFLATED) as file:
        for kernel, told in problems(arguments):
            for way, functions in WAYS.items():
                with mock.patch.object(approximations, "activations_of", lambda dtypes, functions=functions: functions):
                    file.writestr(f"{len(entries)}.bin", compile_kernel(kernel))
                params = [[p.name, p.access, p.elements, p.dtype] for p in kernel.params]
                # of no sources: nothing of it is to be remembered as a choice
                more = {"sources": "", "choice": f"activations={way}", "parts": [], "rule": way == "exact"}
                entries.append({**told, **more, "launches": 1, "kernel": kernel.name, "params": params})
            print(kernel.name, told["shape"], flush=True)
        file.writestr("entries.json", json.dumps(entries))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
