"""How many launches a step takes, and of what: `python benchmarks/launches.py train.onnx --target cuda:sm_90`.

Nothing is compiled. A launch of a kernel for a GPU is one or several nodes of its graph, its stages: `--stages` makes
the kernels to count them, which takes a minute.
"""

from __future__ import annotations

import argparse
import collections

from bnfuse.api import rewrite
from bnfuse.graph.training_graph import open_graph
from bnfuse.runtime import SGD
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.program import program as p


def main() -> None:
    """Print a table of launches by phase and kind, and the operators of the small ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--level", default="icf")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--list", action="store_true", help="every launch, in order")
    given = parser.parse_args()
    graph = open_graph(rewrite(given.model, level=given.level).model)
    precision = given.precision if given.target.startswith("cuda") else None
    made, _ = lower_graph(graph, resolve(given.target, precision=precision), SGD(0.1, momentum=0.9))
    stages = [len(request.kernel().build()) if given.stages else 1 for request in made.requests]
    print(made.program.report.launches)
    for phase in p.PHASES:
        counts: collections.Counter[str] = collections.Counter()
        nodes: collections.Counter[str] = collections.Counter()
        for launch in made.program.phase(phase):
            request = made.requests[launch.kernel]
            name = request.kind.function
            if request.kind in (registry.GENERIC, registry.CHAIN):
                name = f"{name} {request.arguments[0].op_type}"
            counts[name] += 1
            nodes[name] += stages[launch.kernel]
            if given.list:
                work = made.program.works[launch.kernel]
                print(f"  {phase:8} {stages[launch.kernel]} {work.op} {work.shape} {launch.node}")
        print(f"{phase}: {sum(counts.values())} launches" + f", {sum(nodes.values())} stages" * given.stages)
        for name, count in counts.most_common():
            print(f"  {count:4}  {nodes[name]:4}  {name}" if given.stages else f"  {count:4}  {name}")


if __name__ == "__main__":
    main()
