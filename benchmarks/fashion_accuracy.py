"""Trainings on Fashion-MNIST, way by way and seed by seed: what ranks_accuracy.py and precision_accuracy.py share.

SGD with momentum, a cosine from --lr with half an epoch of warm-up, flips and shifted crops. A seed decides the initial
values, the order of images, their augmentation and what is sampled. Each run is a process of `bnfuse train`, and a line
of JSON as soon as it is done: the accuracy after the last epoch on all 10,000 images of the test part, and seconds,
which are for planning alone. Needs Debian's dataset-fashion-mnist.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import bnfuse
from bnfuse.data import sources

IMAGE = 28
RECIPE = ("network", "images", "epochs", "lr")
Line = dict[str, Any]


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Make a parser of the options that all trainings have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--images", type=int, default=8_000, help="of the training part")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--seed", type=int, action="append", help="these alone")
    return parser


def lines_of(path: Path) -> list[Line]:
    """Read what is there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_data(folder: Path, images: int) -> Path:
    """Write the first images to train on, and all to test on, as arrays."""
    train, test = (sources.fashion_mnist().parts[name] for name in ("train", "test"))
    path = folder / "data.npz"
    np.savez(path, x=train.x[:images], y=train.y[:images], x_test=test.x, y_test=test.y)
    return path


def train(
    model: Any, seed: int, data: Path, options: argparse.Namespace, *more: str, launcher: Iterable[str] = ()
) -> Line:
    """Train once. `more` are arguments of the command, `launcher` what is in front of it. Raises SystemExit with what
    was said where it fails."""
    graph, metrics = data.with_name("train.onnx"), data.with_name("run.jsonl")
    bnfuse.save(model, graph)
    metrics.unlink(missing_ok=True)
    begun = time.perf_counter()
    done = subprocess.run(
        [
            *launcher,
            *(sys.executable, "-m", "bnfuse", "train", str(graph), "--data", str(data), "--seed", str(seed)),
            *("--epochs", str(options.epochs), "--eval-every", str(options.epochs), "--lr", str(options.lr)),
            *("--weight-decay", "2e-4", "--warm-up", "0.5", "--augment", "flip,pad-crop:2"),
            *("--metrics", str(metrics), *more),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{options.network}, seed {seed}: {done.stderr[-2000:]}")
    last = json.loads(metrics.read_text().splitlines()[-1])
    seconds = round(time.perf_counter() - begun, 1)
    return {"seed": seed, "accuracy": last["accuracy"], "loss": last["loss"], "seconds": seconds}


def run_missing(
    options: argparse.Namespace,
    key: str,
    ways: Iterable[str],
    recipe: Line,
    once: Callable[[str, int, Path], Line],
) -> None:
    """Run `once(way, seed, data)` for each way and seed of which --out has no line with this recipe; `key` is the name
    of the way in a line."""
    recipe = {name: getattr(options, name) for name in RECIPE} | recipe
    done = {(line[key], line["seed"]) for line in lines_of(options.out) if recipe.items() <= line.items()}
    with tempfile.TemporaryDirectory(prefix="bnfuse-accuracy-") as place:
        data = write_data(Path(place), options.images)
        for seed in options.seed or range(options.seeds):
            for way in ways:
                if (way, seed) not in done:
                    found = {key: way, **once(way, seed, data), **recipe}
                    with options.out.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                    print(json.dumps(found), flush=True)
