"""A step of several ranks as a Chrome trace (chrome://tracing, Perfetto) and as a picture: what runs beside what.

recorded(call, path)        on a GPU: kernels by streams, through torch's profiler, also those inside a CUDA graph
of_spans(launches, spans)   on a CPU: launches one after the other, and the exchanges that were under way meanwhile
hidden(events)              seconds of exchanges, and how many of them something is computed beside
draw(events, path)          a picture of one step
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]  # of the trace: name, ts and dur in microseconds, tid
Span = tuple[str, float, float]  # name, begin, end in seconds
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def is_exchange(event: Event) -> bool:
    return event.get("cat") == "exchange" or "nccl" in event["name"].lower()


def warm_up() -> None:
    """Let the profiler look at the GPU once, before the graphs are made that it is to see the inside of."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def recorded(call: Callable[[], Any], path: Path, steps: int = 3) -> list[Event]:
    """Kernels of some steps on this GPU; the trace is written."""
    import torch

    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    found = json.loads(path.read_text())["traceEvents"]
    events = [slim(event) for event in found if event.get("ph") == "X" and event.get("cat") in KERNELS]
    return write(sorted(events, key=lambda event: event["ts"]), path)


def slim(event: Event) -> Event:
    """What is looked at: names of kernels alone have thousands of characters in all."""
    stream = event.get("args", {}).get("stream", event.get("tid"))
    kept = {key: event[key] for key in ("ph", "cat", "ts", "dur", "pid")}
    return {**kept, "name": event["name"][:120], "tid": stream}


def of_spans(launches: Iterable[Span], exchanges: Iterable[Span], path: Path) -> list[Event]:
    """Of what was noted on a CPU: names, begins and ends, in seconds."""
    events = [event_of(name, "kernel", start, stop - start, "launches") for name, start, stop in launches]
    events += [event_of(name, "exchange", start, stop - start, "exchanges") for name, start, stop in exchanges]
    return write(sorted(events, key=lambda event: event["ts"]), path)


def event_of(name: str, kind: str, start: float, seconds: float, lane: str) -> Event:
    return {"ph": "X", "name": name, "cat": kind, "ts": 1e6 * start, "dur": 1e6 * seconds, "pid": 0, "tid": lane}


def write(events: list[Event], path: Path) -> list[Event]:
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return events


def read(path: Path) -> list[Event]:
    return list(json.loads(path.read_text())["traceEvents"])


def hidden(events: Sequence[Event]) -> tuple[float, float]:
    """Seconds in which something is exchanged, and in which something is computed meanwhile."""
    exchanges = merged(event for event in events if is_exchange(event))
    computing = merged(event for event in events if not is_exchange(event))
    both = 0.0
    for start, stop in exchanges:
        both += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in computing)
    return 1e-6 * sum(b - a for a, b in exchanges), 1e-6 * both


def merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times in which some of them run."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def last_step(events: Sequence[Event]) -> list[Event]:
    """The last of several equal steps in a row: as many events, from behind."""
    names = [event["name"] for event in events]
    for steps in (3, 2):
        size = len(names) // steps
        if size and len(names) % steps == 0 and sorted(names[:size]) == sorted(names[-size:]):
            return list(events[-size:])
    return list(events)


def draw(events: Sequence[Event], path: Path, title: str) -> None:
    """A lane a stream, exchanges in another colour."""
    from bnfuse.core.figures import pyplot_figure, save_figure

    shown = last_step(events)
    first = min(event["ts"] for event in shown)
    lanes = sorted({str(event["tid"]) for event in shown}, key=lambda lane: lane_order(shown, lane))
    figure = pyplot_figure()(figsize=(12, 0.8 + 0.55 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    for index, lane in enumerate(lanes):
        for colour, wanted in (("#1f4e9c", False), ("#c8472f", True)):
            bars = [
                (1e-3 * (event["ts"] - first), 1e-3 * event["dur"])
                for event in shown
                if str(event["tid"]) == lane and is_exchange(event) is wanted
            ]
            axis.broken_barh(bars, (index - 0.4, 0.8), color=colour, linewidth=0)
    axis.set_yticks(range(len(lanes)), [f"stream {lane}" if lane.isdigit() else lane for lane in lanes], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    seconds, beside = hidden(shown)
    share = f", {100 * beside / seconds:.0f} % of it beside computing" if seconds else ""
    axis.set_title(f"{title}: {1e3 * seconds:.2f} ms of exchanges (red){share}", fontsize=10, loc="left")
    save_figure(figure, path)


def lane_order(events: Sequence[Event], lane: str) -> tuple[bool, str]:
    return any(is_exchange(event) for event in events if str(event["tid"]) == lane), lane
