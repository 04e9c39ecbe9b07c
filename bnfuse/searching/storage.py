"""The file of a search: a header, then a line of JSON for each evaluation, on the disk before the next one begins.

A process that is killed leaves a file that ends within a line at worst. Opening drops such a line; the evaluation is
made again, with the same result. One search writes into a file at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import append_line
from bnfuse.searching.evaluation import Evaluation
from bnfuse.searching.space import Space

FORMAT = 1
KEY = "bnfuse_search"  # of the header; its value is the format


class Log:
    """An open file of a search: `history` is what it held, `append` adds to it."""

    def __init__(self, path: Path, stream: IO[bytes], history: tuple[Evaluation, ...], dropped: bool) -> None:
        self.path, self.stream, self.history, self.dropped = path, stream, history, dropped

    def append(self, evaluation: Evaluation) -> None:
        """Store an evaluation."""
        self.write(evaluation.to_json())

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write a whole line, which is on the disk when this returns."""
        append_line(self.stream, self.path, fields)
        os.fsync(self.stream.fileno())

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()


def open_log(path: str | Path, space: Space, fingerprint: Mapping[str, Any], *, resume: bool) -> Log:
    """Open the file of a search, made where it is not there. With `resume` it may be there, if it is of this search."""
    path = Path(path)
    try:
        stream = path.open("a+b", buffering=0)
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        lock(stream, path)
        return prepare(path, stream, space, fingerprint, resume)
    except BaseException:
        stream.close()
        raise


def prepare(path: Path, stream: IO[bytes], space: Space, fingerprint: Mapping[str, Any], resume: bool) -> Log:
    """Read what the file holds, and begin it where it is empty. Raises BnfuseError where it is of another search, or
    must not be there."""
    stream.seek(0)
    content = stream.read()
    if content and not resume:
        raise BnfuseError(f"{path}: is there already: pass --resume {path} to go on with it, or another --output")
    lines, whole = whole_lines(content)
    wanted = header(space, fingerprint)
    if lines:
        require_same(path, read_header(path, lines[0]), json.loads(json.dumps(wanted)))
    elif content and not is_begun_header(content):
        raise not_a_search(path)
    if whole < len(content):  # only now that the file is known to be ours
        stream.truncate(whole)
        os.fsync(stream.fileno())
    log = Log(path, stream, (), whole < len(content))
    if not lines:
        log.write(wanted)
        sync_folder(path)
        return log
    log.history = read_evaluations(path, lines[1:], space)
    return log


def lock(stream: IO[bytes], path: Path) -> None:
    """Lock the file; the system lets go of it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # a system without it has one search a file by its user's care
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BnfuseError(f"{path}: another search is writing into it: wait for it, or pass another --output") from None


def sync_folder(path: Path) -> None:
    """Bring a new file's name to the disk too."""
    with contextlib.suppress(OSError):  # folders cannot be opened everywhere
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def whole_lines(content: bytes) -> tuple[list[bytes], int]:
    """Give the lines that were written to their end, and where the last of them ends."""
    end = content.rfind(b"\n") + 1
    lines = content[:end].split(b"\n")[:-1]
    if lines and parse(lines[-1]) is None:  # after a crash of the system, its blocks may hold anything
        end -= len(lines.pop()) + 1
    return lines, end


def parse(line: bytes) -> dict[str, Any] | None:
    """Read a line as a JSON object; None where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def header(space: Space, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Give the first line of a file: what the search is of."""
    norms = [{"node": name, "cost": cost} for name, cost in zip(space.names, space.costs, strict=True)]
    return {KEY: FORMAT, "fingerprint": dict(fingerprint), "batch_norms": norms}


def is_begun_header(content: bytes) -> bool:
    """Tell whether a file without a whole line is what a kill leaves of a header, not a file of somebody else's."""
    start = json.dumps({KEY: FORMAT})[:-1].encode()
    return content.startswith(start) or start.startswith(content)


def not_a_search(path: Path) -> BnfuseError:
    """Make the error of a file whose first line is not the header."""
    return BnfuseError(f"{path}: is no file of a search: its first line is not the header that bnfuse search writes")


def read_header(path: Path, line: bytes) -> dict[str, Any]:
    """Read the first line. Raises BnfuseError where it is no header."""
    found = parse(line)
    if found is None or KEY not in found:
        raise not_a_search(path)
    if found[KEY] != FORMAT:
        raise BnfuseError(f"{path}: has format {found[KEY]!r}, this version reads format {FORMAT}")
    if not isinstance(found.get("fingerprint"), dict):
        raise not_a_search(path)
    return found


def require_same(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise BnfuseError where a file is of a search with another fingerprint."""
    old, new = stored["fingerprint"], wanted["fingerprint"]
    other = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    if not other and stored.get("batch_norms") != wanted["batch_norms"]:
        raise BnfuseError(f"{path}: is of another search: other BatchNorms. Pass the same again, or another file.")
    if other:
        what = ", ".join(f"{key} ({short(old.get(key))} there, {short(new.get(key))} here)" for key in other)
        raise BnfuseError(f"{path}: is of another search: {what}. Pass the same again, or another file.")


def short(value: Any) -> str:
    """Write a value in at most 24 characters, or its beginning."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 24 else f"{text[:12]}..."


def read_evaluations(path: Path, lines: list[bytes], space: Space | None) -> tuple[Evaluation, ...]:
    """Read the lines behind the header. Raises BnfuseError for one that is none of ours."""
    found: list[Evaluation] = []
    for number, line in enumerate(lines, 2):
        try:
            evaluation = Evaluation.from_json(parse(line) or {})
        except (KeyError, TypeError, ValueError, OverflowError):
            raise BnfuseError(f"{path}: line {number} is damaged. Cut the file off before it, then resume.") from None
        wrong_size = space is not None and len(evaluation.placement) != space.size
        unlike = evaluation.iteration != len(found) or not evaluation.score.accuracies
        repeated = any(evaluation.placement == other.placement for other in found)
        if wrong_size or unlike or repeated or not all((found or [evaluation])[0].placement):
            raise BnfuseError(f"{path}: line {number} does not follow the one before it. Cut the file off before it.")
        found.append(evaluation)
    return tuple(found)


def read_log(path: str | Path) -> tuple[Space, dict[str, Any], tuple[Evaluation, ...]]:
    """Tell what a file holds, for reading alone: the BatchNorms, the fingerprint, the evaluations."""
    path = Path(path)
    lines, _ = whole_lines(path.read_bytes())
    if not lines:
        raise BnfuseError(f"{path}: is no file of a search: it is empty")
    head = read_header(path, lines[0])
    norms = head["batch_norms"]
    space = Space(tuple(norm["node"] for norm in norms), tuple(float(norm["cost"]) for norm in norms))
    return space, head["fingerprint"], read_evaluations(path, lines[1:], space)
