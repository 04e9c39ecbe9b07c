"""Measured choices: which of several ways to do a problem is the fastest on this machine, and remembering it.

A generator's rule decides first (kernels/kernel.py, `Choice`); a remembered choice takes its place. A choice is
remembered on disk beside the compiled kernels, one small JSON file a problem, under a hash of the problem, the target
and the generators' sources. Files are moved into place as a whole, so that processes may share the folder; one that
cannot be read, or names a choice that does not exist, is as good as none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import write_atomically
from bnfuse.runtime.backends.backend import Measure, backend_of
from bnfuse.runtime.codegen.build import Progress, objects
from bnfuse.runtime.codegen.cache import Cache, content_key
from bnfuse.runtime.kernels.kernel import Choice, Kernel
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.graph import Lowered
from bnfuse.runtime.targets.target import Target

BUDGET = 600.0  # seconds: what is not measured by then keeps the rule's choice until the next tuning
TUNED = "tuned"  # folder of a cache
TOGETHER = 12  # problems whose candidates are compiled at a time
MARGIN = 0.97  # of the rule's time: less of a gain is taken for noise

Way = TypeVar("Way")


@dataclasses.dataclass(frozen=True)
class Task:
    """A kernel of the graph that has several choices. `request` is for that of the rule; `launches` of a step."""

    request: Request
    choices: tuple[Choice, ...]
    launches: int
    flops: int

    @property
    def key(self) -> str:
        """Of the problem, the target and what makes its kernels."""
        made = f"{self.request.kind} {content_key(self.request.kernel(), self.request.kind)}"
        return hashlib.sha256(made.encode()).hexdigest()

    def candidate(self, choice: Choice) -> Request:
        """Make the request for a choice.

        For the rule's own it is the plain one, whose kernel may have been compiled.
        """
        return self.request if choice == self.choices[0] else self.request.by(choice)


class Memory:
    """The remembered choices of a cache: names (texts of a `Choice`) by key. Without a folder, of this call alone."""

    def __init__(self, cache: Cache) -> None:
        self.folder = cache.folder
        self.known: dict[str, str] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever remembered here."""
        return not self.known and (self.folder is None or not (self.folder / TUNED).is_dir())

    def choice(self, task: Task) -> Choice | None:
        """Give the remembered choice, or None."""
        key = task.key
        name = self.known.get(key) or self._read(key)
        if name is None:
            return None
        ways = itertools.chain(task.choices, combinations(task.choices))
        return next((choice for choice in ways if repr(choice) == name), None)

    def remember(self, task: Task, choice: Choice, seconds: Sequence[float]) -> None:
        """`seconds` of the task's choices."""
        times = {repr(c): s for c, s in zip(task.choices, seconds, strict=True)}
        self.keep(task.key, repr(choice), task.request.kernel().name, times)

    def keep(self, key: str, choice: str, kernel: str, seconds: Mapping[str, float]) -> None:
        """Remember by names: times may have been taken where no task can be made.

        `kernel` and `seconds` are for readers. A folder that cannot be written to costs speed next time, nothing else.
        """
        self.known[key] = choice
        if self.folder is None:
            return
        text = json.dumps({"choice": choice, "kernel": kernel, "seconds": dict(seconds)}, indent=1)
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        except (OSError, BnfuseError):
            return

    def _read(self, key: str) -> str | None:
        if self.folder is None:
            return None
        try:
            name = json.loads(self._path(key).read_bytes())["choice"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return name if isinstance(name, str) else None

    def _path(self, key: str) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / TUNED / f"{key}.json"


def tasks_of(lowered: Lowered) -> dict[int, Task]:
    """Find the kernels of a program that can be made in several ways, by their index."""
    counts = Counter(launch.kernel for launch in lowered.program.launches)
    works = lowered.program.works
    found = {}
    for index, request in enumerate(lowered.requests):
        choices = request.choices()
        if len(choices) > 1:
            found[index] = Task(request, choices, counts[index], works[index].flops if works else 0)
    return found


def choose(lowered: Lowered, memory: Memory) -> None:
    """Put the remembered choices in place of the rule's."""
    if memory.is_empty:  # to list all ways to make each kernel takes longer than all else about them
        return
    for index, task in tasks_of(lowered).items():
        choice = memory.choice(task)
        if choice is not None and choice != task.choices[0]:
            lowered.requests[index] = task.candidate(choice)
            lowered.program.kernels[index] = lowered.requests[index].kernel().name
            lowered.program.report.tuned += 1


def tune(
    lowered: Lowered,
    memory: Memory,
    cache: Cache,
    target: Target,
    *,
    progress: Progress | None = None,
    measure: Measure | None = None,
    budget: float = BUDGET,
) -> None:
    """Measure the candidates of the problems that nothing is remembered of, those with the most work first."""
    chosen = measure or backend_of(target).measure(target)
    tasks = [task for task in tasks_of(lowered).values() if memory.choice(task) is None]
    tasks.sort(key=lambda task: task.launches * task.flops, reverse=True)
    total, done, end = sum(len(task.choices) for task in tasks), 0, time.monotonic() + budget
    for first in range(0, len(tasks), TOGETHER):
        if time.monotonic() > end:
            break
        some = tasks[first : first + TOGETHER]
        requests = [task.candidate(choice) for task in some for choice in task.choices]

        def tell(count: int, _: int, name: str, done: int = done) -> None:
            if progress:
                progress(done, total, f"compiling candidates: {name}")

        codes = iter(objects(requests, cache, progress=tell))
        for task in some:
            kernels = [task.candidate(choice).kernel() for choice in task.choices]
            choice, seconds = winner(task.choices, kernels, [next(codes) for _ in kernels], chosen)
            memory.remember(task, choice, seconds)
            done += len(kernels)
            if progress:
                progress(done, total, f"measured {kernels[0].name}")


def winner(
    choices: tuple[Choice, ...], kernels: Sequence[Kernel], codes: Sequence[bytes], measure: Measure
) -> tuple[Choice, list[float]]:
    """Find the fastest and the seconds of all. It has to win twice: on a busy machine luck is common, but not twice."""
    seconds = measure(kernels, codes)
    parts = [parts_of(choice) for choice in choices]
    found = fastest_parts(parts, seconds)
    if not any(found):
        return choices[0], seconds
    some = sorted({0, *found})
    again = measure([kernels[i] for i in some], [codes[i] for i in some])
    confirmed = fastest_parts([parts[i] for i in some], again)
    return joined([choices[some[i]] for i in confirmed]), seconds


def parts_of(choice: Choice) -> tuple[Any, ...]:
    """Divide a plan that is a tuple: it has a plan for each of several stages, which know nothing of each other."""
    return choice.plan if isinstance(choice.plan, tuple) else (choice,)


def fastest_parts(parts: Sequence[tuple[Any, ...]], seconds: Sequence[float]) -> list[int]:
    """For each part the index of the choice that has the fastest, where the other parts are the rule's (the first's).
    Stages run one after the other, so that what they gain adds up."""
    found = []
    for place in range(len(parts[0])):
        rest = [(own[:place], own[place + 1 :]) for own in parts]
        alike = [i for i in range(len(parts)) if rest[i] == rest[0]]
        found.append(best(alike, [seconds[i] for i in alike]))
    return found


def joined(choices: Sequence[Choice]) -> Choice:
    """Make the choice that has its first part of the first of some choices, its second of the second, and so on."""
    if len(choices) == 1:
        return choices[0]
    return Choice(choices[0].algorithm, tuple(choice.plan[place] for place, choice in enumerate(choices)))


def combinations(choices: Sequence[Choice]) -> Iterator[Choice]:
    """All that can be joined of choices whose plans have several parts."""
    if all(isinstance(choice.plan, tuple) for choice in choices):
        for parts in itertools.product(*(dict.fromkeys(own) for own in zip(*map(parts_of, choices), strict=True))):
            yield Choice(choices[0].algorithm, parts)


def best(choices: Sequence[Way], seconds: Sequence[float]) -> Way:
    """Find the fastest; that of the rule, the first, where none is clearly faster."""
    index = min(range(len(choices)), key=lambda i: seconds[i])
    return choices[index] if seconds[index] < MARGIN * seconds[0] else choices[0]
