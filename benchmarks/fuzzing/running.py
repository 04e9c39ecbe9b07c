"""A case in a process of its own, forked from one that has imported everything and run nothing: it may crash, hang or
eat memory, and only its case is lost. What must hold of it is in `judge`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bnfuse.cli import main

from .cases import Arguments, Case, prepare

SECONDS = 30.0  # of one case
MEMORY = 4 << 30  # bytes that a case may add to what is loaded
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # all but line ends
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
}


@dataclasses.dataclass(frozen=True)
class Ran:
    """One command of a case."""

    arguments: Arguments
    status: int
    errors: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    case: Case
    what: str
    ran: tuple[Ran, ...]
    findings: tuple[str, ...]
    seconds: float


@dataclasses.dataclass
class Running:
    case: Case
    box: Path
    begun: float


def run_cases(cases: list[Case], bases: Path, folder: Path, jobs: int, seconds: float = SECONDS) -> Iterator[Outcome]:
    """Outcomes as they come. A case that was too slow among others runs again alone before that counts."""
    waiting, slow, running = list(reversed(cases)), [], {}
    while waiting or running or slow:
        alone = not waiting and not running
        if alone and slow:
            waiting = [slow.pop()]
        while waiting and len(running) < (1 if alone else jobs):
            case = waiting.pop()
            running[start(case, bases, folder)] = Running(case, folder / str(case), time.monotonic())
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid in running:
            done = running.pop(pid)
            yield collect(done, status, usage.ru_maxrss << 10)
            continue
        for pid, hanging in list(running.items()):
            if time.monotonic() - hanging.begun > seconds:
                del running[pid]
                end(pid)
                if alone:
                    yield finish(hanging, (f"ran for more than {seconds:.0f} s",))
                else:
                    shutil.rmtree(hanging.box)
                    slow.append(hanging.case)
        time.sleep(0.003)


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def start(case: Case, bases: Path, folder: Path) -> int:
    box = folder / str(case)
    for part in ("work", "tmp", "said"):
        (box / part).mkdir(parents=True)
    (box / "secret.bin").write_bytes(bytes(100_000))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        child(case, bases, box)
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def child(case: Case, bases: Path, box: Path) -> None:
    """Prepares the case, runs its commands, and leaves what they said in the box."""
    work, said = box / "work", box / "said"
    redirect(said / "log")
    os.chdir(work)
    tempfile.tempdir = os.environ["TMPDIR"] = str(box / "tmp")
    plan = prepare(case, bases, work)
    (said / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
    before = names(work)
    limit_memory()
    outside = watch_writes((work, box / "tmp", said, Path(os.environ["BNFUSE_CACHE"])))
    ran: list[Ran] = []

    def run(arguments: Arguments) -> int:
        with (said / "begun").open("a") as stream:
            stream.write(json.dumps(arguments) + "\n")
        errors = said / f"errors{len(ran)}"
        redirect(errors)
        try:
            status = main(list(arguments))
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        except Exception:  # BNFUSE_DEBUG lets it through
            traceback.print_exc()
            status = 70
        sys.stderr.flush()
        ran.append(Ran(arguments, status, errors.read_text(errors="replace")))
        return status

    for arguments in plan.commands:
        if run(arguments):
            break
    control = None
    if ran[-1].status and len(ran) > 1 and plan.control is not None:
        control = run(plan.control)
    left = sorted(names(work) - before - {*plan.outputs})
    found = {"ran": [dataclasses.asdict(one) for one in ran], "control": control, "left": left, "outside": outside}
    (said / "result.json").write_text(json.dumps(found))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def redirect(errors: Path) -> None:
    """Standard error into a file, with what native code writes; standard output into nothing."""
    for stream, place in ((1, Path("/dev/null")), (2, errors)):
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, stream)
        os.close(handle)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115


def limit_memory() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def watch_writes(allowed: tuple[Path, ...]) -> list[str]:
    """A list that gets every place outside of the folders that Python code writes to, makes or removes."""
    outside: list[str] = []
    inside = tuple(f"{os.path.realpath(folder)}/" for folder in allowed)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            paths = [values[0]] if values[2] & WRITING else []
        else:
            paths = [values[index] for index in CHANGES.get(event, ())]
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                place = os.path.realpath(os.fsdecode(path))
                if not f"{place}/".startswith((*inside, "/dev/", "/proc/")):
                    outside.append(f"{event} {place}")

    sys.addaudithook(hook)
    return outside


def collect(done: Running, status: int, memory: int) -> Outcome:
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if signalled:
        return finish(done, (f"died by {signal.Signals(signalled).name}",))
    findings = judge(done.box / "said")
    if memory > MEMORY:
        findings += (f"took {memory >> 20} MB",)
    return finish(done, findings)


def finish(done: Running, findings: tuple[str, ...]) -> Outcome:
    said = done.box / "said"
    plan, result = read(said / "plan.json"), read(said / "result.json")
    ran = tuple(Ran(tuple(one["arguments"]), one["status"], one["errors"]) for one in result.get("ran", ()))
    if not ran:  # it ended before it could say
        begun = said / "begun"
        lines = begun.read_text().splitlines() if begun.exists() else []
        ran = tuple(Ran(tuple(json.loads(line)), -1, "") for line in lines)
    return Outcome(done.case, plan.get("what", ""), ran, findings, time.monotonic() - done.begun)


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def judge(said: Path) -> tuple[str, ...]:
    """What should not be: each a line."""
    result = read(said / "result.json")
    if not result:
        return (f"the harness failed: {(said / 'log').read_text(errors='replace').strip().splitlines()[-8:]}",)
    found: list[str] = []
    for one in result["ran"]:
        found += judge_command(one["status"], one["errors"])
    last, control = result["ran"][-1 if result["control"] is None else -2], result["control"]
    if len(result["ran"]) > 1 and control in (None, 0):
        if last["status"] == 1:
            found.append(f"{last['arguments'][0]} says that it computes something else")
        elif last["status"] == 2 and control == 0:
            found.append(f"what was made of a graph that runs is refused: {last['errors'].strip()[:300]}")
    found += [f"left {name}" for name in result["left"]]
    found += [f"wrote outside: {place}" for place in result["outside"]]
    return tuple(found)


def judge_command(status: int, errors: str) -> list[str]:
    """Of one command: its exit status, and what it says on stderr beside its progress."""
    lines = [line for line in errors.splitlines() if not line.startswith("[")]
    found = []
    if status not in (0, 1, 2, 130):
        found.append(f"status {status}")
    if "Traceback" in errors or "Exception ignored" in errors:
        found.append(f"a traceback: {lines[-1] if lines else errors[-300:]}")
    elif "internal error" in errors:
        found.append(lines[-1])
    elif status == 2 and len(lines) != 1:
        found.append(f"{len(lines)} lines of error: {lines[:2]}")
    elif status != 2 and lines:
        found.append(f"status {status}, and on stderr: {lines[0][:300]}")
    if CONTROL.search(errors):
        found.append(f"a control character on stderr: {errors[:300]!r}")
    return found
