"""Parts of gpu_check.py: the card, and whether results are right.

Each part takes (entries, arguments, folder for whole files, log) and says whether all is well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gpu_cases import Entry, by_training_file
from gpu_errors import compared, reference_gradients, torch_gradients
from gpu_pack import unpack

from bnfuse.baselines import TorchStep
from bnfuse.benchmarking.cuda.card import describe_card
from bnfuse.benchmarking.cuda.limits import measured_limits
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.runtime import load_step

Args = argparse.Namespace
SANITIZER_S = 200.0
TOOLS = ("memcheck", "racecheck")
ONE_STEP = """
import sys, numpy as np
from bnfuse.runtime import load_step
from bnfuse.training import random_feeds
step = load_step(sys.argv[1])
feeds = random_feeds(step, np.random.default_rng(0)).values()
print("loss", float(step(*feeds)), "launches", len(step.profile(*feeds)))
step.synchronize()
"""


def card(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    log.write("machine", **describe_card(), python=platform.python_version(), system=platform.platform())
    said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    log.write("nvidia-smi", said.splitlines()[2].strip(" |") if said.count("\n") > 2 else "-", said=said)
    for precision in args.precision or ("bf16", "tf32", "fp32"):
        log.write("limits", precision=precision, **measured_limits(precision).to_json())
    return True


def numerics(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    """Of each network one batch; the reference is torch's float64 on the CPU, the yardstick torch's on the GPU."""
    good = []
    for (case, train), group in by_training_file(entries, "numerics"):
        log.check(10)
        graph = open_graph(unpack(args.folder / train, place))
        feeds = draw_feeds(graph, np.random.default_rng(1))
        expected = reference_gradients(graph, feeds)
        yardsticks: dict[str, Any] = {}
        for entry in group:
            log.check(5)
            if entry.precision not in yardsticks:
                yardsticks[entry.precision] = torch_gradients(graph, feeds, entry.precision)
            step = load_step(unpack(args.folder / entry.file, place))
            found = our_gradients(step, feeds)
            verdict = compared(graph, expected, found, yardsticks[entry.precision], entry.precision)
            log.write(f"{case} {entry.level} {entry.precision}", verdict.text, **verdict.to_json())
            good.append(verdict.ok)
            del step
    return all(good) and bool(good)


def our_gradients(step: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By the names of the parameters, and the loss under ""."""
    loss = step.forward(*(feeds[name] for name in step.inputs))
    step.backward()
    return {"": np.float64(loss), **{name: value.astype(np.float64) for name, value in step.gradients().items()}}


def training(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    """100 steps on the same batches: ours against the CPU's runtime and torch's; ours three times."""
    data = np.load(args.folder / "data.npz")
    known = json.loads((args.folder / "losses.json").read_text())
    expected, good = np.array(known["losses"]), []
    for (_, train), group in by_training_file(entries, "training"):
        graph = open_graph(unpack(args.folder / train, place))
        baselines: dict[str, np.ndarray] = {}
        for entry in group:
            log.check(20)
            if entry.precision not in baselines:
                baselines[entry.precision] = torch_losses(graph, data, known, entry.precision)
                gaps = apart(baselines[entry.precision], expected)
                log.write(f"torch {entry.precision}", gap_text(gaps), **gaps)
            step = load_step(unpack(args.folder / entry.file, place))
            runs = [our_losses(step, data, known) for _ in range(3)]
            same = len({digest for _, digest in runs}) == 1
            losses = runs[0][0]
            gaps, from_torch = apart(losses, expected), apart(losses, baselines[entry.precision])
            text = f"bit-identical {same}; {gap_text(gaps)}; from torch: {gap_text(from_torch)}"
            log.write(entry.name, text, data=known["data"], bit_identical=same, from_torch=from_torch, **gaps)
            good.append(same and bool(np.isfinite(losses).all()))
            del step
    return all(good) and bool(good)


def our_losses(step: Any, data: Any, known: dict[str, Any]) -> tuple[np.ndarray, str]:
    """Losses, and a digest of them and of the whole state afterwards. The step is as before when it ends."""
    start = step.state_dict()
    step.reset_optimizer()
    step.lr = known["lr"]
    losses = np.array([float(step(x, y)) for x, y in zip(data["x"], data["y"], strict=True)])
    digest = hashlib.sha256(losses.tobytes())
    for name, value in sorted(step.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value).tobytes())
    step.load_state_dict(start)
    return losses, digest.hexdigest()


def torch_losses(graph: TrainingGraph, data: Any, known: dict[str, Any], precision: str) -> np.ndarray:
    feeds = dict(zip((*graph.signature.data, *graph.signature.labels), (data["x"][0], data["y"][0]), strict=True))
    how = {"lr": known["lr"], "momentum": known["momentum"], "device": "cuda", "precision": precision}
    step, losses = TorchStep(graph, "torch-cl", feeds, **how), []
    for x, y in zip(data["x"], data["y"], strict=True):
        step.feed(dict(zip(feeds, (x, y), strict=True)))
        losses.append(float(step.step()))
    return np.array(losses)


def apart(losses: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """How far two curves are from each other."""
    gap = np.abs(losses - expected)
    return {
        "first": float(losses[0]),
        "last_10": float(losses[-10:].mean()),
        "expected_last_10": float(expected[-10:].mean()),
        "largest_gap": float(gap.max()),
        "mean_gap": float(gap.mean()),
        "gap_first_10": float(gap[:10].max()),
        "losses": [round(float(loss), 6) for loss in losses],
    }


def gap_text(gaps: dict[str, Any]) -> str:
    return (
        f"largest gap {gaps['largest_gap']:.2e} (first ten {gaps['gap_first_10']:.2e}), mean of the last ten "
        f"{gaps['last_10']:.4f} for {gaps['expected_last_10']:.4f}"
    )


def sanitizer(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    """NVIDIA's checks of a step of each small network: accesses out of bounds, races in shared memory."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        log.write("skipped", "there is no compute-sanitizer here")
        return True
    good = []
    for entry in (entry for entry in entries if entry.is_sanitized):
        file = unpack(args.folder / entry.file, place)
        for tool in TOOLS:
            log.check(20)
            command = [program, "--tool", tool, sys.executable, "-c", ONE_STEP, str(file)]
            limit = min(SANITIZER_S, log.left)
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                log.write(f"{entry.name} {tool}", f"took longer than {limit:.0f} s", good=None)
                continue
            text = ran.stdout + ran.stderr
            summary = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
            clean = ran.returncode == 0 and "loss" in text and bool(summary) and " 0 " in f" {summary[-1]} "
            log.write(f"{entry.name} {tool}", "; ".join(summary) or text[-300:], good=clean, output=text[-4000:])
            good.append(clean)
    return all(good) and bool(good)
