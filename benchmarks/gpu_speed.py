"""Parts of gpu_check.py: times, memory, profiles.

Each part takes (entries, arguments, folder for whole files, log) and says whether all is well.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_cases import Entry, by_training_file
from gpu_pack import unpack

from bnfuse.baselines import TorchStep
from bnfuse.baselines.names import import_torch
from bnfuse.benchmarking.cuda import cudnn
from bnfuse.benchmarking.cuda.limits import measured_limits
from bnfuse.benchmarking.cuda.memory import measured_peak
from bnfuse.benchmarking.cuda.step import CudaCandidate
from bnfuse.benchmarking.profiles import profile_step
from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.core.text import join
from bnfuse.core.times import Candidate
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.runtime import load_step

Args = argparse.Namespace
EAGER = "torch-cl"  # whose memory ours is compared with
GRAIN = 32  # images: how finely torch's largest batch is found
CHILD_S = 150.0  # at most for one process


def timing(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    """Ours at all levels and torch's variants, in turns. The ratios are to each of torch's."""
    good = []
    for (case, train), group in by_training_file(entries, "timing"):
        graph = open_graph(unpack(args.folder / train, place))
        for precision in dict.fromkeys(entry.precision for entry in group):
            log.check(30)
            own = [entry for entry in group if entry.precision == precision]
            candidates = prepared(graph, own, precision, args, place, log)
            if not candidates:
                continue
            for candidate in candidates:
                candidate.run()
            steps: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
            for _ in range(args.repetitions):
                for candidate in candidates:
                    steps[candidate.name].append(candidate.run().step)
            report(log, f"{case} {precision}", steps, own)
            good.append(len(candidates) == len(own) + len(args.baselines))
            del candidates
            forget()
    return all(good) and bool(good)


def prepared(
    graph: TrainingGraph, own: list[Entry], precision: str, args: Args, place: Path, log: Any
) -> list[Candidate]:
    """Those that can be made: what one of them lacks is a line."""
    feeds = draw_feeds(graph, np.random.default_rng(0))
    how: dict[str, Any] = {"lr": 0.0, "momentum": 0.9, "device": "cuda", "precision": precision}
    made: list[tuple[str, Callable[[], Candidate]]] = [
        (entry.level, lambda e=entry: CudaCandidate(e.level, load_step(unpack(args.folder / e.file, place)), feeds))  # type: ignore[misc]
        for entry in own
    ]
    made += [(baseline, lambda p=baseline: TorchStep(graph, p, feeds, **how)) for baseline in args.baselines]  # type: ignore[misc]
    found = []
    for name, make in made:
        start = time.monotonic()
        try:
            log.check(20)
            found.append(make())
            log.write(f"{graph.name} {precision} {name} ready", f"{time.monotonic() - start:.1f} s")
        except (BnfuseError, RuntimeError) as error:
            log.write(f"{graph.name} {precision} {name} cannot be made", first_line(error), error=str(error)[:2000])
    return found


def report(log: Any, title: str, steps: dict[str, list[float]], own: list[Entry]) -> None:
    levels = [entry.level for entry in own]
    best = {name: statistics.median(values) for name, values in steps.items()}
    batch = own[0].batch
    for name, values in steps.items():
        ratios = {level: best[name] / best[level] for level in levels if level in best and level != name}
        log.write(
            f"{title} {name}",
            f"min {1e3 * min(values):.3f} ms, median {1e3 * best[name]:.3f} ms; "
            + ", ".join(f"{value:.3f}x {level}" for level, value in ratios.items()),
            min_s=min(values),
            median_s=best[name],
            images_per_s=batch / best[name],
            steps_s=values,
            times_as_long_as=ratios,
        )


def forget() -> None:
    """Give memory back between cases."""
    torch = import_torch()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# -- memory --------------------------------------------------------------------------------------------------------


def memory(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    """Peaks of ours and torch's; then batches: each of ours that was built, torch's by halving."""
    good = []
    for (case, train), group in by_training_file(entries, "memory"):
        file = unpack(args.folder / train, place)
        for precision in dict.fromkeys(entry.precision for entry in group):
            title = f"{case} batch {group[0].batch} {precision}"
            peaks = {}
            for entry in (entry for entry in group if entry.precision == precision):
                peaks[entry.level] = peak(log, title, entry.level, unpack(args.folder / entry.file, place), precision)
            if is_first_of(entries, group[0]):
                for baseline in dict.fromkeys(("torch", EAGER, *args.baselines)):
                    peaks[baseline] = peak(log, title, baseline, file, precision)
                share(log, title, peaks)
                if not args.no_largest:
                    largest_of_torch(log, title, file, precision, group[0].batch)
            good.append(all(found and found["fits"] for found in peaks.values()))
    return all(good) and bool(good)


def is_first_of(entries: list[Entry], entry: Entry) -> bool:
    """Whether its batch is the smallest that its case has: the others are there for ours alone."""
    return entry.batch == min(other.batch for other in entries if other.case == entry.case)


def peak(
    log: Any, title: str, name: str, file: Path, precision: str, batch: int | None = None
) -> dict[str, Any] | None:
    log.check(15)
    try:
        found = measured_peak(file, name, precision, batch=batch, timeout=min(CHILD_S, log.left))
    except BnfuseError as error:
        log.write(f"{title} {name}", str(error)[:300], error=str(error)[:2000])
        return None
    sizes = ", ".join(f"{key[:-6]} {value / 2**30:.3f} GiB" for key, value in found.items() if key.endswith("_bytes"))
    log.write(
        f"{title} {name}" + (f" at batch {batch}" if batch else ""), sizes or "does not fit", batch=batch, **found
    )
    return found


def share(log: Any, title: str, peaks: dict[str, Any]) -> None:
    """Ours over torch eager's, allocated and in the driver's view."""
    base = peaks.get(EAGER)
    for level in ("none", "icf"):
        if base and base["fits"] and peaks.get(level) and peaks[level]["fits"]:
            ratios = {key: peaks[level][key] / base[key] for key in ("allocated_bytes", "driver_bytes") if base[key]}
            text = ", ".join(f"{key[:-6]} {value:.3f}" for key, value in ratios.items())
            log.write(f"{title} {level} over {EAGER}", text, **ratios)


def largest_of_torch(log: Any, title: str, file: Path, precision: str, fits: int) -> int:
    """Doubling, then halving the gap; each try a process."""
    too_large = 0
    while not too_large or too_large - fits > GRAIN:
        batch = (fits + too_large) // 2 // GRAIN * GRAIN if too_large else 2 * fits
        if batch <= fits:
            break
        found = peak(log, title, EAGER, file, precision, batch)
        if found is None:
            break
        fits, too_large = (batch, too_large) if found["fits"] else (fits, batch)
    log.write(f"{title} largest batch of {EAGER}", f"{fits} fits, {too_large} does not", fits=fits, too_large=too_large)
    return fits


# -- profile -------------------------------------------------------------------------------------------------------


def profile(entries: list[Entry], args: Args, place: Path, log: Any) -> bool:
    """Our launches one by one, at the last level; the convolutions alone by cuDNN beside ours."""
    good = []
    for (case, train), group in by_training_file(entries, "profile"):
        graph = open_graph(unpack(args.folder / train, place))
        feeds = draw_feeds(graph, np.random.default_rng(0))
        for precision in dict.fromkeys(entry.precision for entry in group):
            log.check(20)
            limits = measured_limits(precision)
            rows: list[dict[str, Any]] = []
            for entry in (entry for entry in group if entry.precision == precision):
                candidate = CudaCandidate(entry.name, load_step(unpack(args.folder / entry.file, place)), feeds)
                candidate.run()
                seconds = min(candidate.run().step for _ in range(args.repetitions))
                found = profile_step(entry.name, candidate.step, candidate.feeds, limits, args.repetitions, seconds)
                rows = found.to_json()["rows"]
                log.write(entry.name, f"step {1e3 * seconds:.3f} ms\n{join(found.sections())}\n", **found.to_json())
                good.append(bool(rows))
            log.check(20)
            floors = cudnn.beside(cudnn.measured_floors(graph, precision), rows)
            total = sum(row["total"] for row in floors)
            log.write(f"{case} {precision} cuDNN", f"\n{cudnn.section(floors)}\n", total_s=total, rows=floors)
    return all(good) and bool(good)
