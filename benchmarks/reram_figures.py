"""[Joardar22]'s figures 7, 9(b), 11, 12 and 14 from the pipeline model, and how they hang on each assumption.

    python benchmarks/reram_figures.py [--assume KEY=VALUE]... [--plot docs/reram.png] [--vary]

Nothing is measured: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.figures import finish, pyplot_figure, save_figure
from bnfuse.core.text import Section, join
from bnfuse.estimating.reram.assumptions import ReramAssumptions
from bnfuse.estimating.reram.layers import Network, network_of
from bnfuse.estimating.reram.pipeline import Pipeline, conventional_s, pipeline
from bnfuse.estimating.settings import settle
from bnfuse.models import build_graph

NETWORKS: dict[str, dict[str, Any]] = {
    "vgg11": {"hidden": 512},
    "vgg16": {"hidden": 512},
    "vgg19": {"hidden": 512},
    "resnet18": {"stem": "small"},
}
STACKS = ("2r2g", "3r1g")
PLACEMENTS = {"All-BN": None, "BO-N": "paper"}
VARIATIONS = (
    "gpu_sharing=time",
    "gpu_sharing=own",
    "norm_grad_reads=2",
    "norm_bytes=2",
    "error_weights=false",
    "gradients=outer",
    "gradients=mapped",
    "buffers=false",
    "norm_stages=true",
    "replication=uniform",
    "replication=none",
    "group=1",
    "group=96",
    "cell_bits=4",
    "dac_bits=2",
)

Found = dict[tuple[str, str, str], Pipeline | None]  # by network, stack, placement; None: does not fit


def networks() -> dict[tuple[str, str], Network]:
    """CIFAR-10's networks by name and placement."""
    found = {}
    for name, settings in NETWORKS.items():
        graph = build_graph(name, batch=1, image=32, classes=10, **settings)
        for placement, remove in PLACEMENTS.items():
            found[name, placement] = network_of(graph, remove)
    return found


def pipelines(layers: dict[tuple[str, str], Network], assumed: ReramAssumptions) -> Found:
    found: Found = {}
    for (name, placement), network in layers.items():
        for config in ("1r3g", *STACKS):
            try:
                found[name, config, placement] = pipeline(network, config, assumed)
            except BnfuseError:
                found[name, config, placement] = None
    return found


def ratio(found: Pipeline | None) -> float:
    """BN against Conv/FC, the bars of figures 7 and 11."""
    return found.gpu_s / found.reram_s if found else float("nan")


def reduction(found: Found, name: str) -> float:
    """By how much BO-N lowers the period on 3R1G (figure 12)."""
    before, after = found[name, "3r1g", "All-BN"], found[name, "3r1g", "BO-N"]
    return 1 - after.period_s / before.period_s if before and after else float("nan")


def fewer_instructions(layers: dict[tuple[str, str], Network], name: str) -> float:
    before, after = (sum(norm.elements for norm in layers[name, p].norms) for p in PLACEMENTS)
    return 1 - after / before


def speedup(found: Pipeline | None, layers: dict[tuple[str, str], Network], name: str) -> float:
    """Of a batch, against the conventional GPU with all BatchNorms (figure 14)."""
    if found is None:
        return float("nan")
    assumed = found.assumptions
    return conventional_s(layers[name, "All-BN"], assumed) * assumed.batch / found.step_s


def sections(layers: dict[tuple[str, str], Network], found: Found, assumed: ReramAssumptions) -> list[Section]:
    latency = [
        (
            name,
            *(
                cell
                for p in PLACEMENTS
                for config in STACKS
                for cell in (microseconds(found[name, config, p]), f"{ratio(found[name, config, p]):.2f}")
            ),
        )
        for name in NETWORKS
    ]
    heads = [f"{p} {config}" for p in PLACEMENTS for config in STACKS]
    columns = ("network", *(cell for head in heads for cell in (f"{head}, Conv/FC us", "BN")))
    gains = [
        (name, f"{100 * reduction(found, name):.1f} %", f"{100 * fewer_instructions(layers, name):.1f} %")
        for name in NETWORKS
    ]
    gains.append(("average", *averages(layers, found)))
    gains.append(("paper", "67.1 %", "82 %"))
    speeds = [
        (
            name,
            f"{conventional_s(layers[name, 'All-BN'], assumed) / conventional_s(layers[name, 'BO-N'], assumed):.2f}",
            *(f"{speedup(found[name, config, p], layers, name):.1f}" for p in PLACEMENTS for config in STACKS),
        )
        for name in NETWORKS
    ]
    fits = [name for name in NETWORKS if found[name, "1r3g", "All-BN"]]
    return [
        Section.table("Figures 7 and 11: longest Conv/FC stage, and longest BatchNorm as a multiple", columns, latency),
        Section.table("Figures 12 and 9(b)", ("network", "shorter period on 3R1G", "fewer instructions"), gains),
        Section.table("Figure 14: speed-up over a GPU with All-BN", ("network", "GPU BO-N", *heads), speeds),
        Section.lines("1R3G", [f"fits: {', '.join(fits) or 'none'}"]),
    ]


def averages(layers: dict[tuple[str, str], Network], found: Found) -> tuple[str, str]:
    lower = fmean(reduction(found, name) for name in NETWORKS)
    fewer = fmean(fewer_instructions(layers, name) for name in NETWORKS)
    return f"{100 * lower:.1f} %", f"{100 * fewer:.1f} %"


def microseconds(found: Pipeline | None) -> str:
    return f"{1e6 * found.reram_s:.1f}" if found else "-"


def variations(layers: dict[tuple[str, str], Network], assumed: ReramAssumptions) -> Section:
    """The same figures with one assumption changed at a time."""
    rows = []
    for change in ("as assumed", *VARIATIONS):
        changed = settled([change], assumed) if "=" in change else assumed
        found = pipelines(layers, changed)
        lower = [reduction(found, name) for name in NETWORKS]
        ratios = [[ratio(found[name, config, "All-BN"]) for name in NETWORKS] for config in STACKS]
        best = max(speedup(found[name, "3r1g", "BO-N"], layers, name) for name in NETWORKS)
        rows.append((change, f"{100 * fmean(lower):.1f} %", *(span(values) for values in ratios), f"{best:.1f}"))
    columns = ("assumption", "shorter period, average", "BN / Conv, 2R2G All-BN", "3R1G All-BN", "largest speed-up")
    return Section.table("One assumption changed", columns, rows)


def span(values: Sequence[float]) -> str:
    known = [value for value in values if value == value]
    missing = len(values) - len(known)
    text = f"{min(known):.2f} to {max(known):.2f}" if known else "-"
    return text + (f" ({missing} does not fit)" if missing else "")


def settled(pairs: Sequence[str], base: ReramAssumptions) -> ReramAssumptions:
    given = dict(pair.split("=", 1) for pair in pairs)
    (changed,) = settle(given, base)
    return changed


CONV, NORM = "#1f4e9c", "#d98324"


def draw(layers: dict[tuple[str, str], Network], found: Found, path: str) -> None:
    figure = pyplot_figure()(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, placement, title in zip(
        axes[0], PLACEMENTS, ("Figure 7: All-BN", "Figure 11: BO-N (longest stage, Conv/FC = 1)"), strict=True
    ):
        draw_ratios(axis, found, placement)
        axis.set_title(title, fontsize=10, loc="left")
    draw_reductions(axes[1][0], layers, found)
    draw_speedups(axes[1][1], layers, found)
    figure.suptitle("[Joardar22] from the pipeline model", x=0.01, ha="left", fontsize=12, fontweight="bold")
    save_figure(figure, path)


def draw_ratios(axis: Any, found: Found, placement: str) -> None:
    keys = [(name, config) for name in NETWORKS for config in STACKS]
    values = [ratio(found[name, config, placement]) for name, config in keys]
    axis.bar([i - 0.2 for i in range(len(keys))], [1] * len(keys), width=0.4, color=CONV, label="Conv/FC (ReRAM)")
    axis.bar([i + 0.2 for i in range(len(keys))], values, width=0.4, color=NORM, label="BN (GPU)")
    for index, value in enumerate(values):
        axis.annotate(f"{value:.2f}", (index + 0.2, value), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(range(len(keys)), [f"{name}\n{config.upper()}" for name, config in keys], fontsize=7)
    axis.legend(fontsize=8, frameon=False)
    tidy(axis)


def draw_reductions(axis: Any, layers: dict[tuple[str, str], Network], found: Found) -> None:
    lower = [100 * reduction(found, name) for name in NETWORKS]
    fewer = [100 * fewer_instructions(layers, name) for name in NETWORKS]
    for values, offset, color, label, stated in (
        (lower, -0.2, CONV, "shorter period (figure 12)", 67.1),
        (fewer, 0.2, NORM, "fewer GPU instructions (figure 9b)", 82),
    ):
        values = [*values, fmean(values)]
        places = [i + offset for i in range(len(values))]
        axis.bar(places, values, width=0.4, color=color, label=label)
        for place, value in zip(places, values, strict=True):
            where = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": "white"}
            axis.annotate(f"{value:.0f}", (place, value), (0, -14), **where)
        axis.plot([4 + offset - 0.2, 4 + offset + 0.2], [stated] * 2, color="black", linewidth=2)
    axis.set_xticks(range(5), [*NETWORKS, "average"], fontsize=8)
    axis.set_ylim(0, 125)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    axis.set_title("BO-N against All-BN on 3R1G, per cent (black: the paper)", fontsize=10, loc="left")
    tidy(axis)


def draw_speedups(axis: Any, layers: dict[tuple[str, str], Network], found: Found) -> None:
    shades = ("#b8b8b8", "#e8b67f", "#7ea6de", "#1f4e9c")
    for index, (placement, config) in enumerate((p, c) for p in PLACEMENTS for c in STACKS):
        values = [speedup(found[name, config, placement], layers, name) for name in NETWORKS]
        places = [i + 0.2 * (index - 1.5) for i in range(len(values))]
        axis.bar(places, values, width=0.2, color=shades[index], label=f"{config.upper()} {placement}")
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(NETWORKS)), list(NETWORKS), fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    axis.set_title("Figure 14: speed-up over a GPU with All-BN (line)", fontsize=10, loc="left")
    tidy(axis)


def tidy(axis: Any) -> None:
    limit = axis.get_xlim()
    finish(axis)
    axis.set_xlim(limit)
    axis.grid(visible=False, axis="x")
    axis.grid(axis="y", color="#e2e2e2", linewidth=0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assume", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--vary", action="store_true", help="also with one assumption changed at a time")
    given = parser.parse_args()
    assumed = settled(given.assume, ReramAssumptions())
    layers = networks()
    found = pipelines(layers, assumed)
    parts = sections(layers, found, assumed)
    if given.vary:
        parts.append(variations(layers, assumed))
    print(join(parts))
    if given.plot:
        draw(layers, found, given.plot)


if __name__ == "__main__":
    main()
