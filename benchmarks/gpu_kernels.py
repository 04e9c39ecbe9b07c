"""Times of a network's kernels by themselves, for each way to make them: built anywhere, run on a GPU machine.

    python benchmarks/gpu_kernels.py build densenet121 resnet50 --precision bf16 --several -o kernels.zip
    python benchmarks/gpu_kernels.py run kernels.zip --turns -o times.json    # needs torch, cuda-bindings; no TVM
    python benchmarks/gpu_kernels.py remember times.json                      # where it was built

Every choice of a problem runs on the same random data; how far its results are from those of the rule's is shown, and
the time of each stage, the median of replays of a CUDA graph. `--turns` also times the choices as tuning does. What is
remembered is used by every later compile for that target with that cache (docs/runtime.md, "Tuning").
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REPEATS = 10  # launches in a graph
REPLAYS = 7
WRONG = 0.05  # a choice whose results are that far from the rule's (norms) is not remembered, whatever its time

Entry = dict[str, Any]


def build(arguments: argparse.Namespace) -> None:
    """Compile what tuning would measure, each problem of the networks once."""
    from bnfuse.runtime.codegen.build import objects
    from bnfuse.runtime.codegen.cache import Cache, default_folder
    from bnfuse.runtime.codegen.sources import sources_hash
    from bnfuse.runtime.codegen.tuning import parts_of

    entries: list[Entry] = []
    requests = []
    for task, fixed in problems(arguments):
        for choice in bounded(task.choices, arguments.choices) or (None,):
            made = task.request if choice is None else task.candidate(choice)
            kernel = made.kernel()
            requests.append(made)
            entries.append(
                {
                    **fixed,
                    "sources": sources_hash("cuda"),
                    "choice": repr(choice),
                    "parts": [repr(part) for part in parts_of(choice)] if choice else [],
                    "rule": choice is None or choice == task.choices[0],
                    "kernel": kernel.name,
                    "params": [[p.name, p.access, p.elements, p.dtype] for p in kernel.params],
                }
            )
    count = len({entry["key"] for entry in entries})
    print(f"{len(entries)} kernels of {count} problems")
    if arguments.list:
        return
    codes = objects(requests, Cache(default_folder()), progress=lambda done, total, name: print(done, total, name))
    with zipfile.ZipFile(arguments.output, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("entries.json", json.dumps(entries))
        for i, code in enumerate(codes):
            file.writestr(f"{i}.bin", code)


def bounded(choices: Sequence[Any], count: int) -> list[Any]:
    """At most so many of the choices: the rule's, then of each part of their plans in turns."""
    from bnfuse.runtime.codegen.tuning import parts_of

    if not choices:
        return []
    first, *others = choices
    changed = [[a != b for a, b in zip(parts_of(first), parts_of(other), strict=True)].index(True) for other in others]
    parts = [[o for o, at in zip(others, changed, strict=True) if at == place] for place in sorted(set(changed))]
    turns = [choice for row in itertools.zip_longest(*parts) for choice in row if choice is not None]
    return [first, *turns][:count]


def problems(arguments: argparse.Namespace) -> Iterator[tuple[Any, Entry]]:
    """The tuning task of each problem of the networks, and what its entries have in common. The launches of a problem
    are those of the first network that has it."""
    from bnfuse.runtime.codegen.tuning import Task

    seen = set()
    for network in arguments.networks:
        lowered = lowered_network(network, arguments)
        counts = Counter(launch.kernel for launch in lowered.program.launches)
        for index, request in enumerate(lowered.requests):
            work = lowered.program.works[index]
            if arguments.only and not any(part in f"{work.kind} {work.shape}" for part in arguments.only):
                continue
            task = Task(request, request.choices(), counts[index], work.flops)
            if task.key in seen or (arguments.several and len(task.choices) < 2):
                continue
            seen.add(task.key)
            fixed = {"network": network, "key": task.key, "op": work.op, "kind": work.kind, "shape": work.shape}
            yield task, fixed | {"flops": work.flops, "bytes": work.bytes, "launches": counts[index]}


def lowered_network(network: str, arguments: argparse.Namespace) -> Any:
    """The program of a network's training step at level icf."""
    from bnfuse.build import build_training_graph
    from bnfuse.graph.training_graph import open_graph
    from bnfuse.models import build_forward
    from bnfuse.passes import rewrite
    from bnfuse.runtime import SGD
    from bnfuse.runtime.backends.resolve import resolve
    from bnfuse.runtime.compile import lower_graph

    model = build_training_graph(build_forward(network, batch=arguments.batch, image=arguments.image))
    graph = open_graph(rewrite(open_graph(model).model, level="icf").model)
    target = resolve(arguments.target, precision=arguments.precision)
    return lower_graph(graph, target, SGD(lr=0.1, momentum=0.9))[0]


def run(arguments: argparse.Namespace) -> None:
    import torch

    from bnfuse.runtime.backends.cuda.driver import open_driver
    from bnfuse.runtime.kernels.cuda import container

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = open_driver()
    results: list[Entry] = []
    with zipfile.ZipFile(arguments.file) as file:
        entries = list(enumerate(json.loads(file.read("entries.json"))))
        for _, group in itertools.groupby(entries, lambda item: item[1]["key"]):
            rows = [(entry, container.unpack(file.read(f"{i}.bin"), str(i))) for i, entry in group]
            found = run_problem(torch, driver, rows, arguments)
            results += [{**entry, **more} for (entry, _), more in zip(rows, found, strict=True)]
    Path(arguments.output).write_text(json.dumps(results))


def run_problem(torch: Any, driver: Any, rows: Sequence[tuple[Entry, Any]], arguments: Any) -> list[Entry]:
    """What was found about each choice of a problem. One that fails has an `error`, and the others go on."""
    torch.cuda.empty_cache()
    state: dict[str, Any] = {"buffers": {}, "first": None, "once": arguments.once}
    found = []
    for entry, code in rows:
        try:
            found.append(measure(torch, driver, entry, code, state))
        except Exception as error:
            found.append({"error": str(error)[:200]})
    state.clear()
    if arguments.turns and not arguments.once:
        torch.cuda.empty_cache()
        time_in_turns(driver, rows, found)
    for (entry, _), more in zip(rows, found, strict=True):
        show({**entry, **more})
    return found


def time_in_turns(driver: Any, rows: Sequence[tuple[Entry, Any]], found: Sequence[Entry]) -> None:
    """Add `turns_us` to what was found about choices that run, measured as tuning on that machine would."""
    from bnfuse.runtime.backends.cuda.measure import times_of
    from bnfuse.runtime.kernels.kernel import Param

    running = [i for i, more in enumerate(found) if "error" not in more]
    if not running:
        return
    params = [[Param(*param) for param in rows[i][0]["params"]] for i in running]
    try:
        seconds = times_of(params, [rows[i][1] for i in running], driver)
    except Exception as error:
        print(f"in turns: FAILED {str(error)[:200]}", flush=True)
        return
    for i, second in zip(running, seconds, strict=True):
        found[i]["turns_us"] = second * 1e6


def measure(torch: Any, driver: Any, entry: dict[str, Any], code: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Times of the stages in microseconds, and the distance of the results from the first choice's."""
    from bnfuse.runtime.backends.cuda.driver import Arguments, Call

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32}
    types |= {"int64": torch.int64, "uint8": torch.uint8, "int8": torch.int8}
    held = state["buffers"]
    for name, access, elements, dtype in entry["params"]:
        kind = types[dtype]
        if name not in held or held[name].numel() != elements:
            held[name] = torch.zeros(elements, dtype=kind, device="cuda")
        elif access == "in":
            continue  # as it was for the choices before
        if access == "out":
            held[name].fill_(float("nan") if kind.is_floating_point else 127)
        elif kind.is_floating_point:
            generator = torch.Generator("cuda").manual_seed(len(name))
            values = torch.randn(elements, dtype=torch.float32, device="cuda", generator=generator)
            held[name].copy_(values * (0.02 if name == "weight" else 1))
    torch.cuda.synchronize()  # the launches are on a stream that does not wait for torch's
    kinds = dict(code.parameters)
    calls = []
    with driver.active():
        module = driver.load(code.cubin, code.arch, "kernel")
        for stage in code.stages:
            given = Arguments([kinds[name] for name in stage.arguments])
            for index, name in enumerate(stage.arguments):
                given.set(index, held[name].data_ptr() if kinds[name] == "buffer" else 0)
            function = driver.function(module, stage.symbol, stage.shared)
            calls.append(Call(function, stage.grid, stage.threads, stage.shared, given))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls:
                driver.launch(call, stream.cuda_stream)
        stream.synchronize()
        names = [n for n, access, *_ in entry["params"] if access != "in" and "partials" not in n]
        outputs = {n: held[n].float() for n in names}
        if state["first"] is None:
            state["first"] = {n: v.clone() for n, v in outputs.items()}
        distances = {n: distance(torch, v, state["first"][n]) for n, v in outputs.items()}
        times = [] if state["once"] else [stage_time(torch, driver, call) for call in calls]
        driver.unload(module)
    return {"us": times, "total_us": sum(times), "distances": distances, "resources": resources_of(code)}


def distance(torch: Any, value: Any, first: Any) -> float:
    """Norm of the difference, relative. What is not written stays NaN, such as a buffer beside the slot: that has to be
    the same of both."""
    if not torch.equal(value.isnan(), first.isnan()):
        return math.inf
    value, first = value.nan_to_num(), first.nan_to_num()
    norm = float(first.norm())
    return float((value - first).norm()) / norm if norm else float(value.norm())


def resources_of(code: Any) -> Any:
    return [[stage.symbol, list(stage.grid), stage.threads, stage.shared] for stage in code.stages]


def stage_time(torch: Any, driver: Any, call: Any) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            driver.launch(call, torch.cuda.current_stream().cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1000 / REPEATS)
    return statistics.median(found)


def remember(arguments: argparse.Namespace) -> None:
    """Write the fastest choice of each problem to the memory of tuning."""
    from bnfuse.runtime.codegen.cache import Cache, default_folder
    from bnfuse.runtime.codegen.sources import sources_hash
    from bnfuse.runtime.codegen.tuning import Memory

    results = json.loads(Path(arguments.file).read_text())
    if any(row.get("sources") != sources_hash("cuda") for row in results):
        raise SystemExit(f"{arguments.file}: is of other generators than those here: build and run again")
    memory = Memory(Cache(arguments.cache or default_folder()))
    kept = other = 0
    for key, rows in by_problem(results).items():
        if (found := fastest(rows)) is None:
            continue
        seconds = {row["choice"]: seconds_of(row) for row in usable(rows)}
        memory.keep(key, found, rows[0]["kernel"], seconds)
        kept, other = kept + 1, other + (found != rows[0]["choice"])
    print(f"{kept} problems remembered, {other} of them not by the rule")


def by_problem(results: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Rows by the key of their tuning task; problems that can be made in one way only are left out."""
    found: dict[str, list[Entry]] = {}
    for row in results:
        if row["choice"] != repr(None):
            found.setdefault(row["key"], []).append(row)
    return {key: rows for key, rows in found.items() if len(rows) > 1}


def usable(rows: Sequence[Entry]) -> list[Entry]:
    """The choices that ran and computed what the rule's does. The comparison is false for NaN."""
    ran = [row for row in rows if "error" not in row and 0 < seconds_of(row) < math.inf]
    return [row for row in ran if all(distance < WRONG for distance in row["distances"].values())]


def fastest(rows: Sequence[Entry]) -> str | None:
    """By the rule of tuning, part by part. None where the rule's own choice has no time to compare with."""
    from bnfuse.runtime.codegen.tuning import fastest_parts

    found = usable(rows)
    if not found or not found[0]["rule"]:
        return None
    chosen = fastest_parts([tuple(row["parts"]) for row in found], [seconds_of(row) for row in found])
    if len(chosen) == 1:
        return str(found[chosen[0]]["choice"])
    rule, parts = found[0], [found[row]["parts"][place] for place, row in enumerate(chosen)]
    plan = f"({', '.join(rule['parts'])})"
    return str(rule["choice"]).replace(f"plan={plan}", f"plan=({', '.join(parts)})")


def seconds_of(row: Entry) -> float:
    """Of all stages: in turns with the other choices where that was measured, else the sum of each by itself."""
    return float(row.get("turns_us", row.get("total_us", 0.0))) / 1e6


def show(result: dict[str, Any]) -> None:
    if not result.get("us", [1]):
        return
    name = f"{result['kind']} {result['shape']}"
    if "error" in result:
        print(f"{name:60} {result['choice'][-90:]} FAILED {result['error']}", flush=True)
        return
    stages = " ".join(f"{t:7.1f}" for t in result["us"])
    worst = max(result["distances"].values(), default=0.0)
    rate = (
        f"{result['flops'] / result['total_us'] / 1e6:6.1f} TF {result['bytes'] / result['total_us'] / 1e3:6.0f} GB/s"
    )
    print(f"{name:52} x{result['launches']:<3} {stages} us  {rate}  {worst:.0e}  {result['choice'][12:]}", flush=True)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("build")
    make.add_argument("networks", nargs="+", metavar="NETWORK")
    make.add_argument("--batch", type=int, default=64)
    make.add_argument("--image", type=int, default=224)
    make.add_argument("--target", default="cuda:sm_90")
    make.add_argument("--precision", default="bf16")
    make.add_argument("--choices", type=int, default=100, help="at most so many of each problem")
    make.add_argument("--only", action="append", metavar="TEXT", help="problems whose kind and shape contain it")
    make.add_argument("--several", action="store_true", help="only problems that can be made in several ways")
    make.add_argument("--list", action="store_true", help="say how much would be built")
    make.add_argument("-o", "--output", default="kernels.zip")
    make.set_defaults(call=build)
    measured = commands.add_parser("run")
    measured.add_argument("file")
    measured.add_argument("-o", "--output", default="times.json")
    measured.add_argument("--once", action="store_true", help="launch each stage once and time nothing: for a profiler")
    measured.add_argument("--turns", action="store_true", help="also time whole choices in turns, as tuning does")
    measured.set_defaults(call=run)
    kept = commands.add_parser("remember")
    kept.add_argument("file")
    kept.add_argument("--cache", type=Path, help="another folder than the user's own")
    kept.set_defaults(call=remember)
    arguments = parser.parse_args(given)
    arguments.call(arguments)


if __name__ == "__main__":
    main()
