"""kill -9 in the middle of a search, again and again: does it find what an unbroken one finds?

    python benchmarks/search_kill.py --kills 10

Trains a small vgg11 on the embedded digits. After every kill the file has to be readable; at the end its evaluations
have to be those of the unbroken search to the last bit, in their order.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bnfuse.searching.storage import read_log

BUILD = ["build", "vgg11", "--batch", "32", "--image", "32", "--channels", "1", "--classes", "10"]
SMALL = ["--set", "width=2", "--set", "hidden=8", "--set", "dropout=0", "-o", "train.onnx"]
SEARCH = [
    "search",
    "train.onnx",
    "--data",
    "digits",
    "--epochs",
    "1",
    "--lr",
    "0.05",
    "--threads",
    "1",
    "--initial",
    "2",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        start(where, [*BUILD, *SMALL]).wait()
        search = [*SEARCH, "--iterations", str(asked.iterations)]
        if start(where, [*search, "-o", "whole.jsonl"]).wait():
            raise SystemExit("the unbroken search failed")
        kill_often(where, search, asked.kills, random.Random(asked.seed))
        if start(where, [*search, "--resume", "broken.jsonl"]).wait():
            raise SystemExit("the search could not be taken up again")
        same = evaluations(where / "broken.jsonl") == evaluations(where / "whole.jsonl")
    print(f"{asked.kills} kills: {'the same evaluations' if same else 'OTHER EVALUATIONS'}")
    raise SystemExit(not same)


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "bnfuse", *arguments], cwd=folder, stdout=quiet, stderr=quiet)


def kill_often(folder: Path, search: list[str], kills: int, luck: random.Random) -> None:
    """Each at a random moment of the evaluation after one or two more; a search that ends first is begun anew."""
    path, done = folder / "broken.jsonl", 0
    while done < kills:
        wanted = lines_of(path) + luck.randint(0, 1)
        child = start(folder, [*search, "--resume", path.name])
        while child.poll() is None and lines_of(path) <= wanted:
            time.sleep(0.02)
        time.sleep(luck.uniform(0, 1))
        child.kill()
        if child.wait() == 0:
            path.unlink()
            continue
        done += 1
        print(f"kill {done}: {len(read_log(path)[2])} evaluations stored", flush=True)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def evaluations(path: Path) -> list[dict[str, object]]:
    return [{**json.loads(line), "seconds": 0} for line in path.read_text().splitlines()[1:]]


if __name__ == "__main__":
    main()
