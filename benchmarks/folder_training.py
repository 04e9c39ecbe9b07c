"""Trains a network on a folder of PNGs: `bnfuse train` beside the same recipe in torch with torchvision's ImageFolder.

    python benchmarks/folder_training.py --folder /tmp/fashion --write /usr/share/datasets/fashion-mnist
    python benchmarks/folder_training.py --folder /tmp/fashion --epochs 5 --seeds 3 --threads 2 --json result.json

`--write` writes Fashion-MNIST out as train/CLASS/00000.png and val/CLASS/..., from the folder of Debian's package, or
with `digits` the embedded digits. Then each seed of each side is a process of its own: random parts of at least half of
the picture, resized, and flips; SGD with momentum 0.9, weight decay 1e-4, a cosine from --lr; the same network and
initial values (`bnfuse.baselines`); --threads for the step, --workers for the images on either side. Of each is told:
the accuracy of the last epoch, seconds of the epochs (evaluations included, compiling apart), images a second, and the
share of the training in which steps waited for images.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SIDES = ("bnfuse", "torch", "torch-cl")
MEAN, STD, LEAST = 0.286, 0.353, 0.5
MOMENTUM, DECAY = 0.9, 1e-4


def write(source: str, folder: Path) -> None:
    """Write a data set as PNGs, a folder for each class of each part."""
    from PIL import Image

    from bnfuse.data import load_data, sources

    if source == "digits":
        data = load_data("digits")
        parts = {name: (np.rint(x[:, 0] * 255).astype(np.uint8), y) for name, (x, y) in data.parts.items()}
        classes = data.class_names
    else:
        raw = sources.fashion_mnist(Path(source))
        parts, classes = {name: (part.x[:, 0], part.y) for name, part in raw.parts.items()}, raw.class_names
    for name, (images, labels) in parts.items():
        for label, text in enumerate(classes):
            place = folder / ("train" if name == "train" else "val") / f"{label} {text.replace('/', ' or ')}"
            place.mkdir(parents=True)
            for number in np.flatnonzero(labels == label):
                Image.fromarray(images[number]).save(place / f"{number:05}.png")


def graph_of(args: argparse.Namespace, seed: int) -> Any:
    """Build the training graph; its initial values are drawn by the seed."""
    from bnfuse.build import build_training_graph
    from bnfuse.models import build_forward

    settings = dict(pair.split("=", 1) for pair in args.set)
    sizes = {"batch": args.batch, "image": args.image, "channels": 1, "classes": 10, "seed": seed}
    return build_training_graph(build_forward(args.network, **sizes, **settings))


def ours(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train with bnfuse."""
    import bnfuse

    begun = time.perf_counter()
    history = bnfuse.train(
        bnfuse.rewrite(graph_of(args, seed), level="icf"),
        args.folder,
        epochs=args.epochs,
        optimizer=bnfuse.SGD(lr=args.lr, momentum=MOMENTUM, weight_decay=DECAY),
        target=args.target,
        precision=args.precision,
        threads=args.threads,
        workers=args.workers,
        augment=f"random-resized-crop:{LEAST},flip",
        crop_share=1.0,
        mean=MEAN,
        std=STD,
        seed=seed,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    whole = time.perf_counter() - begun
    seconds = sum(epoch.seconds for epoch in history.epochs)
    return {
        "accuracy": history.accuracy,
        "seconds": seconds,
        "before": whole - seconds,
        "images_per_second": float(np.median([epoch.images_per_second for epoch in history.epochs])),
        "waited": float(np.mean([epoch.waited for epoch in history.epochs])),
        "pipeline": history.pipeline.images_per_second if history.pipeline else None,
    }


def theirs(args: argparse.Namespace, seed: int, channels_last: bool) -> dict[str, Any]:
    """Train with torch, as its users write it."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    from bnfuse.baselines.network import torch_module
    from bnfuse.graph.training_graph import open_graph

    begun = time.perf_counter()
    torch.manual_seed(seed)
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if args.target.startswith("cuda") else "cpu")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = torch_module(open_graph(graph_of(args, seed))).to(device, memory_format=layout)
    last = [T.ToTensor(), T.Normalize((MEAN,), (STD,))]
    crop = T.RandomResizedCrop(args.image, scale=(LEAST, 1.0))
    change = T.Compose([T.Grayscale(), crop, T.RandomHorizontalFlip(), *last])
    train = ImageFolder(args.folder / "train", change)
    val = ImageFolder(
        args.folder / "val", T.Compose([T.Grayscale(), T.Resize(args.image), T.CenterCrop(args.image), *last])
    )
    options = {"batch_size": args.batch, "num_workers": args.workers, "persistent_workers": args.workers > 0}
    loader = DataLoader(train, shuffle=True, drop_last=True, pin_memory=device.type == "cuda", **options)
    scoring = DataLoader(val, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=MOMENTUM, weight_decay=DECAY)
    total, count, waited, seconds, training, rates = args.epochs * len(loader), 0, 0.0, 0.0, 0.0, []
    before = time.perf_counter() - begun
    for _ in range(args.epochs):
        start = time.perf_counter()
        model.train()
        batches, spent = iter(loader), 0.0
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            spent += time.perf_counter() - asked
            if batch is None:
                break
            images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * count / total))
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(images.contiguous(memory_format=layout))
                loss = torch.nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not math.isfinite(float(loss.detach())):
                raise SystemExit("the loss is not finite")
            count += 1
        trained = time.perf_counter() - start
        training, waited = training + trained, waited + spent
        rates.append(len(loader) * args.batch / trained)
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in scoring:
                logits = model(images.to(device).contiguous(memory_format=layout))
                right += int((logits.argmax(1).cpu() == labels).sum())
        seconds += time.perf_counter() - start
        print(f"{right / len(val):.4f} right, {trained:.1f} s", file=sys.stderr, flush=True)
    return {
        "accuracy": right / len(val),
        "seconds": seconds,
        "before": before,
        "images_per_second": float(np.median(rates)),
        "waited": waited / training,
        "pipeline": None,
    }


def in_process(args: argparse.Namespace, side: str, seed: int) -> dict[str, Any]:
    """Run one side with one seed in a process of its own."""
    python = sys.executable if side == "bnfuse" else args.python_of_torch
    command = [python, __file__, "--side", side, "--seed", str(seed), *args.passed]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Write a line for each side."""
    lines = [f"{'side':10} {'accuracy':>18} {'seconds':>9} {'before':>7} {'images/s':>9} {'waited':>7}"]
    for side, found in results.items():
        accuracy = np.array([100 * one["accuracy"] for one in found])
        spread = accuracy.std(ddof=1) if len(found) > 1 else 0.0
        middle = {
            key: float(np.median([one[key] for one in found]))
            for key in ("seconds", "before", "images_per_second", "waited")
        }
        lines.append(
            f"{side:10} {accuracy.mean():9.2f} ± {spread:4.2f} % {middle['seconds']:9.1f} {middle['before']:7.1f} "
            f"{middle['images_per_second']:9,.0f} {middle['waited']:7.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--write", metavar="FOLDER|digits")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--image", type=int, default=28)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"))
    parser.add_argument("--python-of-torch", default=sys.executable, help="where torch and torchvision are installed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.passed = sys.argv[1:]
    if args.write:
        write(args.write, args.folder)
        return
    if args.side:
        found = ours(args, args.seed) if args.side == "bnfuse" else theirs(args, args.seed, args.side == "torch-cl")
        print(json.dumps(found))
        return
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides.split(",")}
    for seed in range(args.seeds):
        for side, found in results.items():
            found.append(in_process(args, side, seed))
            print(f"{side}, seed {seed}: {found[-1]}", flush=True)
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps({"arguments": sys.argv[1:], "results": results}, indent=2))


if __name__ == "__main__":
    main()
