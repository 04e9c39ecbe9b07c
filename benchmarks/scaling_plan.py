"""Data-parallel training to 1,024 workers by simulation, beside the curves of [Iandola16] and what was measured here.

    python benchmarks/scaling_plan.py [--results parallel.jsonl ...] [--write docs/parallel.md] [--plot docs/plan.png]

The paper's cluster is that of benchmarks/design_space.py: a K20 in each node, its network fitted to one row of table
3.2. There the schedule of a step with buckets beside the backward pass stands beside equation 3.4. What parallel.py
measured are schedules of compiled steps; they are simulated on the network that is fitted to them, and on others.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import design_space
import parallel_show
from documents import write_into

from bnfuse.core.text import Section, join, percent
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import profile
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.parallel.fit import Fit
from bnfuse.estimating.parallel.plot import plot
from bnfuse.estimating.parallel.scaling import Network, Scaling
from bnfuse.estimating.parallel.schedule import Schedule, bucketed
from bnfuse.estimating.parallel.simulation import scale_schedule
from bnfuse.models import build_graph

BATCH = 1024
COUNTS = tuple(2**k for k in range(11))
# tables 3.2, 3.3 and the text, in images a second: the 47x of GoogLeNet are of 72 epochs in place of 64
PRINTED = {"NiN": {32: 23.0, 128: 39.0}, "GoogLeNet": {32: 23.0, 128: 47.0 * 72 / 64}}
BETWEEN_HOSTS = (  # by data sheets: a network card for each GPU
    Network(50e9, 5e-6, "400 Gbit/s a GPU"),
    Network(12.5e9, 10e-6, "100 Gbit/s a GPU"),
)


@functools.cache
def of_paper(name: str) -> Schedule:
    """The step of a batch of 1,024 on a K20, with as many bytes of gradients as the paper has. How its time is divided
    over the layers is estimated."""
    workload = forward_workload(build_graph(name.lower(), batch=BATCH))
    times = [layer.time_s for layer in estimate(workload, profile("rtx2080ti")).layers]
    found = bucketed(workload, times).lasting(BATCH / design_space.images_per_second(name))
    factor = design_space.gradients(name) / found.gradient_bytes
    exchanges = tuple(dataclasses.replace(each, bytes=round(each.bytes * factor)) for each in found.exchanges)
    return dataclasses.replace(found, exchanges=exchanges, name=name)


def papers() -> dict[tuple[str, str], Scaling]:
    """By network and way: equation 3.4, and the schedule with buckets, its messages around a ring and by halves."""
    gemini = Network(design_space.fitted_bandwidth())
    found = {}
    for name in PRINTED:
        schedule = of_paper(name)
        found[name, "eq. 3.4"] = scale_schedule(schedule.at_the_end(), None, COUNTS, gemini, "tree")
        found[name, "tree"] = scale_schedule(schedule, None, COUNTS, gemini, "tree")
        found[name, "ring"] = scale_schedule(schedule, None, COUNTS, gemini, "ring")
    return found


def papers_section() -> Section:
    rows = []
    found = papers()
    for name, printed in PRINTED.items():
        for count in (32, 128, 1024):
            rows.append(
                (
                    name,
                    str(count),
                    f"{printed[count]:.3g}x" if count in printed else "",
                    *(f"{found[name, way].at(count).speedup:.3g}x" for way in ("eq. 3.4", "tree", "ring")),
                )
            )
    columns = ("network", "workers", "paper", "eq. 3.4", "its tree, in buckets", "ring, in buckets")
    return Section.table("A batch of 1,024 on K20s (strong scaling)", columns, rows)


def plans(lines: list[parallel_show.Line], fits: dict[str, Fit]) -> list[Scaling]:
    """Weak scaling of each measured schedule, on the fitted network and by data sheets, around a ring and by halves."""
    found = []
    for world, fitted in fits.items():
        for schedule in {
            point.schedule.name: point.schedule for point in parallel_show.measured(lines, world)
        }.values():
            own = dataclasses.replace(fitted.network, name=f"fitted, {world}")
            for network in (own, *(BETWEEN_HOSTS if world == "NCCL" else ())):
                for algorithm in ("ring", "halving"):
                    how = (schedule, None, COUNTS, network, algorithm, "weak")
                    found.append(scale_schedule(*how, jitter=fitted.jitter))  # type: ignore[arg-type]
    return found


def plan_section(found: list[Scaling]) -> Section:
    counts = (2, 8, 32, 128, 1024)
    rows = [
        (each.name, each.network.name, each.strategy, *(percent(each.at(count).efficiency) for count in counts))
        for each in found
    ]
    columns = ("step", "network", "messages by", *(f"{count:,}" for count in counts))
    return Section.table("Efficiency on so many workers (weak scaling)", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, action="append", default=[], help="of parallel.py")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    sections = [papers_section()]
    for path in args.results:
        lines = parallel_show.read(path)
        fits = parallel_show.fits(lines)
        for fitted in fits.values():
            sections += fitted.sections()
        if found := plans(lines, fits):
            sections.append(plan_section(found))
    if args.write:
        write_into(args.write, "scaling_plan.py", sections)
    else:
        print(join(sections))
    if args.plot:
        curves = papers()
        shown = [
            dataclasses.replace(curve, name=f"{name}, {way}") for (name, way), curve in curves.items() if way != "tree"
        ]
        marks = [(f"{name}, eq. 3.4", count, x) for name, printed in PRINTED.items() for count, x in printed.items()]
        plot(
            shown, args.plot, marks=marks, title="A batch of 1,024 on K20s: the paper's formula, and buckets in a ring"
        )


if __name__ == "__main__":
    main()
