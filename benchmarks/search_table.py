"""Search methods over an exhaustive table: how soon each finds a sparse valid placement.

    bnfuse search small.onnx --data digits --method exhaustive -o all.jsonl      every placement, trained once
    python benchmarks/search_table.py all.jsonl --seeds 50 --plot table.png      replayed, nothing is trained

A placement is valid at most a tolerance below the accuracy with all BatchNorms. Reported of each method, over the
seeds: the share that found a valid placement with at most half of the BatchNorms, the mean number of BatchNorms of
the best one, the share that found the optimum and the mean distance to it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.evaluation import Settings, is_valid, reference_of
from bnfuse.searching.replay import Replay, replay, table_of
from bnfuse.searching.storage import read_log

METHODS = ("bo", "random", "annealing")
COLOURS = {"bo": "#1f4e9c", "random": "#6b6b6b", "annealing": "#c8472f"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the file of an exhaustive search")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument("--initial", type=int, default=Settings.initial)
    parser.add_argument("--tolerance", type=float, default=Settings.tolerance)
    parser.add_argument("--lambda", dest="penalty", type=float, nargs="+")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    try:
        space, _, history = read_log(asked.table)
        table = table_of(space, history)
    except (BnfuseError, OSError) as error:
        raise SystemExit(str(error)) from None
    reference = reference_of(history)
    valid = [e.kept for e in history if is_valid(e, reference, asked.tolerance)]
    sparse = sum(kept <= space.size // 2 for kept in valid)
    print(f"{len(history)} placements of {space.size} BatchNorms, accuracy with all {100 * reference:.2f} %")
    print(f"{len(valid)} valid, {sparse} of them with at most half of the BatchNorms, the sparsest with {min(valid)}\n")
    found, seconds = [], {}
    for method in asked.methods:
        start = time.perf_counter()
        penalty = None if asked.penalty is None else tuple(asked.penalty)
        settings = Settings(method, asked.evaluations, asked.initial, penalty, asked.tolerance)
        found.append(replay(space, table, settings, range(asked.seeds)))
        seconds[method] = (time.perf_counter() - start) / asked.seeds
    print_table(found, seconds)
    if asked.json:
        asked.json.write_text(json.dumps([result.to_json() for result in found], indent=2) + "\n")
    if asked.plot:
        plot(found, asked.plot)


def print_table(found: Sequence[Replay], seconds: dict[str, float]) -> None:
    print(f"{'method':10} {'<= half':>8} {'mean best':>10} {'optimum':>8} {'distance':>9} {'s a seed':>9}")
    for result in found:
        row = result.to_json()
        print(
            f"{result.method:10} {100 * float(row['found_half']):6.0f} % {row['mean_best']:10.2f} "  # type: ignore[arg-type]
            f"{100 * float(row['found_optimum']):6.0f} % {row['mean_distance']:9.2f} {seconds[result.method]:9.2f}"  # type: ignore[arg-type]
        )


def plot(found: Sequence[Replay], path: Path) -> None:
    """Mean BatchNorms of the best so far, and the share of seeds that are at half or less, by evaluations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result in found:
        steps = np.arange(1, result.fewest.shape[1] + 1)
        style: dict[str, Any] = {"color": COLOURS[result.method], "label": result.method, "linewidth": 1.8}
        left.plot(steps, result.fewest.mean(0), **style)
        right.plot(steps, 100 * (result.fewest <= result.size // 2).mean(0), **style)
    left.axhline(found[0].optimum, color="#999999", linestyle="--", linewidth=1, label="optimum")
    left.set_title("BatchNorms of the best placement, mean over seeds", fontsize=9, loc="left")
    right.set_title("seeds with at most half of the BatchNorms (%)", fontsize=9, loc="left")
    for axis in (left, right):
        axis.set_xlabel("evaluations", fontsize=9)
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e2e2e2", linewidth=0.8)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
