"""Steps of networks that are not of the zoo, at the sizes that people train with, beside torch's of the same module.

    python benchmarks/beside_torch.py [NAME...] [--levels none,rcf,mvf,bnff,icf] [--against torch-cl,torch-compile]
                                      [--target cuda --precision bf16] [--batch N] [--repetitions 7] [--threads 2]
                                      [--folder DIR] [--table]

Candidates of a network take turns in one process, one for each network. What was found is a line of FOLDER/times.jsonl,
and networks that are there for the same target and precision are not measured again; --table prints what is there.
Needs torch, onnxscript, torchvision and timm.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from networks import Network
from networks.measured import networks

LEVELS = "none,rcf,mvf,bnff,icf"


def training_graph(name: str, network: Network, module: Any, folder: Path) -> Any:
    """Export a module, and build its training graph."""
    import torch

    import bnfuse
    from bnfuse.graph.training_graph import open_graph

    path = folder / f"{name}.onnx"
    torch.onnx.export(module, network.inputs(), str(path), dynamo=True, optimize=False, verbose=False)
    terms = network.terms([output.name for output in bnfuse.load(path).graph.outputs])
    return open_graph(bnfuse.build_training_graph(path, loss=terms, train_bn=True), name=name)


def of_batch(network: Network, batch: int | None) -> Network:
    """Give the network with batches of another size."""
    if batch is None:
        return network
    return dataclasses.replace(network, shapes=tuple((batch, *shape[1:]) for shape in network.shapes))


def candidates_of(name: str, network: Network, options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Compile ours, prepare torch's; and what is told of ours."""
    import torch

    from bnfuse.baselines import TorchStep
    from bnfuse.benchmarking.candidates import CompiledCandidate, compile_variant
    from bnfuse.passes.variants import variants

    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    module = network.make().train()
    graph = training_graph(name, network, module, options.folder)
    inputs = network.inputs()
    labels = network.labels(module, inputs)
    given = [each.numpy() for each in (*inputs, *labels)]
    feeds = dict(zip((*graph.signature.data, *graph.signature.labels), given, strict=True))
    gpu = options.target != "cpu"
    how = {"target": options.target, "precision": options.precision} if gpu else {}
    found: list[Any] = []
    told: dict[str, Any] = {}
    for variant in variants(options.levels.split(","), ()):
        start = time.perf_counter()
        step = compile_variant(graph, variant, options.threads, **how)
        arena = step.report.arena_bytes
        told[variant.name] = {"compile_s": round(time.perf_counter() - start, 1), "arena_mib": round(arena / 2**20)}
        if gpu:
            from bnfuse.benchmarking.cuda.step import CudaCandidate

            found.append(CudaCandidate(variant.name, step, feeds))
        else:
            found.append(CompiledCandidate(variant.name, step, feeds))
        print(f"{name}: {variant.name} compiled in {told[variant.name]['compile_s']} s", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"device": "cuda", "precision": options.precision} if gpu else {"threads": options.threads}
    for baseline in options.against.split(","):
        start = time.perf_counter()
        own = network.make().train()
        own.load_state_dict(module.state_dict())
        step_of_torch = TorchStep(
            graph, baseline, feeds, lr=0.0, module=own, criterion=loss_of(network, options.target), **where
        )
        found.append(step_of_torch)
        told[baseline] = {"compile_s": round(time.perf_counter() - start, 1)}
    return found, told


def loss_of(network: Network, target: str) -> Any:
    """Give the loss of what a module gives, and of labels."""
    import torch

    if network.loss == "cross-entropy":
        return torch.nn.CrossEntropyLoss().to(target)
    return lambda given, *labels: network.loss_of_torch(given, labels)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all candidates of a network in turns."""
    warnings.filterwarnings("ignore")
    from turns import in_turns

    network = of_batch(networks()[name], options.batch)
    candidates, told = candidates_of(name, network, options)
    return {
        "name": name,
        "target": options.target,
        "precision": options.precision,
        "shape": network.shapes[0],
        "threads": options.threads,
        **in_turns({candidate.name: candidate for candidate in candidates}, options.repetitions, options.wait),
        "compiling": told,
    }


def known(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Read what was measured for this target and precision."""
    path = options.folder / "times.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        line["name"]: line
        for line in lines
        if (line["target"], line["precision"]) == (options.target, options.precision)
    }


def print_table(found: list[dict[str, Any]]) -> None:
    """Print minimum (median) of each in ms, and by how much the best of torch and the first level are behind."""
    ratios = []
    for line in found:
        steps = line["steps"]
        ours = [key for key in steps if not key.startswith("torch")]
        best = min(steps[key]["min"] for key in steps if key not in ours)
        ratios.append(best / steps[ours[-1]]["min"])
        cells = "  ".join(f"{key} {1e3 * each['min']:.1f} ({1e3 * each['median']:.1f})" for key, each in steps.items())
        gain = steps[ours[0]]["min"] / steps[ours[-1]]["min"]
        print(f"{line['name']:20} {'x'.join(map(str, line['shape'])):14} {cells}  {ratios[-1]:.2f}x  {gain:.2f}x")
    if ratios:
        print(f"geometric mean of {len(ratios)}: {np.exp(np.mean(np.log(ratios))):.2f}x")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help=f"globs: {', '.join(networks())}")
    parser.add_argument("--levels", default=LEVELS)
    parser.add_argument("--against", default="torch-cl,torch-compile")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, help="another batch than the network's")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wait", type=float, default=60, help="seconds of patience for an idle machine")
    parser.add_argument("--limit", type=float, default=1200, help="seconds of a network")
    parser.add_argument("--folder", type=Path, default=Path(".beside-torch"))
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in the process of a network
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        found = measure(options.names[0], options)
        with (options.folder / "times.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        return 0
    chosen = [name for name in networks() if any(fnmatch.fnmatch(name, glob) for glob in options.names)]
    failed = []
    for name in [] if options.table else chosen:
        if name in known(options):
            continue
        given = [each for each in sys.argv[1:] if each not in options.names]
        try:
            code = subprocess.run([sys.executable, __file__, name, "--one", *given], timeout=options.limit).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            failed.append(name)
        print_table([line for line in known(options).values() if line["name"] == name])
    print()
    print_table([line for name, line in known(options).items() if name in chosen])
    if failed:
        print("not measured:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
