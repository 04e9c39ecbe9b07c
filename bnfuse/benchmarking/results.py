"""What a benchmark found, as tables and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.baselines.names import is_graph
from bnfuse.benchmarking.choices import is_gpu
from bnfuse.benchmarking.compiling import CompileTimes
from bnfuse.benchmarking.estimates import Estimates
from bnfuse.benchmarking.profiles import Profile
from bnfuse.core.text import Section, join, scaled
from bnfuse.core.times import Summary


@dataclasses.dataclass(frozen=True)
class Result:
    """A candidate. `level`, `pool_first`, `sample` are None for baselines. `steps_s` has every timed step, in order."""

    name: str
    level: str | None
    pool_first: bool | None
    sample: str | None
    times: Summary
    steps_s: tuple[float, ...]
    settle_s: float  # the longest wait until its threads slept
    peak_bytes: int | None
    setup_peak_bytes: int | None
    compiling: CompileTimes | None = None
    reserved_bytes: int | None = None  # on a GPU: what an allocator took, and what the driver counts
    driver_bytes: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is a compiled step."""
        return self.level is not None

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "name": self.name,
            **dataclasses.asdict(self.times),
            "peak_bytes": self.peak_bytes,
            "setup_peak_bytes": self.setup_peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "driver_bytes": self.driver_bytes,
            "rewrite_s": self.compiling.rewrite_s if self.compiling else None,
            "compile_s": self.compiling.cold_s if self.compiling else None,
            "compile_warm_s": self.compiling.warm_s if self.compiling else None,
            "level": self.level,
            "pool_first": self.pool_first,
            "sample": self.sample,
            "steps_s": list(self.steps_s),
            "settle_s": self.settle_s,
        }


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as long (and as much memory) `against` takes as `name`: above 1, `name` is better."""

    name: str
    against: str
    min: float
    median: float
    forward: float | None
    backward: float | None
    peak: float | None


def ratio(result: Result, other: Result) -> Ratio:
    """Compare two candidates: how many times as long the other takes, and how many times its memory."""
    a, b = result.times, other.times
    peaks = result.peak_bytes, other.peak_bytes
    return Ratio(
        result.name,
        other.name,
        min=b.min_s / a.min_s,
        median=b.median_s / a.median_s,
        forward=quotient(b.forward_min_s, a.forward_min_s),
        backward=quotient(b.backward_min_s, a.backward_min_s),
        peak=peaks[1] / peaks[0] if peaks[0] and peaks[1] else None,
    )


def quotient(a: float | None, b: float | None) -> float | None:
    """Divide; None where one of them was not measured, or is lost in the noise."""
    return a / b if a is not None and b else None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """All that a benchmark found."""

    model: str
    results: tuple[Result, ...]
    machine: dict[str, Any]
    repetitions: int
    profiles: tuple[Profile, ...] = ()
    target: str = "cpu"
    floors: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # convolutions alone, on a GPU
    estimates: Estimates | None = None

    def result(self, name: str) -> Result:
        """Find a candidate's result by its name."""
        return next(result for result in self.results if result.name == name)

    @property
    def best(self) -> Result:
        """Our fastest; where none of ours was asked for, the fastest."""
        ours = [result for result in self.results if result.is_ours]
        return min(ours or self.results, key=lambda result: result.times.min_s)

    @property
    def ratios(self) -> list[Ratio]:
        """Each of ours against everything else that it may be compared with."""
        ours = [result for result in self.results if result.is_ours]
        return [ratio(one, other) for one in ours for other in self.comparable if other is not one]

    @property
    def comparable(self) -> list[Result]:
        """On a GPU, baselines without a graph wait for their launches: nothing is said against those."""
        return [r for r in self.results if r.is_ours or is_graph(r.name) or not is_gpu(self.target)]

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "model": self.model,
            "repetitions": self.repetitions,
            "results": [result.to_json() for result in self.results],
            "ratios": [dataclasses.asdict(entry) for entry in self.ratios],
            "machine": self.machine,
            "profile": [profile.to_json() for profile in self.profiles],
            **({"convolutions": self.floors} if self.floors else {}),
            **({"estimates": self.estimates.to_json()} if self.estimates else {}),
        }

    def sections(self) -> list[Section]:
        """Show times, ratios, compile times, profiles and the machine."""
        precision = self.machine.get("precision", "fp32")
        how = "" if precision == "fp32" else f" in {precision}"
        title = f"A training step of {self.model}{how}, {self.repetitions} repetitions"
        columns = ("candidate", "min", "median", "forward min", "backward min", "peak memory", "min against first")
        rows = [(r.name, *cells(r), self._against_first(r)) for r in self.results]
        sections = [Section.table(title, columns, rows)]
        if others := [r for r in self.comparable if r is not self.best]:
            head = ("against", "min", "median", "forward", "backward", "memory")
            sections.append(
                Section.table(
                    f"{self.best.name} is so many times as fast (as small)",
                    head,
                    [ratio_cells(ratio(self.best, other)) for other in others],
                )
            )
        if compiled := [r for r in self.results if r.compiling]:
            rows = [(r.name, *compile_cells(r.compiling)) for r in compiled if r.compiling]
            sections.append(Section.table("Compiling", ("candidate", "rewrite", "cold", "warm"), rows))
        for profile in self.profiles:
            sections += profile.sections()
        if self.floors:
            sections.append(floors_section(self.floors))
        if self.estimates:
            sections += self.estimates.sections()
        return [*sections, Section.lines("Machine", machine_lines(self.machine))]

    def _against_first(self, result: Result) -> str:
        pair = (result, self.results[0])
        return f"{ratio(*pair).min:.2f}x" if all(r in self.comparable for r in pair) else "-"

    def __str__(self) -> str:
        return join(self.sections())


def floors_section(floors: list[dict[str, Any]]) -> Section:
    """Show cuDNN's times of the layers."""
    from bnfuse.benchmarking.cuda.cudnn import section

    return section(floors)


def cells(result: Result) -> tuple[str, ...]:
    """Write the cells of a candidate's row."""
    times = result.times
    seconds = (times.min_s, times.median_s, times.forward_min_s, times.backward_min_s)
    peak = scaled(result.peak_bytes, "B") if result.peak_bytes is not None else "-"
    return (*(milliseconds(s) for s in seconds), peak)


def milliseconds(seconds: float | None) -> str:
    """Write seconds as milliseconds, with two decimals where a step is short, as on a GPU."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.{1 if seconds >= 0.1 else 2}f} ms"


def ratio_cells(found: Ratio) -> tuple[str, ...]:
    """Write the cells of a ratio; - where one of the two has no such number."""
    values = (found.min, found.median, found.forward, found.backward, found.peak)
    return (found.against, *(f"{value:.2f}x" if value is not None else "-" for value in values))


def compile_cells(found: CompileTimes) -> tuple[str, ...]:
    """Write the cells of compile times."""
    rewriting = f"{found.rewrite_s:.1f} s" if found.rewrite_s is not None else "-"
    return rewriting, f"{found.cold_s:.1f} s", f"{found.warm_s:.1f} s"


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """Write a line for each thing that is known of the machine."""
    return [f"{key}: {listed(value) if isinstance(value, dict) else value}" for key, value in machine.items()]


def listed(values: dict[str, Any]) -> str:
    """Name value, name value; a dictionary in a dictionary in parentheses."""
    return ", ".join(f"{k} ({listed(v)})" if isinstance(v, dict) else f"{k} {v}" for k, v in values.items())
