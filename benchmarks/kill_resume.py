"""Kills `bnfuse train` or `bnfuse search` ten times at random; they must reach what an unbroken run does.

    python benchmarks/kill_resume.py --kind train
    python benchmarks/kill_resume.py --kind search --kills 10 --json result.json

Every process gets SIGKILL. About a third of the kills fall anywhere between its start and its first work, the others
into the work, at random within it. After each, every file that is there must be whole: checkpoints parse, lines of JSON
end. In the end parameters, running statistics and moments (train), or every evaluation of the search, must be those
of the unbroken run, bit by bit; times aside. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx

from bnfuse import api
from bnfuse.build.named import build_model
from bnfuse.core.tensor_files import read_safetensors

TIMES = ("seconds", "images_per_second", "waited", "duration", "time", "start", "elapsed", "compile_seconds")
START_UP = 0.3  # share of the kills that fall before the work
LONGEST = 900.0  # seconds that a process may take
Files = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A command that can be resumed. `lines` is the file that grows by a line with each piece of work."""

    command: tuple[str, ...]
    lines: str
    network: dict[str, Any]

    def arguments(self, name: str) -> list[str]:
        return [part.replace("RUN", name) for part in self.command]


KINDS = {
    "train": Kind(
        (
            *("train", "train.onnx", "--data", "digits", "--epochs", "12", "--augment", "flip,pad-crop:1"),
            *("--checkpoint-every", "7", "--metrics", "RUN/run.jsonl", "--log-every", "1", "--save", "RUN"),
            *("--resume", "auto", "--threads", "1", "--seed", "3"),
        ),
        "run.jsonl",
        {"batch": 32, "image": 8, "channels": 1, "classes": 10, "growth": 4, "depth": 2},
    ),
    "search": Kind(
        (
            *("search", "train.onnx", "--data", "digits", "--epochs", "1", "--iterations", "24", "--lr", "0.05"),
            *("--resume", "RUN/search.jsonl", "--threads", "1", "--seed", "3"),
        ),
        "search.jsonl",
        {"batch": 64, "image": 8, "channels": 1, "classes": 10, "growth": 4, "depth": 1},
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(KINDS), default="train")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="bnfuse-kills-"))
    try:
        found = stress(KINDS[chosen.kind], folder, chosen.kills, random.Random(chosen.seed), chosen.kind)
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{chosen.kind}: {len(found['kills'])} kills, {'the same as unbroken' if found['same'] else 'DIFFERENT'}")
    return 0 if found["same"] else 1


def stress(kind: Kind, folder: Path, kills: int, rng: random.Random, name: str) -> dict[str, Any]:
    """Everything that happened, and whether the two runs ended alike."""
    prepare(kind, folder, name)
    finish(start(kind, folder, "warm"))  # its kernels are compiled once, or lines would take longer here than later
    begun = time.monotonic()
    finish(start(kind, folder, "unbroken"))
    first = time.monotonic() - begun
    begun = time.monotonic()
    finish(start(kind, folder, "unbroken"))  # nothing is left to do: how long it takes to begin
    start_up = time.monotonic() - begun
    total = count(folder / "unbroken" / kind.lines)
    pace = max(first - start_up, 0.01) / total
    print(f"unbroken: {total} lines, {start_up:.1f} s to begin, {pace:.3f} s a line")
    happened: list[dict[str, Any]] = []
    while len(happened) < kills:
        before = count(folder / "killed" / kind.lines)
        early = rng.random() < START_UP
        more = 0 if early else rng.randint(1, max(1, (total - before) // (kills - len(happened) + 1)))
        delay = rng.uniform(0, start_up) if early else rng.uniform(0, pace)
        process = start(kind, folder, "killed")
        if not killed(process, folder / "killed" / kind.lines, before + more, delay):
            print(f"finished before kill {len(happened) + 1}")
            break
        after = check_whole(folder / "killed", kind)
        happened.append({"early": early, "lines_before": before, "lines_after": after})
        print(f"kill {len(happened)}: {'while it began' if early else 'at work'}, {after} of {total} lines")
    finish(start(kind, folder, "killed"))
    check_whole(folder / "killed", kind, finished=True)
    differences = compare(folder / "unbroken", folder / "killed", kind)
    differences += [f"warm run: {line}" for line in compare(folder / "unbroken", folder / "warm", kind)]
    for difference in differences:
        print(difference)
    return {"kind": name, "lines": total, "kills": happened, "same": not differences, "differences": differences}


def prepare(kind: Kind, folder: Path, name: str) -> None:
    """The training graph: for train with sampled statistics, virtual samples and all that is drawn for them."""
    for part in ("warm", "unbroken", "killed"):
        (folder / part).mkdir(parents=True)
    model = build_model("densenet40", zoo=kind.network, loss="cross-entropy").model
    if name == "train":
        model = api.rewrite(model, level="icf", sample="fs:1/4+vdn:2@0.5").model
        api.save(model, folder / "train.onnx")
    else:
        onnx.save(model, folder / "train.onnx")


def start(kind: Kind, folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bnfuse.cli", *kind.arguments(name)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, said = process.communicate(timeout=LONGEST)
    if process.returncode:
        raise SystemExit(f"the run failed: {said.decode()[-400:]}")


def killed(process: subprocess.Popen[bytes], path: Path, lines: int, delay: float) -> bool:
    """Wait for so many lines and a while longer, then kill. Whether it lived to see that."""
    end = time.monotonic() + LONGEST
    while count(path) < lines and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(delay)
    if process.poll() is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_whole(folder: Path, kind: Kind, *, finished: bool = False) -> int:
    """Every checkpoint can be read, every line is JSON; no temporary file is left by a run that finished."""
    for path in folder.glob("*.safetensors"):
        read_safetensors(path)
    found = read_lines(folder / kind.lines)
    left = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    if finished and left:
        raise SystemExit(f"left behind: {left}")
    return len(found)


def read_lines(path: Path) -> list[Files]:
    if not path.exists():
        return []
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        raise SystemExit(f"{path}: its last line is half written")
    return [without_times(json.loads(line)) for line in data.splitlines()]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def compare(one: Path, other: Path, kind: Kind) -> list[str]:
    """What differs between the two runs."""
    found = []
    for path in sorted(one.glob("*.safetensors")):
        ours, theirs = read_safetensors(path)[0], read_safetensors(other / path.name)[0]
        if ours.keys() != theirs.keys():
            found.append(f"{path.name}: other tensors")
        found += [f"{path.name}: {key}" for key in ours if ours[key].tobytes() != theirs[key].tobytes()]
    if read_lines(one / kind.lines) != read_lines(other / kind.lines):
        found.append(f"{kind.lines}: other lines")
    return found


if __name__ == "__main__":
    sys.exit(main())
