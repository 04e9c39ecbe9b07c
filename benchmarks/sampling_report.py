"""What the trainings of training_run.py say about sampled statistics: a table, and [Chen18]'s figures 6 and 7.

python benchmarks/sampling_report.py table results.jsonl
python benchmarks/sampling_report.py errors errors.jsonl --plots folder
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from training_sets import SPECS

Runs = list[dict[str, Any]]
FAILED = 0.15  # accuracy of ten classes below which a run has not converged


def read(path: Path) -> Runs:
    """Finished runs: the last of each name and seed."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(run["name"], run["seed"]): run for run in runs if "failed" not in run}.values())


# -- accuracy --------------------------------------------------------------------------------------------------------


def table(runs: Runs) -> str:
    """Markdown: mean and spread over the seeds of the last epoch's accuracy, and the difference to full statistics."""
    lines = []
    for network in dict.fromkeys(run["network"] for run in runs):
        own = [run for run in runs if run["network"] == network]
        labels = list(dict.fromkeys(run["label"] for run in own))
        scores = {label: [run["accuracy"] for run in own if run["label"] == label] for label in labels}
        base = statistics.mean(scores["BN"])
        lines += [
            f"### {network}, {own[0]['epochs']} epochs",
            "",
            "| statistics | seeds | accuracy % | to BN, points |",
        ]
        lines += ["|---|---|---|---|"]
        for label in sorted(labels, key=list(SPECS).index):
            found = scores[label]
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            mean = statistics.mean(found)
            failed = sum(score < FAILED for score in found)
            note = f" ({failed} did not converge)" if failed else ""
            lines.append(
                f"| {label} | {len(found)} | {100 * mean:.2f} ± {100 * spread:.2f}{note} | {100 * (mean - base):+.2f} |"
            )
        lines += ["", *order(scores), ""]
    return "\n".join(lines)


def order(scores: dict[str, list[float]]) -> list[str]:
    """Whether FS >= BS >= NS holds, at each ratio, and by how much more than the noise of the means."""
    lines = []
    for percent, names in (("3 %", ("FS-1/32", "BS-4/128", "NS-4/128")), ("1 %", ("FS-1/128", "BS-1/128", "NS-1/128"))):
        if not all(name in scores for name in names):
            continue
        for better, worse in itertools.pairwise(names):
            gap = 100 * (statistics.mean(scores[better]) - statistics.mean(scores[worse]))
            noise = 100 * sum(statistics.variance(scores[n]) / len(scores[n]) for n in (better, worse)) ** 0.5
            verdict = "holds" if gap > 2 * noise else "does not hold" if gap < -2 * noise else "is within the noise"
            lines.append(f"- {percent}: {better} >= {worse} {verdict}: {gap:+.2f} points, standard error {noise:.2f}")
    return lines


# -- estimation errors -----------------------------------------------------------------------------------------------


def plot_correlation(runs: Runs, path: Path) -> None:
    """Figure 6: how the errors of the mean of two BNs go together over the steps of the first epoch."""
    from matplotlib import pyplot

    columns = 4
    rows = -(-len(runs) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.1 * columns, 3.1 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(runs) :]:
        axis.set_axis_off()
    for axis, run in zip(axes.flat, runs, strict=False):
        found = correlation(run)
        image = axis.imshow(found, vmin=-1, vmax=1, cmap="RdBu_r")
        axis.set_title(f"{run['label']}  |r| {off_diagonal(found):.2f}", fontsize=9)
        axis.set_xlabel("BN")
    figure.colorbar(image, ax=axes, shrink=0.6, label="correlation of the errors of the mean")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def correlation(run: dict[str, Any]) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.corrcoef(np.array(run["errors"])[:, :, 0].T))


def off_diagonal(matrix: np.ndarray) -> float:
    """The mean size of the entries off the diagonal."""
    return float(np.abs(matrix[~np.eye(len(matrix), dtype=bool)]).mean())


def plot_errors(runs: Runs, path: Path) -> None:
    """Figure 7: the distribution of the errors of mean and standard deviation, over BNs and steps."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axis, part, what in zip(axes, (0, 1), ("mean", "standard deviation"), strict=True):
        values = [np.log10(np.maximum(np.array(run["errors"])[:, :, part].reshape(-1), 1e-4)) for run in runs]
        axis.violinplot(values, showmedians=True, showextrema=False)
        axis.set_xticks(range(1, len(runs) + 1), [run["label"] for run in runs], rotation=40, ha="right", fontsize=8)
        axis.set_ylabel(f"log10 of the error of the {what} / sigma", fontsize=8)
        axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def error_table(runs: Runs) -> str:
    lines = [
        "| statistics | error of the mean, median | of the standard deviation | correlation between BNs |",
        "|---|---|---|---|",
    ]
    for run in runs:
        mean, std = (np.median(np.array(run["errors"])[:, :, part]) for part in (0, 1))
        lines.append(f"| {run['label']} | {mean:.3f} | {std:.3f} | {off_diagonal(correlation(run)):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "errors"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--plots", type=Path, default=Path())
    args = parser.parse_args()
    runs = read(args.results)
    if args.what == "table":
        print(table(runs))
        return
    order = list(SPECS)
    runs = sorted((run for run in runs if "errors" in run), key=lambda run: order.index(run["label"]))
    args.plots.mkdir(parents=True, exist_ok=True)
    plot_correlation(runs, args.plots / "sampling-correlation.png")
    plot_errors(runs, args.plots / "sampling-errors.png")
    print(error_table(runs))


if __name__ == "__main__":
    main()
