"""What bfloat16 costs in accuracy: networks on Fashion-MNIST in float32 and in bf16 on a CPU, seed by seed.

    python benchmarks/precision_accuracy.py --out accuracy.jsonl          # again: what is missing
    python benchmarks/precision_accuracy.py --out accuracy.jsonl --show   # a table

Three seeds, each in both precisions. SGD with momentum, a cosine from --lr with half an epoch of warm-up, flips and
shifted crops, level icf. A seed decides the initial values, the order of images and their augmentation. Each run is a
process of `bnfuse train`, and a line of JSON as soon as it is done: the accuracy after the last epoch on all 10,000
images of the test part, and seconds, which are for planning alone. Needs Debian's dataset-fashion-mnist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks_accuracy import IMAGE, write_data

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.models import build_forward

PRECISIONS = ("fp32", "bf16")


def run(precision: str, seed: int, data: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train once. Raises SystemExit with what was said where it fails."""
    graph, metrics = folder / "train.onnx", folder / "run.jsonl"
    forward = build_forward(options.network, batch=options.batch, image=IMAGE, channels=1, classes=10, seed=seed)
    bnfuse.save(bnfuse.rewrite(build_training_graph(forward), level="icf").model, graph)
    metrics.unlink(missing_ok=True)
    begun = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bnfuse", "train", str(graph), "--data", str(data), "--seed", str(seed)),
            *("--epochs", str(options.epochs), "--eval-every", str(options.epochs), "--lr", str(options.lr)),
            *("--weight-decay", "2e-4", "--warm-up", "0.5", "--augment", "flip,pad-crop:2"),
            *("--threads", str(options.threads), "--precision", precision, "--metrics", str(metrics)),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{options.network} {precision}, seed {seed}: {done.stderr[-2000:]}")
    last = json.loads(metrics.read_text().splitlines()[-1])
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "precision": precision,
        "seed": seed,
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "seconds": seconds,
    }


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=8_000, help="of the training part")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.show:
        print(show(lines))
        return
    recipe = {name: getattr(options, name) for name in ("network", "batch", "images", "epochs", "lr")}
    done = {(line["precision"], line["seed"]) for line in lines if recipe.items() <= line.items()}
    with tempfile.TemporaryDirectory(prefix="bnfuse-accuracy-") as place:
        data = write_data(Path(place), options.images)
        for seed in range(options.seeds):
            for precision in PRECISIONS:
                if (precision, seed) not in done:
                    found = {**run(precision, seed, data, Path(place), options), **recipe}
                    with options.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
