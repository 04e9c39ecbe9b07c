"""Kills, or stops, one rank of a training ten times at random; every rank must end, and the resumed run must reach what
an unbroken one does.

    python benchmarks/kill_ranks.py --ranks 4
    python benchmarks/kill_ranks.py --ranks 4 --signal stop --limit 10
    python benchmarks/kill_ranks.py --ranks 2 --launcher torchrun --json result.json

One process of the run, the first of its ranks or another, gets SIGKILL or SIGSTOP: a third of the times (`--early`)
before the first step, else at random within the steps. Then the launcher must end within the limit (`--limit`, and what
the launcher itself takes; of ranks that were still to begin, what that takes too), no process of the run may be left,
what is said must be one line that names what happened, and every file must be whole. In the end parameters, statistics,
moments and lines of metrics must be the unbroken run's, times aside: bit by bit on MPI, whose sums of so many ranks are
always made alike. Exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
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

from kill_resume import LONGEST, START_UP, Kind, check_whole, compare, count

from bnfuse import api
from bnfuse.build.named import build_model

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
GRACE = {"mpirun": 10.0, "torchrun": 45.0}  # seconds for a launcher to end what is left: torchrun waits 30 for SIGTERM
LATER = 2.0  # seconds after the launcher in which the system may end its processes
NETWORK = {"batch": 8, "image": 8, "channels": 1, "classes": 10}
METRICS = "run.jsonl"


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How a run is started."""

    count: int
    launcher: str
    limit: float
    folder: Path

    def start(self, name: str) -> subprocess.Popen[str]:
        """Start a training that goes on with what the folder `name` has."""
        train = [
            *("train", "train.onnx", "--data", "digits", "--epochs", "6", "--augment", "flip,pad-crop:1"),
            *("--checkpoint-every", "7", "--metrics", f"{name}/{METRICS}", "--log-every", "1", "--save", name),
            *("--resume", "auto", "--threads", "1", "--seed", "3", "--world-timeout", str(self.limit)),
        ]
        before = {
            "mpirun": ["mpirun", "-n", str(self.count), sys.executable],
            "torchrun": [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={self.count}",
                "--master-port=0",
            ],
        }[self.launcher]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*before, "-m", "bnfuse", *train], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=pipe, text=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--launcher", choices=tuple(GRACE), default="mpirun")
    parser.add_argument("--signal", choices=tuple(SIGNALS), default="kill")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--early", type=float, default=START_UP, help="share of them that fall before the first step")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds that a rank waits for the others")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="bnfuse-ranks-"))
    ranks = Ranks(chosen.ranks, chosen.launcher, chosen.limit, folder)
    try:
        hits = Hits(chosen.kills, SIGNALS[chosen.signal], chosen.early)
        found = stress(ranks, chosen.network, hits, random.Random(chosen.seed))
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found['kills'])} times {chosen.signal}, {'the same as unbroken' if found['same'] else 'DIFFERENT'}")
    return 0 if found["same"] else 1


@dataclasses.dataclass(frozen=True)
class Hits:
    """How often a rank is hit, by what, and which share of the times before the first step."""

    count: int
    number: signal.Signals
    early: float


def stress(ranks: Ranks, network: str, hits: Hits, rng: random.Random) -> dict[str, Any]:
    """Everything that happened, and whether the two runs ended alike."""
    kills, number = hits.count, hits.number
    folder, kind = ranks.folder, Kind((), METRICS, {})
    for part in ("warm", "unbroken", "killed"):
        (folder / part).mkdir(parents=True)
    model = build_model(network, zoo=NETWORK, loss="cross-entropy").model
    api.save(api.rewrite(model, level="icf").model, folder / "train.onnx")
    finish(ranks.start("warm"))
    begun = time.monotonic()
    finish(ranks.start("unbroken"))
    first = time.monotonic() - begun
    begun = time.monotonic()
    finish(ranks.start("unbroken"))  # nothing is left to do: how long it takes to begin
    start_up = time.monotonic() - begun
    total = count(folder / "unbroken" / METRICS)
    pace = max(first - start_up, 0.01) / total
    print(f"unbroken: {total} lines, {start_up:.1f} s to begin, {pace:.3f} s a line")
    happened: list[dict[str, Any]] = []
    while len(happened) < kills:
        before = count(folder / "killed" / METRICS)
        early = rng.random() < hits.early
        more = 0 if early else rng.randint(1, max(1, (total - before) // (kills - len(happened) + 1)))
        delay = rng.uniform(0, start_up) if early else rng.uniform(0, pace)
        launcher = ranks.start("killed")
        hit = struck(launcher, folder / "killed" / METRICS, before + more, delay, number, rng)
        if hit is None:
            print(f"finished before the {len(happened) + 1}th")
            break
        after = check_whole(folder / "killed", kind)
        happened.append(
            {
                "early": early,
                "lines_before": before,
                "lines_after": after,
                **ended(launcher, hit, ranks, start_up if early else 0.0),
            }
        )
        print(f"{len(happened)}: {'while it began' if early else 'at work'}, {happened[-1]}")
        check_whole(folder / "killed", kind)
    finish(ranks.start("killed"))
    check_whole(folder / "killed", kind, finished=True)
    differences = compare(folder / "unbroken", folder / "killed", kind)
    differences += [f"warm run: {line}" for line in compare(folder / "unbroken", folder / "warm", kind)]
    differences += [f"{place}: {one['wrong']}" for place, one in enumerate(happened, 1) if one["wrong"]]
    for difference in differences:
        print(difference)
    return {
        "network": network,
        "ranks": ranks.count,
        "launcher": ranks.launcher,
        "signal": number.name,
        "lines": total,
        "kills": happened,
        "same": not differences,
        "differences": differences,
    }


def finish(launcher: subprocess.Popen[str]) -> None:
    _, said = launcher.communicate(timeout=LONGEST)
    if launcher.returncode:
        raise SystemExit(f"the run failed: {said[-800:]}")


def struck(
    launcher: subprocess.Popen[str], path: Path, lines: int, delay: float, number: signal.Signals, rng: random.Random
) -> list[int] | None:
    """Wait for so many lines and a while longer, then send the signal to one rank. Gives the ranks' processes, the one
    that was hit first; None where the run ended before."""
    end = time.monotonic() + LONGEST
    while count(path) < lines and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(delay)
    ranks = ranks_below(launcher.pid)
    while not ranks and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
        ranks = ranks_below(launcher.pid)
    if launcher.poll() is not None or not ranks:
        return None
    rng.shuffle(ranks)
    try:
        os.kill(ranks[0], number)
    except ProcessLookupError:
        return None
    return ranks


def ended(launcher: subprocess.Popen[str], ranks: list[int], run: Ranks, start_up: float) -> dict[str, Any]:
    """Wait for the end of the run, whose ranks may take so long to begin; what was said, how long it took, and what was
    wrong with it."""
    begun, wrong = time.monotonic(), []
    try:
        _, said = launcher.communicate(timeout=start_up + run.limit + GRACE[run.launcher])
    except subprocess.TimeoutExpired:
        wrong.append("it did not end within the limit")
        for process in (*ranks, launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _, said = launcher.communicate()
    seconds = time.monotonic() - begun
    if launcher.returncode == 0:
        wrong.append("its exit status is 0")
    last = time.monotonic() + LATER
    while (left := list(filter(runs, ranks))) and time.monotonic() < last:
        time.sleep(0.01)
    if left:
        wrong.append(f"processes are left: {left}")
    lines = [line for line in said.splitlines() if line.startswith("bnfuse: ")]
    return {
        "rank": ranks[0],
        "seconds": round(seconds, 2),
        "status": launcher.returncode,
        "said": lines,
        "wrong": wrong,
    }


def runs(process: int) -> bool:
    """Tell whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ranks_below(parent: int) -> list[int]:
    """List the processes below the launcher that are a rank: those that train."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [parent]
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child)
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:4] == [b"-m", b"bnfuse", b"train"] or words[1:5] == [b"-u", b"-m", b"bnfuse", b"train"]:
                found.append(child)
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main())
