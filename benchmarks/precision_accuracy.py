"""What bfloat16 costs in accuracy: networks on Fashion-MNIST in float32 and in bf16 on a CPU, seed by seed.

    python benchmarks/precision_accuracy.py --out accuracy.jsonl          # again: what is missing
    python benchmarks/precision_accuracy.py --out accuracy.jsonl --show   # a table

Three seeds, each in both precisions, level icf. fashion_accuracy.py says how they train.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from fashion_accuracy import IMAGE, Line, lines_of, parser_of, run_missing, train

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.models import build_forward

PRECISIONS = ("fp32", "bf16")


def show(lines: list[dict[str, Any]]) -> str:
    """Make a table: by network and seed the accuracies in percent, and how far bf16 is from float32."""
    runs = {(line["network"], line["seed"], line["precision"]): 100 * line["accuracy"] for line in lines}
    rows = ["| network | seed | fp32 | bf16 | apart |", "| --- | ---: | ---: | ---: | ---: |"]
    for network in dict.fromkeys(name for name, _, _ in runs):
        seeds = sorted({seed for name, seed, _ in runs if name == network})
        pairs = {seed: [runs.get((network, seed, precision)) for precision in PRECISIONS] for seed in seeds}
        whole = {seed: pair for seed, pair in pairs.items() if None not in pair}
        rows += [f"| {network} | {s} | {a:.2f} | {b:.2f} | {b - a:+.2f} |" for s, (a, b) in whole.items()]
        if len(whole) > 1:
            a, b = (statistics.mean(column) for column in zip(*whole.values(), strict=True))
            rows.append(f"| {network} | mean | {a:.2f} | {b:.2f} | {b - a:+.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.show:
        print(show(lines_of(options.out)))
        return

    def once(precision: str, seed: int, data: Path) -> Line:
        forward = build_forward(options.network, batch=options.batch, image=IMAGE, channels=1, classes=10, seed=seed)
        model = bnfuse.rewrite(build_training_graph(forward), level="icf").model
        return train(model, seed, data, options, "--threads", str(options.threads), "--precision", precision)

    run_missing(options, "precision", PRECISIONS, {"batch": options.batch}, once)


if __name__ == "__main__":
    main()
