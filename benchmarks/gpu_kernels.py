"""Times of a network's kernels by themselves, for each way to make them: built anywhere, run on a GPU machine.

    python benchmarks/gpu_kernels.py build densenet121 --precision bf16 -o kernels.zip
    python benchmarks/gpu_kernels.py run kernels.zip -o times.json        # needs torch, cuda-bindings; no TVM

Every choice of a problem runs on the same random data; how far its results are from those of the rule's is shown, and
the time of each stage, the median of replays of a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

REPEATS = 10  # launches in a graph
REPLAYS = 7


def build(arguments: argparse.Namespace) -> None:
    """Compile what tuning would measure."""
    from bnfuse import api
    from bnfuse.passes import rewrite
    from bnfuse.runtime import SGD, targets
    from bnfuse.runtime.build import objects
    from bnfuse.runtime.cache import Cache, default_folder
    from bnfuse.runtime.compile import lower_graph
    from bnfuse.runtime.tuning import choices_of
    from bnfuse.training_graph import open_graph

    model = api.build(arguments.network, batch=arguments.batch, image=arguments.image)
    graph = open_graph(rewrite(open_graph(model).model, level="icf").model)
    target = targets.resolve(arguments.target, precision=arguments.precision)
    lowered, _ = lower_graph(graph, target, SGD(lr=0.1, momentum=0.9))
    counts = Counter(launch.kernel for launch in lowered.program.launches)
    entries: list[dict[str, Any]] = []
    requests = []
    for index, request in enumerate(lowered.requests):
        work = lowered.program.works[index]
        if arguments.only and not any(part in f"{work.kind} {work.shape}" for part in arguments.only):
            continue
        choices = choices_of(request)[: arguments.choices] or (None,)
        for choice in choices:
            made = request if choice is None or choice is choices[0] else request_of(request, choice)
            kernel = made.kernel()
            requests.append(made)
            entries.append(
                {
                    "problem": index,
                    "choice": repr(choice),
                    "op": work.op,
                    "kind": work.kind,
                    "shape": work.shape,
                    "flops": work.flops,
                    "bytes": work.bytes,
                    "launches": counts[index],
                    "params": [[p.name, p.access, p.elements, p.dtype] for p in kernel.params],
                }
            )
    print(f"{len(entries)} kernels")
    codes = objects(requests, Cache(default_folder()), progress=lambda done, total, name: print(done, total, name))
    with zipfile.ZipFile(arguments.output, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("entries.json", json.dumps(entries))
        for i, code in enumerate(codes):
            file.writestr(f"{i}.bin", code)


def request_of(request: Any, choice: Any) -> Any:
    from bnfuse.runtime.build import Request

    return Request(request.generator, (*request.arguments, choice.algorithm, choice.plan))


def run(arguments: argparse.Namespace) -> None:
    import torch

    from bnfuse.runtime.cuda import container
    from bnfuse.runtime.cuda.driver import open_driver

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = open_driver()
    results = []
    with zipfile.ZipFile(arguments.file) as file:
        entries = json.loads(file.read("entries.json"))
        state: dict[str, Any] = {}
        for i, entry in enumerate(entries):
            code = container.unpack(file.read(f"{i}.bin"), str(i))
            if state.get("problem") != entry["problem"]:
                state = {"problem": entry["problem"], "buffers": {}, "first": None, "once": arguments.once}
                torch.cuda.empty_cache()
            try:
                found = measure(torch, driver, entry, code, state)
            except Exception as error:
                found = {"error": str(error)[:200]}
            results.append({**entry, **found})
            show(results[-1])
    Path(arguments.output).write_text(json.dumps(results))


def measure(torch: Any, driver: Any, entry: dict[str, Any], code: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Times of the stages in microseconds, and the distance of the results from the first choice's."""
    from bnfuse.runtime.cuda.driver import Arguments, Call

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32}
    types |= {"int64": torch.int64, "uint8": torch.uint8, "int8": torch.int8}
    held = dict(state["buffers"])
    for name, access, elements, dtype in entry["params"]:
        if name in held and held[name].numel() == elements:
            if access == "out":
                held[name].fill_(float("nan") if held[name].is_floating_point() else -1)
            continue
        kind = types[dtype]
        if access == "out" or not kind.is_floating_point:
            held[name] = torch.zeros(elements, dtype=kind, device="cuda")
        else:
            generator = torch.Generator("cuda").manual_seed(len(name))
            values = torch.randn(elements, dtype=torch.float32, device="cuda", generator=generator)
            held[name] = (values * (0.02 if name == "weight" else 1)).to(kind)
        state["buffers"][name] = held[name]
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
        outputs = {n: held[n].float() for n, access, *_ in entry["params"] if access == "out" and "partials" not in n}
        distances = {}
        if state["first"] is None:
            state["first"] = {n: v.clone() for n, v in outputs.items()}
        for n, v in outputs.items():
            norm = state["first"][n].norm()
            distances[n] = float((v - state["first"][n]).norm() / norm) if norm > 0 else 0.0
        times = [] if state["once"] else [stage_time(torch, driver, call) for call in calls]
        driver.unload(module)
    return {"us": times, "total_us": sum(times), "distances": distances, "resources": resources_of(code)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("build")
    make.add_argument("network")
    make.add_argument("--batch", type=int, default=64)
    make.add_argument("--image", type=int, default=224)
    make.add_argument("--target", default="cuda:sm_90")
    make.add_argument("--precision", default="bf16")
    make.add_argument("--choices", type=int, default=100, help="at most so many of each problem")
    make.add_argument("--only", nargs="*", help="problems whose kind and shape contain one of these")
    make.add_argument("-o", "--output", default="kernels.zip")
    make.set_defaults(call=build)
    measured = commands.add_parser("run")
    measured.add_argument("file")
    measured.add_argument("-o", "--output", default="times.json")
    measured.add_argument("--once", action="store_true", help="launch each stage once and time nothing: for a profiler")
    measured.set_defaults(call=run)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
