"""What statistics of few images cost: resnet20 on Fashion-MNIST by 4 ranks of 8 images, SyncBN and its cheaper forms.

    python benchmarks/ranks_accuracy.py --out accuracy.jsonl            # 8 forms, 3 seeds; again: what is missing
    python benchmarks/ranks_accuracy.py --out accuracy.jsonl --ranks 4  # the same by mpirun
    python benchmarks/ranks_accuracy.py --out accuracy.jsonl --show     # a table

sync     statistics of all 32 images
local    those of a rank's 8, as under DistributedDataParallel
fs       of a patch of every rank's maps
ranks    of the first one or two ranks' images (batch sampling over ranks, [Chen18], section 4.3)
vdn      of virtual samples, which all ranks draw alike; fs+vdn: of both

By default one process trains with all 32 images, whose statistics it takes as the ranks would: of all, of groups of 8,
of a run of 8 or 16. Four ranks do the same but for the order of sums (ranks_equal.py), and far slower where they
share a core. SGD with momentum, a cosine from --lr with half an epoch of warm-up, flips and shifted crops. A seed
decides the initial values, the order of images, their augmentation and what is sampled. Each run is a process of
`bnfuse train` with a thread a rank, and a line of JSON as soon as it is done: the accuracy after the last epoch on all
10,000 images of the test part, and seconds, which are for planning alone. Needs Debian's dataset-fashion-mnist, for
ranks bnfuse[mpi] too.
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

import numpy as np

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.data import sources
from bnfuse.models import build_forward

RANKS, EACH, IMAGE = 4, 8, 28
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of rewrite: of a rank, of one process
    "sync": ({"sync": True}, {}),
    "local": ({}, {"local_bn": EACH}),
    "fs:1/16": ({"sync": True, "sample": "fs:1/16"}, {"sample": "fs:1/16"}),
    "fs:1/32": ({"sync": True, "sample": "fs:1/32"}, {"sample": "fs:1/32"}),
    "2 ranks": ({"sync": True, "sync_ranks": 2}, {"sample": f"bs:{2 * EACH}"}),
    "1 rank": ({"sync": True, "sync_ranks": 1}, {"sample": f"bs:{EACH}"}),
    "vdn:2": ({"sync": True, "sample": "vdn:2"}, {"sample": "vdn:2"}),
    "fs:1/32+vdn:2": ({"sync": True, "sample": "fs:1/32+vdn:2"}, {"sample": "fs:1/32+vdn:2"}),
}


def write_data(folder: Path, images: int) -> Path:
    """Write the first images to train on, and all to test on, as arrays."""
    train, test = (sources.fashion_mnist().parts[name] for name in ("train", "test"))
    path = folder / "data.npz"
    np.savez(path, x=train.x[:images], y=train.y[:images], x_test=test.x, y_test=test.y)
    return path


def graph_of(form: str, seed: int, network: str, ranks: int) -> Any:
    """Build and rewrite the training graph of a rank, or of one process; the seed draws the initial values."""
    forward = build_forward(network, batch=EACH * RANKS // ranks, image=IMAGE, channels=1, classes=10, seed=seed)
    return bnfuse.rewrite(build_training_graph(forward), level="icf", **FORMS[form][ranks == 1]).model


def run(form: str, seed: int, data: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train once. Raises SystemExit with what was said where it fails."""
    graph, metrics = folder / "train.onnx", folder / "run.jsonl"
    bnfuse.save(graph_of(form, seed, options.network, options.ranks), graph)
    metrics.unlink(missing_ok=True)
    begun = time.perf_counter()
    done = subprocess.run(
        [
            *(["mpirun", "-n", str(RANKS)] if options.ranks > 1 else []),
            *(sys.executable, "-m", "bnfuse", "train", str(graph), "--data", str(data), "--seed", str(seed)),
            *("--epochs", str(options.epochs), "--eval-every", str(options.epochs), "--lr", str(options.lr)),
            *("--weight-decay", "2e-4", "--warm-up", "0.5", "--augment", "flip,pad-crop:2", "--threads", "1"),
            *("--metrics", str(metrics)),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{form}, seed {seed}: {done.stderr[-2000:]}")
    last = json.loads(metrics.read_text().splitlines()[-1])
    seconds = round(time.perf_counter() - begun, 1)
    return {"form": form, "seed": seed, "accuracy": last["accuracy"], "loss": last["loss"], "seconds": seconds}


def show(lines: list[dict[str, Any]]) -> str:
    """Make a table: accuracies in percent, and how far their mean is from that of `sync` with the same seeds."""
    runs = {(line["form"], line["seed"]): 100 * line["accuracy"] for line in lines}
    rows = ["| statistics | " + " | ".join(f"seed {s}" for s in seeds_of(runs)) + " | mean | less `sync` |"]
    rows.append("| --- |" + " ---: |" * (len(seeds_of(runs)) + 2))
    for form in FORMS:
        found = {seed: runs[form, seed] for seed in seeds_of(runs) if (form, seed) in runs}
        if found:
            apart = [value - runs["sync", seed] for seed, value in found.items() if ("sync", seed) in runs]
            cells = [f"{found[seed]:.2f}" if seed in found else "" for seed in seeds_of(runs)]
            cells += [f"{statistics.mean(found.values()):.2f}", f"{statistics.mean(apart):+.2f}" if apart else ""]
            rows.append(f"| {form} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def seeds_of(runs: dict[tuple[str, int], float]) -> list[int]:
    return sorted({seed for _, seed in runs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--ranks", type=int, choices=(1, RANKS), default=1)
    parser.add_argument("--images", type=int, default=8_000, help="of the training part")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--form", action="append", choices=(*FORMS,), help="these alone")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.show:
        print(show([line for line in lines if line["ranks"] == options.ranks]))
        return
    recipe = {name: getattr(options, name) for name in ("ranks", "network", "images", "epochs", "lr")}
    done = {(line["form"], line["seed"]) for line in lines if recipe.items() <= line.items()}
    with tempfile.TemporaryDirectory(prefix="bnfuse-accuracy-") as place:
        data = write_data(Path(place), options.images)
        for seed in range(options.seeds):
            for form in options.form or FORMS:
                if (form, seed) not in done:
                    found = {**run(form, seed, data, Path(place), options), **recipe}
                    with options.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
