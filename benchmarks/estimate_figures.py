"""The figures of [Tsai21], chapter 5, beside what bnfuse estimates, and its plots.

    python benchmarks/estimate_figures.py [--write docs/estimate.md] [--plots docs] [--quick]

Nothing is measured: the figures are the same on every machine. `--write` puts the tables into a document, between its
marks; `--plots` writes figures 5.1 to 5.6, and the scopes of reuse, into a folder (about ten minutes, most of them
GNMT's); `--quick` leaves GNMT out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from documents import write_into
from PIL import Image

from bnfuse.core.text import Section, join
from bnfuse.estimating import figures, plots
from bnfuse.estimating.assumptions import PAPER, Assumptions
from bnfuse.estimating.estimate import Estimate, estimate
from bnfuse.estimating.figures import Pair
from bnfuse.estimating.hardware import MIB, PROFILES, Hardware, profile
from bnfuse.estimating.layerwise import Passes, forward_workload
from bnfuse.estimating.order import Order
from bnfuse.estimating.quantities import cache_text
from bnfuse.estimating.reuse import SCOPES, UNBOUNDED, captured, requirements, reuse
from bnfuse.estimating.roofline import roofline
from bnfuse.estimating.sweep import Sweep, sweep
from bnfuse.estimating.workload import Workload
from bnfuse.models import build_graph

HARDWARE = profile("rtx2080ti")  # of all experiments of the paper, with the cache as each says
FASTER = profile("rx6900xt").flops  # figure 5.3
WIDER = profile("a100").bandwidth  # figure 5.4
POINTWISE = {"BatchNorm", "LayerNorm", "Activation", "Dropout", "Add"}  # the type-II layers of observation 12
CACHES = [MIB * size for size in range(24, 1001, 2)]
FEW_CACHES = [MIB * size for size in (*range(24, 130, 6), *range(136, 1001, 36))]  # GNMT: a second a point
BAR_CACHES = [MIB * size for size in (24, 64, 128, 200, 300, 400)]
COLOURS = 256  # of a picture's palette


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload of table 5.1. `settings`: how it is taken here."""

    label: str
    network: str
    batch: int
    batches: tuple[int, ...]  # of figure 5.6
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def caches(self) -> list[int]:
        return FEW_CACHES if self.network == "gnmt" else CACHES


RESNET = Case("ResNet-50", "resnet50", 32, (8, 16, 32, 64, 128))
MOBILENET = Case("MobileNetV2", "mobilenetv2", 32, (8, 16, 32, 64, 128))
GNMT = Case("GNMT", "gnmt", 32, (8, 16, 32, 64, 128, 256), {"vocabulary": 0})
TRANSFORMER = Case(
    "Transformer",
    "transformer",
    128,
    (16, 32, 64, 128, 256),
    {"vocabulary": 0, "feed_forward": 1024, "projection_relu": True, "attention_output": False},
)
PUBLISHED = {"vocabulary": 32000, "feed_forward": 4096, "projection_relu": False, "attention_output": True}
CASES = (RESNET, MOBILENET, GNMT, TRANSFORMER)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One choice made otherwise."""

    name: str
    assumptions: Assumptions = dataclasses.field(default_factory=lambda: PAPER)
    passes: Passes = dataclasses.field(default_factory=Passes)
    order: Order = "file"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


DEFAULT = Variant("as it is")


class Runs:
    """The estimates of a workload under one variant, each made once."""

    def __init__(self, case: Case, variant: Variant = DEFAULT) -> None:
        self.case, self.variant = case, variant
        self.known: dict[tuple[int, float], Estimate] = {}

    @functools.cached_property
    def workload(self) -> Workload:
        return self.make(self.case.batch)

    def make(self, batch: int) -> Workload:
        settings = {**self.case.settings, **self.variant.settings}
        graph = build_graph(self.case.network, batch=batch, **settings)
        made = forward_workload(graph, order=self.variant.order, passes=self.variant.passes)
        return dataclasses.replace(made, name=self.case.label)

    def at(self, megabytes: int, flops: float = HARDWARE.flops) -> Estimate:
        key = (megabytes, flops)
        if key not in self.known:
            self.known[key] = estimate(self.workload, with_cache(megabytes * MIB, flops), self.variant.assumptions)
        return self.known[key]

    def share(self, megabytes: int = 24) -> float:
        return 100 * self.at(megabytes).share(POINTWISE)

    def stalled(self, megabytes: int = 24) -> float:
        return 100 * self.at(megabytes).stall_s / self.at(megabytes).time_s

    def traffic_falls(self, megabytes: int) -> float:
        return 100 * (1 - self.at(megabytes).traffic_bytes / self.at(24).traffic_bytes)

    def time_falls(self, megabytes: int = 500) -> float:
        return 100 * (1 - self.at(megabytes).time_s / self.at(24).time_s)

    def speedup(self, megabytes: int = 24) -> float:
        return 100 * (self.at(megabytes).time_s / self.at(megabytes, FASTER).time_s - 1)

    def sweep(self, values: Sequence[int], **change: float) -> Sweep:
        hardware = dataclasses.replace(HARDWARE, **change)
        return sweep(self.workload, hardware, "cache", values, assumptions=self.variant.assumptions)


def with_cache(count: int, flops: float = HARDWARE.flops) -> Hardware:
    return dataclasses.replace(HARDWARE, cache=count, flops=flops)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of the paper's text. `below`: it says only that it is less."""

    where: str
    what: str
    case: Case
    paper: float
    value: Callable[[Runs], float]
    below: bool = False


FIGURES = (
    Figure("obs. 12", "type-II share of the time, 24 MB", RESNET, 46.15, Runs.share),
    Figure("obs. 12", "type-II share of the time, 24 MB", TRANSFORMER, 26.69, Runs.share),
    Figure("obs. 3", "traffic falls, 24 to 296 MB", RESNET, 70, lambda runs: runs.traffic_falls(296)),
    Figure("obs. 3", "traffic falls, 24 to 442 MB", MOBILENET, 70, lambda runs: runs.traffic_falls(442)),
    Figure("obs. 3", "traffic falls, 24 to 128 MB", TRANSFORMER, 67, lambda runs: runs.traffic_falls(128)),
    Figure("obs. 4", "traffic falls, 24 to 500 MB", GNMT, 96.6, lambda runs: runs.traffic_falls(500)),
    Figure("obs. 8", "time falls, 24 to 500 MB", RESNET, 48.1, Runs.time_falls),
    Figure("obs. 8", "time falls, 24 to 500 MB", MOBILENET, 69.6, Runs.time_falls),
    Figure("obs. 8", "time falls, 24 to 500 MB", TRANSFORMER, 26.5, Runs.time_falls),
    Figure("obs. 8", "time falls, 24 to 500 MB", GNMT, 81.1, Runs.time_falls),
    Figure("obs. 5", "speed-up of 1.71 times the rate, 24 MB", RESNET, 20, Runs.speedup),
    Figure("obs. 5", "speed-up of 1.71 times the rate, 24 MB", TRANSFORMER, 40, Runs.speedup),
    Figure("obs. 9", "speed-up of 1.71 times the rate, 24 MB", MOBILENET, 10, Runs.speedup, below=True),
    Figure("obs. 9", "speed-up of 1.71 times the rate, 24 MB", GNMT, 10, Runs.speedup, below=True),
)


def assume(name: str, **change: Any) -> Variant:
    return Variant(name, assumptions=dataclasses.replace(PAPER, **change))


def passes(name: str, **change: Any) -> Variant:
    return Variant(name, passes=dataclasses.replace(Passes(), **change))


def built(name: str, **settings: Any) -> Variant:
    return Variant(name, settings=settings)


COMMON = (
    DEFAULT,
    assume("mac_operations=2", mac_operations=2),
    assume("prefetch=next", prefetch="next"),
    assume("prefetch=none", prefetch="none"),
    assume("look_ahead=false", look_ahead=False),
    assume("demand_first=false", demand_first=False),
    assume("streams_overlap=false", streams_overlap=False),
    assume("loads_overlap=true", loads_overlap=True),
    assume("leaving_holds_space=false", leaving_holds_space=False),
    passes("in_place=true", in_place=True),
    passes("sums=consumer", sums="consumer"),
    passes("adds_copy=true", adds_copy=True),
    Variant("--order dfs", order="dfs"),
)
NORMS = (passes("norm_sweeps=2", norm_sweeps=2),)
VARIANTS = {
    RESNET.label: COMMON + NORMS,
    MOBILENET.label: COMMON + NORMS,
    TRANSFORMER.label: (
        *COMMON,
        built("projection_relu=false", projection_relu=False),
        built("attention_output=true", attention_output=True),
        built("projection_relu=false, attention_output=true", projection_relu=False, attention_output=True),
        built("feed_forward=2048", feed_forward=2048),
        built("feed_forward=4096", feed_forward=4096),
        built("vocabulary=32000", vocabulary=32000),
        built("as published: all four", **PUBLISHED),
        built("attention_dropout=0.1, relu_dropout=0.1", attention_dropout=0.1, relu_dropout=0.1),
    ),
    GNMT.label: (
        *COMMON,
        passes("step_sums=false", step_sums=False),
        built("unroll=step", unroll="step"),
        built("vocabulary=32000", vocabulary=32000),
        built("layers=4", layers=4),
    ),
}
FALLS_AT = {RESNET.label: 296, MOBILENET.label: 442, TRANSFORMER.label: 128, GNMT.label: 500}


def ridge_section() -> Section:
    rows = [
        (
            hardware.about,
            f"{hardware.flops / 1e12:.4g}",
            f"{hardware.bandwidth / 1e9:.4g}",
            f"{hardware.ridge_point:.1f}",
        )
        for hardware in PROFILES.values()
    ]
    title = "Ridge points (eq. 3.2 on table 5.2)"
    return Section.table(title, ("hardware", "TFLOP/s", "GB/s", "FLOP/byte"), rows)


def figure_section(runs: dict[str, Runs]) -> Section:
    rows = []
    for figure in FIGURES:
        if figure.case.label in runs:
            ours = figure.value(runs[figure.case.label])
            gap = "" if figure.below else f"{ours - figure.paper:+.1f}"
            paper = f"below {figure.paper:g} %" if figure.below else f"{figure.paper:g} %"
            rows.append((figure.where, figure.case.label, figure.what, paper, f"{ours:.1f} %", gap))
    columns = ("paper", "workload", "what", "printed", "estimated", "points apart")
    return Section.table("The figures of its text", columns, rows)


def variant_section(case: Case) -> Section:
    megabytes = FALLS_AT[case.label]
    rows = []
    for variant in VARIANTS[case.label]:
        runs = Runs(case, variant)
        found = (runs.stalled(), runs.share(), runs.traffic_falls(megabytes), runs.time_falls(), runs.speedup())
        rows.append((variant.name, f"{1000 * runs.at(24).time_s:.1f} ms", *(f"{value:.1f} %" for value in found)))
    columns = (
        "choice",
        "time at 24 MB",
        "stalled",
        "type II",
        f"traffic falls to {megabytes} MB",
        "time falls to 500 MB",
        "speed-up",
    )
    return Section.table(f"{case.label}: one choice made otherwise", columns, rows)


def scope_section(runs: dict[str, Runs]) -> Section:
    rows = []
    for label, each in runs.items():
        possible = captured(each.workload, UNBOUNDED).saved
        need = requirements(each.workload)
        shares = [captured(each.workload, MIB * size).saved for size in (24, 128, 180, 300, 500)]
        for scope in SCOPES:
            if possible[scope] >= plots.LEAST_SHARE * sum(possible.values()):
                cells = (f"{100 * saved[scope] / possible[scope]:.0f} %" for saved in shares)
                rows.append((label, scope, f"{possible[scope] / 1e9:.1f} GB", cache_text(need[scope].bytes), *cells))
    columns = ("workload", "scope", "possible", "needs", "24 MB", "128 MB", "180 MB", "300 MB", "500 MB")
    return Section.table(
        "Bytes kept off the memory bus, by scope of reuse, and the part that a cache captures", columns, rows
    )


def bound_section(runs: dict[str, Runs]) -> Section:
    """Observation 2: how much of a workload's computing is in layers whose reuse frequency reaches the ridge point."""
    rows = []
    for label, each in runs.items():
        points = roofline(each.workload, HARDWARE, each.variant.assumptions).points
        dense = [point for point in points if point.dense]
        bound = sum(point.compute_bound for point in dense)
        flops = [layer.flops for layer in each.workload.layers]
        share = sum(n for n, point in zip(flops, points, strict=True) if point.compute_bound) / sum(flops)
        rows.append((label, f"{len(points):,}", f"{len(dense):,}", f"{bound:,}", f"{100 * share:.0f} %"))
    columns = ("workload", "layers", "of type I", "of these compute-bound", "operations in compute-bound layers")
    return Section.table("Bound by computing at the ridge point of 21.8 FLOP/byte", columns, rows)


def sections(cases: Sequence[Case]) -> list[Section]:
    runs = {case.label: Runs(case) for case in cases}
    tables = [ridge_section(), figure_section(runs), bound_section(runs), scope_section(runs)]
    return [*tables, *(variant_section(case) for case in cases)]


def draw(cases: Sequence[Case], folder: Path) -> None:
    runs = [Runs(case) for case in cases]

    def small(name: str, figure: Any) -> None:
        write_small(figure, folder / f"estimate-{name}.png")
        print(f"{folder}/estimate-{name}.png", file=sys.stderr, flush=True)

    small(
        "roofline",
        figures.roofline_figure([roofline(each.workload, HARDWARE, each.variant.assumptions) for each in runs]),
    )
    over = [each.sweep(each.case.caches) for each in runs]
    small("traffic", figures.traffic_figure(over))
    faster = [each.sweep(each.case.caches, flops=FASTER) for each in runs]
    small("time", figures.time_figure([Pair(*both) for both in zip(over, faster, strict=True)]))
    wider = [each.sweep(each.case.caches, bandwidth=WIDER) for each in runs]
    small("bandwidth", figures.bandwidth_figure([Pair(*both) for both in zip(over, wider, strict=True)]))
    small("types", figures.breakdown_figure([each.sweep(BAR_CACHES) for each in runs]))
    small("batch", figures.batch_figure([batch_pair(each) for each in runs]))
    small("reuse", figures.reuse_figure([reuse(each.workload, thinned(each.case.caches)) for each in runs]))


def batch_pair(runs: Runs) -> Pair:
    make = functools.cache(runs.make)
    small, large = (
        sweep(make, with_cache(MIB * size), "batch", runs.case.batches, assumptions=PAPER) for size in (24, 400)
    )
    return Pair(small, large)


def thinned(caches: list[int]) -> list[int]:
    return caches[:: max(1, len(caches) // 100)]


def write_small(figure: Any, path: Path) -> None:
    """A PNG of a palette: lines and areas need no more."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE.md")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="without GNMT")
    args = parser.parse_args()
    cases = [case for case in CASES if not (args.quick and case is GNMT)]
    tables = sections(cases)
    print(join(tables))
    if args.write:
        write_into(args.write, Path(__file__).name, tables)
    if args.plots:
        draw(cases, args.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
