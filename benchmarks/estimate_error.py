"""How far the memory model is off on this machine: predicted beside measured, as the table "Estimates" of RESULTS.md.

    python benchmarks/estimate_error.py                                       # all cases, markdown on stdout
    python benchmarks/estimate_error.py --case densenet121:16:none,rcf,mvf,bnff,icf --json error.json

A case is a network of the zoo, its batch, and the levels, the first of which the others are compared with. Each is one
run of `bnfuse bench --estimate`: the machine is measured in the same process as the steps, between them and their
profile.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bnfuse import api
from bnfuse.benchmarking.estimates import Estimates
from bnfuse.benchmarking.results import Benchmark
from bnfuse.build.named import build_model
from bnfuse.core.text import scaled

CASES = (
    "densenet121:16:none,rcf,mvf,bnff,icf",
    "resnet50:8:none,rcf,mvf,bnff,icf",
    "mobilenetv2:16:none,rcf,mvf,bnff,icf",
)
KINDS = 6  # rows of the table by kind of kernel


def measured(case: str, repetitions: int, wait: float) -> Benchmark:
    network, batch, levels = case.split(":")
    model = build_model(network, zoo={"batch": int(batch)}).model
    return api.bench(
        model,
        levels=[levels],
        repetitions=repetitions,
        wait=wait,
        estimate=True,
        memory=False,
        progress=lambda text: print(f"{network}: {text}", file=sys.stderr, flush=True),
    )


def report(case: str, found: Benchmark) -> str:
    network, batch, _ = case.split(":")
    assert found.estimates is not None
    busy = ", ".join(f"{profile.name} {profile.others or 0:.2f}" for profile in found.profiles)
    parts = [
        (
            f"**{network}, batch {batch}** ({machine(found.estimates)}; cores that others used while timing "
            f"{found.machine['others_cpu_during'] or 0:.2f}, while profiling: {busy})"
        ),
        levels(found.estimates),
        kinds(found),
    ]
    return "\n\n".join(parts)


def machine(estimates: Estimates) -> str:
    h = estimates.hardware
    within = f" at {scaled(h.cache_bandwidth, 'B/s')}" if h.cache_bandwidth else ""
    return f"{scaled(h.flops, 'FLOP/s')}, memory {scaled(h.bandwidth, 'B/s')}, cache {h.cache >> 20} MiB{within}"


def levels(estimates: Estimates) -> str:
    """Totals, the error of single kernels, and speed-ups over the first level."""
    rows = []
    for level in estimates.levels:
        real, launches, graph = estimates.speedups(level).values()
        rows.append(
            (
                level.name,
                f"{level.step_s:.3f} s",
                f"{level.kernels_s:.3f} s",
                f"{level.launches_s:.3f} s",
                f"{level.graph_s:.3f} s",
                f"{level.median:.2f} ({level.low:.2f} to {level.high:.2f})",
                f"{real:.2f}×",
                f"{launches:.2f}× ({100 * (launches / real - 1):+.0f} %)",
                f"{graph:.2f}× ({100 * (graph / real - 1):+.0f} %)",
            )
        )
    head = (
        "level",
        "step",
        "kernels",
        "from launches",
        "from the graph",
        "kernel by kernel",
        "speed-up",
        "by launches",
        "by the graph",
    )
    return table(head, rows)


def kinds(found: Benchmark) -> str:
    """Measured and predicted time by kind of kernel, of the first and the last level."""
    rows = []
    for profile in (found.profiles[0], found.profiles[-1]):
        for row in profile.kinds[:KINDS]:
            predicted = row.predicted_s or 0.0
            ratio = f"{predicted / row.seconds:.2f}"
            rows.append((profile.name, row.kind, f"{1e3 * row.seconds:.1f} ms", f"{1e3 * predicted:.1f} ms", ratio))
    return table(("level", "kind", "measured", "predicted", "ratio"), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", metavar="NETWORK:BATCH:LEVELS", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--wait", type=float, default=60.0, help="seconds of patience for an idle machine")
    parser.add_argument("--json", type=Path, help="all that was measured, too")
    args = parser.parse_args()
    everything = {}
    for case in args.case or CASES:
        found = measured(case, args.repetitions, args.wait)
        everything[case] = found.to_json()
        print(report(case, found), end="\n\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
