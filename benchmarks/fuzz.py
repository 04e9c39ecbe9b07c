"""Gives mutated files to the command line; it must say what is the matter in one line, and never something wrong.

    python benchmarks/fuzz.py --cases 2000 --seed 0
    python benchmarks/fuzz.py --cases 2000 --seed 1 --keep found/
    python benchmarks/fuzz.py --only training:17              # BNFUSE_DEBUG=1 shows where an internal error comes from

A case is a kind of input and a seed: a small graph, step, checkpoint or data set, one to three mutations, and one
command, or a few in a row. What must hold: the exit status is 0, 1 or 2; with 2 there is one line on stderr, otherwise
none (lines of progress aside), and never a traceback, an "internal error" or a control character; 30 seconds and 4 GiB
are enough; nothing is written but the outputs, nothing unpickled. And what `rewrite` or `build` made of a graph that
onnxruntime runs must compute the same, as `bnfuse verify` judges it.

2000 cases take about ten minutes on two cores: three of a hundred compile kernels. Exit status 1 where anything is
found.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.dont_write_bytecode = True  # cases are watched for what they write
sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.bases import make_bases  # noqa: E402
from fuzzing.cases import KINDS, Case, draw_cases  # noqa: E402
from fuzzing.running import SECONDS, Outcome, run_cases  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=(), help=", ".join(KINDS))
    parser.add_argument("--only", metavar="KIND:SEED", action="append", help="this case, repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cases at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a case may take")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of cases with findings here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and findings")
    chosen = parser.parse_args()
    cases = (
        [case_of(text) for text in chosen.only] if chosen.only else draw_cases(chosen.cases, chosen.seed, chosen.kinds)
    )
    folder = Path(tempfile.mkdtemp(prefix="bnfuse-fuzz-"))
    os.environ["BNFUSE_CACHE"] = os.environ.get("BNFUSE_CACHE") or str(folder / "cache")
    try:
        outcomes = fuzz(cases, folder, chosen.jobs, chosen.seconds, chosen.keep, talk=bool(chosen.only))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = summary(outcomes)
    print_report(report)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["findings"] else 0


def case_of(text: str) -> Case:
    kind, _, seed = text.partition(":")
    if kind not in KINDS or not seed.isdigit():
        raise SystemExit(f"{text} is no case: KIND:SEED with a kind of {', '.join(KINDS)}")
    return Case(kind, int(seed))


def fuzz(cases: list[Case], folder: Path, jobs: int, seconds: float, keep: Path | None, *, talk: bool) -> list[Outcome]:
    bases, boxes = folder / "bases", folder / "cases"
    for part in (bases, boxes):
        part.mkdir()
    begun = time.monotonic()
    warm_up(bases)
    print(f"bases made in {time.monotonic() - begun:.0f} s", flush=True)
    outcomes = []
    for outcome in run_cases(cases, bases, boxes, jobs, seconds):
        outcomes.append(outcome)
        if outcome.findings or talk:
            tell(outcome)
        box = boxes / str(outcome.case)
        if keep and (outcome.findings or talk):
            shutil.copytree(box, keep / str(outcome.case), dirs_exist_ok=True, symlinks=True)
        shutil.rmtree(box)
        if len(outcomes) % 200 == 0:
            print(f"{len(outcomes)} of {len(cases)} cases, {time.monotonic() - begun:.0f} s", flush=True)
    return outcomes


def warm_up(bases: Path) -> None:
    """Makes the bases in a child, for whoever has run kernels has threads and should not fork; imports what it did."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            silence = (bases / "log").open("w")
            with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
                make_bases(bases)
            (bases / "modules").write_text("\n".join(name for name in sys.modules if name != "__main__"))
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"the bases could not be made: {(bases / 'log').read_text()[-2000:]}")
    for name in (bases / "modules").read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def tell(outcome: Outcome) -> None:
    print(f"{outcome.case} ({outcome.what[:200]}), {outcome.seconds:.1f} s")
    for ran in outcome.ran:
        print(f"    {ran.status:3} bnfuse {' '.join(ran.arguments)}")
        for line in ran.errors.splitlines()[-40:]:
            print(f"        {line[:400] if line.isprintable() else ascii(line[:400])}")
    for finding in outcome.findings:
        print(f"    FOUND {finding[:600]!r}")
    sys.stdout.flush()


def summary(outcomes: list[Outcome]) -> dict:
    """Counts by command and status, and findings with the cases that show them."""
    counts: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for outcome in outcomes:
        for ran in outcome.ran:
            counts[ran.arguments[0]][ran.status] += 1
        for finding in outcome.findings:
            kinds[re.sub(r"'[^']*'|\d+|/\S+", "_", finding)[:120]].append(str(outcome.case))
    statuses = {
        command: {str(status): n for status, n in sorted(found.items())} for command, found in sorted(counts.items())
    }
    return {
        "cases": len(outcomes),
        "mix": dict(collections.Counter(outcome.case.kind for outcome in outcomes)),
        "commands": statuses,
        "findings": dict(sorted(kinds.items(), key=lambda item: -len(item[1]))),
        "cases_with_findings": sum(bool(outcome.findings) for outcome in outcomes),
    }


def print_report(report: dict) -> None:
    print(f"\n{report['cases']} cases: {', '.join(f'{kind} {n}' for kind, n in report['mix'].items())}")
    print(f"{'command':10}{'0':>7}{'1':>7}{'2':>7}{'else':>7}")
    for command, statuses in report["commands"].items():
        usual = [statuses.get(status, 0) for status in ("0", "1", "2")]
        print(f"{command:10}" + "".join(f"{n:7}" for n in (*usual, sum(statuses.values()) - sum(usual))))
    for finding, cases in report["findings"].items():
        print(f"{len(cases):4}  {finding}  ({', '.join(cases[:4])})")
    print(f"{report['cases_with_findings']} cases with findings")


if __name__ == "__main__":
    sys.exit(main())
