"""Steps on 1, 2, 4, 8 and 16 threads in float32 and bfloat16, beside torch's: which is ahead, and how each scales.

    python benchmarks/many_cores.py                          # densenet121, resnet50, mobilenetv2 at batch 64
    python benchmarks/many_cores.py resnet50 --threads 1,16 --precisions bf16 --output times.jsonl
    python benchmarks/many_cores.py --prepare --target cpu:sapphirerapids  # compile alone: fills the cache of kernels
    python benchmarks/many_cores.py --show times.jsonl

A network and a number of threads has a process of its own, bound to so many processors; its candidates take turns.
A line of JSON for each, with what a float32 product and a copy reach on those threads; --show makes tables of them. The
efficiency of n threads is the speed-up over one thread by n. That of the product is told beside it: the clock falls
where all cores work, and no step can do better for that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NETWORKS = ("densenet121", "resnet50", "mobilenetv2")


def training_graph(network: str, options: argparse.Namespace) -> Any:
    """Build the training graph of a network of the zoo."""
    from bnfuse.build import build_training_graph
    from bnfuse.graph.training_graph import open_graph
    from bnfuse.models import build_forward

    forward = build_forward(network, batch=options.batch, image=options.image, classes=options.classes, seed=0)
    return open_graph(build_training_graph(forward), name=network)


def compiled(graph: Any, options: argparse.Namespace, threads: int) -> Iterator[tuple[str, Any, float]]:
    """Compile the step at each precision: its name, itself, and the seconds."""
    from bnfuse.benchmarking.candidates import compile_variant
    from bnfuse.passes.variants import variants

    (variant,) = variants([options.level], ())
    for precision in options.precisions:
        begun = time.perf_counter()
        step = compile_variant(graph, variant, threads, target=options.target, precision=precision)
        yield f"{variant.name} {precision}", step, time.perf_counter() - begun


def measure(network: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all candidates of a network on so many threads, in turns."""
    import numpy as np
    from turns import in_turns

    from bnfuse.benchmarking.candidates import CompiledCandidate, make_baseline
    from bnfuse.graph.feeds import draw_feeds
    from bnfuse.measuring.limits import measured_limits

    limits = measured_limits(threads)
    graph = training_graph(network, options)
    feeds = draw_feeds(graph, np.random.default_rng(0))
    candidates: dict[str, Any] = {}
    compiling = {}
    for name, step, seconds in compiled(graph, options, threads):
        candidates[name], compiling[name] = CompiledCandidate(name, step, feeds), round(seconds, 2)
    for baseline in options.against:
        for precision in options.precisions:
            found = make_baseline(graph, baseline, feeds, threads, precision=precision)
            candidates[f"{baseline} {precision}"] = found
    return {
        "network": network,
        "batch": options.batch,
        "image": options.image,
        "threads": threads,
        "flops_per_s": limits.flops_per_s,
        "bytes_per_s": limits.bytes_per_s,
        **in_turns(candidates, options.repetitions, options.wait),
        "compile_s": compiling,
    }


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Write a row for each network, precision and number of threads."""
    yield "network       threads  precision   ours ms  best torch ms          ratio  efficiency  of a product"
    first = {line["network"]: line for line in lines if line["threads"] == 1}
    for line in sorted(lines, key=lambda one: (one["network"], one["threads"])):
        threads, base = line["threads"], first.get(line["network"])
        steps = {name: each["min"] for name, each in line["steps"].items()}
        for name in [one for one in steps if not one.startswith("torch")]:
            precision = name.rpartition(" ")[2]
            row = f"{line['network']:13} {threads:7d}  {precision:9} {1e3 * steps[name]:9.1f}"
            peers = {
                peer: value for peer, value in steps.items() if peer.startswith("torch") and peer.endswith(precision)
            }
            if peers:
                best = min(peers, key=lambda peer: peers[peer])
                row += f"  {1e3 * peers[best]:8.1f} {best.partition(' ')[0]:13} {peers[best] / steps[name]:5.2f}x"
            if base and name in base["steps"]:
                own = base["steps"][name]["min"] / steps[name] / threads
                row += f"  {own:10.2f}  {line['flops_per_s'] / base['flops_per_s'] / threads:12.2f}"
            yield row


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK", help="of the zoo")
    parser.add_argument("--threads", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--precisions", type=words, default=["fp32", "bf16"])
    parser.add_argument("--against", type=words, default=["torch-cl", "torch-compile"])
    parser.add_argument("--level", default="icf")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--wait", type=float, default=30, help="seconds of patience for an idle machine")
    parser.add_argument("--target", default="cpu", help="with --prepare: cpu:MCPU, for another machine")
    parser.add_argument("--prepare", action="store_true", help="measure nothing: compile what a run needs")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: print the table of a file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="add the lines of JSON to it")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in the process of a measurement
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    if options.show:
        lines = [json.loads(line) for line in options.show.read_text().splitlines()]
        print("\n".join(table(lines)))
        return 0
    if options.one:
        (network,), (threads,) = options.networks, options.threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        print(json.dumps(measure(network, threads, options)))
        return 0
    if options.prepare:
        for network in options.networks:
            graph = training_graph(network, options)
            for threads in options.threads:
                for name, _, seconds in compiled(graph, options, threads):
                    print(f"{network}, {threads} threads: {name} in {seconds:.1f} s", flush=True)
        return 0
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    """Measure everything, each in a process of its own; tell how many failed by the exit status."""
    found, failed = [], 0
    flags = [word for word in sys.argv[1:] if word not in options.networks]
    for network in options.networks:
        for threads in options.threads:
            own = [sys.executable, __file__, network, *flags, "--threads", str(threads), "--one"]
            done = subprocess.run(own, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                failed += 1
                continue
            line = done.stdout.splitlines()[-1]
            found.append(json.loads(line))
            print(line, flush=True)
            if options.output:
                with options.output.open("a") as file:
                    file.write(line + "\n")
    print("\n".join(table(found)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
