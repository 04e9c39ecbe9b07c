"""All the benchmarks that RESULTS.md keeps, through `bnfuse.bench`, and the tables for it in Markdown.

    python benchmarks/full_run.py --folder results                      # all cases: a process each, about an hour
    python benchmarks/full_run.py --folder results --only densenet121   # one
    python benchmarks/full_run.py --folder results --table              # the tables of what is there

A case is one JSON file in the folder (that of `bnfuse bench --json`); one that is there is not run again. Every case
waits for an idle machine. Needs torch and a C++ compiler for torch.compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TORCH = ("torch", "torch-cl", "torch-compile")
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure that must be reached: `of` computes it from a case's JSON."""

    what: str
    of: Callable[[Json], float]
    limit: float
    at_most: bool = False

    def line(self, found: Json) -> tuple[str, str, str, str]:
        value = self.of(found)
        met = value <= self.limit if self.at_most else value >= self.limit
        sign = "≤" if self.at_most else "≥"
        return self.what, f"{sign} {self.limit:g}", f"{value:.3g}", "yes" if met else "**no**"


@dataclasses.dataclass(frozen=True)
class Case:
    network: str
    title: str
    levels: tuple[str, ...] = ("icf",)
    against: tuple[str, ...] = TORCH
    batch: int = 16
    image: int | tuple[int, int] = 224
    goals: tuple[Goal, ...] = ()
    extra: tuple[str, ...] = ()  # of profile, compile_time, memory


def result(found: Json, name: str) -> Json:
    return next(r for r in found["results"] if r["name"] == name)


def faster(name: str, against: str, field: str = "min") -> Callable[[Json], float]:
    """The ratio of two candidates' times or memory."""

    def of(found: Json) -> float:
        return next(r[field] for r in found["ratios"] if (r["name"], r["against"]) == (name, against))

    return of


def ahead_of_torch(field: str = "min") -> Callable[[Json], float]:
    """icf against the best of torch's."""
    return lambda found: min(r[field] for r in found["ratios"] if r["name"] == "icf" and r["against"] in TORCH)


def over_floor(found: Json) -> float:
    """The step's time over that of its convolutions' and products' FLOPs at the rate of the best matrix product."""
    (profile,) = (p for p in found["profile"] if p["name"] == "icf")
    return result(found, "icf")["min_s"] * profile["limits"]["flops_per_s"] / profile["flops"]


def value(name: str, field: str) -> Callable[[Json], float]:
    return lambda found: result(found, name)[field]


def memory_of_torch(found: Json) -> float:
    return result(found, "icf")["peak_bytes"] / result(found, "torch")["peak_bytes"]


def family(network: str, limit: float, batch: int = 16) -> Case:
    title = f"{network}, batch {batch}, 224×224"
    return Case(network, title, batch=batch, goals=(Goal("faster than the best torch", ahead_of_torch(), limit),))


def other_size(batch: int, image: int | tuple[int, int], text: str) -> Case:
    goal = Goal("faster than the best torch", ahead_of_torch(), 1.0)
    return Case("densenet121", f"densenet121, batch {batch}, {text}", batch=batch, image=image, goals=(goal,))


def ablation(title: str, none: str, bnff: str, icf: str) -> Case:
    goals = (
        Goal("icf faster than none", faster(icf, none), 1.437),
        Goal("bnff faster than none", faster(bnff, none), 1.257),
        Goal("icf's forward faster than none's", faster(icf, none, "forward"), 1.479),
    )
    return Case(
        "densenet121",
        title,
        levels=(none, f"rcf{none[4:]}", f"mvf{none[4:]}", bnff, icf),
        against=(),
        goals=goals,
        extra=("memory",),
    )


CASES: dict[str, Case] = {
    "densenet121": Case(
        "densenet121",
        "densenet121, batch 16, 224×224",
        against=("ort", *TORCH),
        extra=("profile", "compile_time", "memory"),
        goals=(
            *(Goal(f"faster than {p}, {f}", faster("icf", p, f), 1.4) for p in TORCH[1:] for f in ("min", "median")),
            Goal("faster than torch", faster("icf", "torch"), 1.8),
            Goal("faster than onnxruntime-training", faster("icf", "ort"), 2.5),
            Goal("step over its FLOPs at the rate of a matrix product", over_floor, 1.15, at_most=True),
            Goal("peak memory over torch's", memory_of_torch, 0.55, at_most=True),
            Goal("compiling with an empty cache, s", value("icf", "compile_s"), 60, at_most=True),
            Goal("compiling from the cache, s", value("icf", "compile_warm_s"), 3, at_most=True),
            Goal("rewriting, s", value("icf", "rewrite_s"), 3, at_most=True),
        ),
    ),
    "ablation": ablation("Levels of densenet121, pool-first off", "none", "bnff", "icf+no-pool-first"),
    "ablation-pool-first": ablation(
        "Levels of densenet121, pool-first on", "none+pool-first", "bnff+pool-first", "icf"
    ),
    "mobilenetv2": family("mobilenetv2", 1.6),
    "squeezenet": family("squeezenet", 1.3),
    "googlenet": family("googlenet", 1.3),
    "resnet50": family("resnet50", 1.15),
    "vgg16": family("vgg16", 1.1, batch=8),
    "batch-4": other_size(4, 224, "224×224"),
    "batch-32": other_size(32, 224, "224×224"),
    "image-160": other_size(16, 160, "160×160"),
    "image-190x226": other_size(16, (190, 226), "190×226"),
}


def run_case(name: str, args: argparse.Namespace) -> None:
    """In this process: build, measure, write the JSON file and the plot."""
    import onnx_ir as ir

    import bnfuse
    from bnfuse.build import build_training_graph
    from bnfuse.commands.output import Progress, to_json
    from bnfuse.models import build_forward

    case = CASES[name]
    forward = build_forward(case.network, batch=case.batch, image=case.image)
    found = bnfuse.bench(
        ir.from_proto(build_training_graph(forward)),
        name=case.title,
        levels=case.levels,
        against=case.against,
        repetitions=args.repetitions,
        wait=args.wait,
        threads=args.threads,
        plot=args.folder / f"{name}.svg",
        progress=Progress(),
        **{"memory": False, **dict.fromkeys(case.extra, True)},
    )
    (args.folder / f"{name}.json").write_text(to_json(found.to_json()) + "\n")
    (args.folder / f"{name}.txt").write_text(f"{found}\n")


def tables(folder: Path) -> str:
    """Markdown of all cases in the folder."""
    found = {name: json.loads(path.read_text()) for name in CASES if (path := folder / f"{name}.json").exists()}
    if not found:
        return "no results yet\n"
    parts = [machine_text(next(iter(found.values()))["machine"])]
    parts += [case_text(CASES[name], data) for name, data in found.items()]
    return "\n\n".join(parts) + "\n"


def machine_text(machine: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Machine: {machine['cpu_model']} (LLVM names it {machine['cpu']}), {machine['cores']} cores, "
        f"{machine['threads']} threads; {machine['system']}; Python {machine['python']}, {versions}."
    )


def case_text(case: Case, found: Json) -> str:
    machine = found["machine"]
    quiet = ", ".join(
        f"{when} {machine[f'others_cpu_{when}']:.2f}" for when in ("before", "during") if machine[f"others_cpu_{when}"]
    )
    lines = [
        f"## {case.title}",
        "",
        f"{found['repetitions']} repetitions; cores that others used: {quiet or 'none'}.",
        "",
    ]
    lines += [results_table(found, case.levels[-1]), "", goals_table(case, found)]
    return "\n".join(lines)


def results_table(found: Json, ours: str) -> str:
    best = result(found, ours)
    rows = [
        (
            f"**{r['name']}**" if r is best else r["name"],
            f"{r['min_s']:.3f} s",
            f"{r['median_s']:.3f} s",
            f"{r['forward_min_s']:.3f} s",
            f"{r['backward_min_s']:.3f} s",
            f"{r['peak_bytes'] / 2**20:.0f} MiB" if r["peak_bytes"] else "-",
            f"{r['min_s'] / best['min_s']:.2f}×",
            f"{r['median_s'] / best['median_s']:.2f}×",
        )
        for r in found["results"]
    ]
    head = ("candidate", "min", "median", "forward", "backward", "peak memory", f"{ours} faster, min", "median")
    return markdown(head, rows)


def goals_table(case: Case, found: Json) -> str:
    return markdown(("goal", "wanted", "found", "met"), [goal.line(found) for goal in case.goals])


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("results"))
    parser.add_argument("--only", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, run nothing")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--wait", type=float, default=600, help="seconds of patience for an idle machine")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.only and args.only not in CASES:
        parser.error(f"there is no case {args.only}: there are {', '.join(CASES)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only:
        run_case(args.only, args)
    elif not args.table:
        for name in CASES:
            if not (args.folder / f"{name}.json").exists():
                print(f"== {name}", file=sys.stderr)
                again = ["--folder", str(args.folder), "--repetitions", str(args.repetitions), "--wait", str(args.wait)]
                command = [sys.executable, __file__, "--only", name, *again, "--threads", str(args.threads)]
                subprocess.run(command, check=False)  # the next case may do
    print(tables(args.folder))


if __name__ == "__main__":
    main()
