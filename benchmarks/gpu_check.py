"""Checks and measures compiled steps on a GPU machine, from the files that gpu_build.py made elsewhere.

    PYTHONPATH=. python benchmarks/gpu_check.py --folder gpu-files --out results
    PYTHONPATH=. python benchmarks/gpu_check.py --folder gpu-files --out results --part numerics --limit 120
    PYTHONPATH=. python benchmarks/gpu_check.py --folder gpu-files --out results --part timing --case densenet121 \\
        --precision bf16 --baseline torch-cl+graph --baseline torch-compile+graph
    python benchmarks/gpu_check.py --folder gpu-files --list

card        GPU, driver, versions; what a copy and a matrix product reach
numerics    gradients of one step of small networks against float64, beside torch's own error in the same precision
training    100 steps after the CPU's runtime and torch; three runs that have to be bit-identical
timing      ours and torch's variants in turns in one process, by events
memory      peak memory, a process each; the largest batch that fits
profile     our launches one by one, and the convolutions alone by cuDNN
sanitizer   compute-sanitizer's memcheck and racecheck on the small networks

Everything goes as JSON lines into OUT/check.jsonl, a line as soon as it is known, and as text to stdout. A part that
fails or runs out of its time is one line too, and the next one starts. Needs numpy, onnx, onnx_ir, safetensors, torch,
cuda-bindings; no TVM, no compiler but for torch.compile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from gpu_cases import CASES, PRECISIONS, Entry, chosen, read_index

PARTS = ("card", "numerics", "training", "timing", "memory", "profile", "sanitizer")
BASELINES = ("torch+graph", "torch-cl", "torch-cl+graph", "torch-compile+graph")
LEVELS = ("none", "rcf", "mvf", "bnff", "icf")


class OutOfTime(Exception):
    """The part's time is over."""


class Log:
    """JSON lines in a file, and short text for people."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.part = ""
        self.end = float("inf")

    def begin(self, part: str, limit: float) -> None:
        self.part, self.end = part, time.monotonic() + limit

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def check(self, need: float = 0.0) -> None:
        """Stop the part where less than `need` seconds are left of its time."""
        if self.left < need:
            raise OutOfTime(f"{self.left:.0f} s left, {need:.0f} s wanted")

    def write(self, what: str, text: str = "", **data: Any) -> None:
        line = {"part": self.part, "what": what, "at": round(time.time(), 1), **data}
        self.file.write(json.dumps(line, default=float) + "\n")
        self.file.flush()
        print(f"{self.part}: {what} {text or json.dumps(data, default=float)[:400]}", flush=True)


def selected(entries: list[Entry], args: argparse.Namespace) -> list[Entry]:
    """What was asked for."""
    names = {case.name for case in chosen(args.case)}
    found = [
        entry
        for entry in entries
        if entry.case in names
        and entry.level.partition(" ")[0] in (args.level or LEVELS)
        and entry.precision in (args.precision or PRECISIONS)
    ]
    return sorted(found, key=lambda entry: [case.name for case in CASES].index(entry.case))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("gpu-files"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--part", action="append", choices=PARTS, help="only these")
    parser.add_argument("--case", action="append", metavar="NAME", help=", ".join(case.name for case in CASES))
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--level", action="append", choices=LEVELS)
    parser.add_argument(
        "--baseline", action="append", metavar="BASELINE", help=f"default: {', '.join(BASELINES)}; none for none"
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="of each part")
    parser.add_argument("--unpacked", type=Path, help="keep the whole files here")
    parser.add_argument("--no-largest", action="store_true", help="memory: leave the largest batch out")
    parser.add_argument("--list", action="store_true", help="say what would run")
    args = parser.parse_args(given)
    args.baselines = [] if args.baseline == ["none"] else (args.baseline or list(BASELINES))
    return args


def listing(entries: list[Entry], parts: list[str]) -> str:
    lines = []
    for part in parts:
        files = [entry.name for entry in entries if part in entry.parts or (part == "sanitizer" and entry.is_sanitized)]
        lines.append(f"{part}: {', '.join(files) if part != 'card' else 'the machine'}")
    return "\n".join(lines)


def run_part(part: str, entries: list[Entry], args: argparse.Namespace, place: Path, log: Log) -> bool:
    """Whether it went well. Whatever goes wrong is a line."""
    import gpu_right
    import gpu_speed

    home = gpu_right if part in ("card", "numerics", "training", "sanitizer") else gpu_speed
    log.begin(part, args.limit)
    start = time.monotonic()
    try:
        good = getattr(home, part)(entries, args, place, log)
    except OutOfTime as reason:
        log.write("out of time", str(reason), reason=str(reason))
        good = False
    except Exception as error:  # the machine's time is short: the next part may do
        log.write("failed", f"{type(error).__name__}: {error}", error=str(error)[:2000])
        traceback.print_exc(file=sys.stdout)
        good = False
    log.write("done", f"{'good' if good else 'NOT GOOD'}, {time.monotonic() - start:.0f} s", good=bool(good))
    return bool(good)


def main() -> None:
    args = arguments()
    entries = selected(read_index(args.folder), args)
    parts = args.part or list(PARTS)
    if args.list:
        print(listing(entries, parts))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "check.jsonl")
    with tempfile.TemporaryDirectory(prefix="bnfuse-gpu-") as temporary:
        place = args.unpacked or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        good = [run_part(part, entries, args, place, log) for part in parts]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
