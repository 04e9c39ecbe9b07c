"""Trains what training_build.py compiled: every training with every seed, several processes at a time.

    PYTHONPATH=. python benchmarks/training_run.py --folder files --out results.jsonl --seeds 3 --jobs 6

A line of JSON for each finished run, at once; runs that are in the file already are not repeated. A seed decides the
initial parameters (every matrix and kernel drawn anew with the spread that it was built with), the order of the images,
their augmentation and all that is sampled. Needs no TVM and no compiler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from gpu_pack import unpack
from training_sets import Training, read_index

Job = tuple[Training, int, Path]


def run(job: Job) -> dict[str, Any]:
    training, seed, _ = job
    found: dict[str, Any] = {"name": training.name, "network": training.network, "label": training.label, "seed": seed}
    start = time.perf_counter()
    try:
        found |= errors_of(job) if training.instrumented else trained(job)
    except Exception as error:  # a run that fails is a line too
        found["failed"] = " ".join(str(error).split())[:300]
    return {**found, "epochs": training.epochs, "seconds": round(time.perf_counter() - start, 2)}


def trained(job: Job) -> dict[str, Any]:
    from bnfuse.training import data_for, train_step

    training, seed, folder = job
    step = opened(training, seed, folder)
    history = train_step(
        step,
        data_for(step, folder / "data.npz"),
        epochs=training.epochs,
        seed=seed,
        augment=training.augment,
        warm_up=training.warm_up,
    )
    return {
        "accuracy": history.accuracy,
        "accuracies": [epoch.accuracy for epoch in history.epochs],
        "losses": [epoch.loss for epoch in history.epochs],
    }


def errors_of(job: Job) -> dict[str, Any]:
    """For each BN and step of the first epoch, while the learning rate rises: the norms over the channels of the errors
    of the mean and of the standard deviation, both as shares of the norm of the full standard deviation."""
    from bnfuse.data import batches
    from bnfuse.training import data_for

    training, seed, folder = job
    step = opened(training, seed, folder)
    data = data_for(step, folder / "data.npz")
    step.epoch = 1
    names = [name.removesuffix("/used_mean") for name in step.outputs if name.endswith("/used_mean")]
    rows = []
    steps = len(data.train_y) // training.batch
    for index, (images, labels) in enumerate(
        batches(data.train_x, data.train_y, training.batch, seed=seed, epoch=1), 1
    ):
        step.lr = training.lr * index / steps
        step(images, labels)
        found = step.outputs
        row = []
        for name in names:
            used, full = (np.sqrt(found[f"{name}/{which}_variance"]) for which in ("used", "full"))
            mean = found[f"{name}/used_mean"] - found[f"{name}/full_mean"]
            row.append([float(np.linalg.norm(part) / np.linalg.norm(full)) for part in (mean, used - full)])
        rows.append(row)
    return {"layers": names, "errors": np.round(np.array(rows), 5).tolist()}


def opened(training: Training, seed: int, folder: Path) -> Any:
    """The step with the initial parameters of the seed."""
    from bnfuse.runtime import load_step

    with tempfile.TemporaryDirectory(prefix="bnfuse-training-") as place:
        step = load_step(unpack(folder / training.file, Path(place)))
    state = step.state_dict()
    for name, value in state.items():
        if value.ndim >= 2:
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            state[name] = rng.normal(0.0, value.std(), value.shape).astype(value.dtype)
    step.load_state_dict(state)
    step.lr, step.seed = training.lr, seed
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("training-files"))
    parser.add_argument("--out", type=Path, default=Path("trainings.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="trainings whose name has this in it")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no run begins")
    args = parser.parse_args()
    begun = time.monotonic()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(line["name"], line["seed"]) for line in map(json.loads, lines) if "failed" not in line}
    wanted = [t for t in read_index(args.folder) if (args.only or "") in t.name]
    jobs = [(t, seed, args.folder) for seed in range(args.seeds) for t in wanted if (t.name, seed) not in done]
    print(f"{len(jobs)} runs, {args.jobs} at a time", flush=True)
    pool = multiprocessing.get_context("spawn").Pool(args.jobs)
    with args.out.open("a") as out, pool:
        for found in pool.imap_unordered(run, jobs):
            out.write(json.dumps(found) + "\n")
            out.flush()
            told = found.get("failed") or found.get("accuracy") or "errors"
            print(f"{time.monotonic() - begun:6.1f} {found['name']} {found['seed']}: {told}", flush=True)
            if time.monotonic() - begun > args.limit:
                print("out of time", flush=True)
                break


if __name__ == "__main__":
    main()
