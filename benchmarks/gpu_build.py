"""Builds the files that gpu_check.py runs on a GPU machine: no GPU is needed here, no TVM and no compiler there.

    python benchmarks/gpu_build.py --folder gpu-files                            # everything, long
    python benchmarks/gpu_build.py --folder gpu-files --case densenet121 --precision bf16
    python benchmarks/gpu_build.py --folder gpu-files --case densenet121 --precision bf16 --level icf --batch 512
    python benchmarks/gpu_build.py --plan densenet121 --precision bf16           # memory by batch, compiles nothing

For each case: train.onnx, rewritten at each level, compiled for the architecture in each precision, packed. For the
case `training` also the batches of 100 steps and the losses of the CPU's runtime on them. Files that are there stay;
remove them to build anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from gpu_cases import CASES, PRECISIONS, Case, Entry, chosen, write_index
from gpu_pack import pack_model, pack_step, recipes_of, redraw

from bnfuse import passes, runtime
from bnfuse.build import build_training_graph
from bnfuse.data import batches, load_data
from bnfuse.graph.training_graph import TrainingGraph, open_graph
from bnfuse.models import build_forward

STEPS, LR, MOMENTUM = 100, 0.05, 0.9
PLANNED = (64, 128, 256, 512, 768, 1024)


def training_model(case: Case) -> onnx.ModelProto:
    forward = build_forward(case.network, batch=case.batch, image=case.image, **dict(case.settings))
    return redraw(build_training_graph(forward))


def open_model(model: onnx.ModelProto, name: str) -> TrainingGraph:
    return open_graph(ir.from_proto(model), name=name)


def build_case(case: Case, folder: Path, arch: str, threads: int | None) -> list[Entry]:
    model = training_model(case)
    train = f"{case.name}-{case.batch}.train"
    if not (folder / train).exists():
        pack_model(model, folder / train)
    if "training" in case.parts:
        write_training(model, case, folder)
    entries = []
    for level in case.levels:
        base, _, sample = level.partition(" ")
        rewritten = passes.rewrite(open_model(model, case.name).model, level=base, sample=sample or None).model
        for precision in case.precisions:
            label = level.translate(str.maketrans(" /:", "---"))
            file = f"{case.name}-{case.batch}-{label}-{precision}.step"
            if not (folder / file).exists():
                report = compile_step(rewritten, recipes_of(model), folder / file, arch, precision, threads)
                size = (folder / file).stat().st_size / 2**20
                print(f"{file}: {size:.2f} MiB, {report['compile_s']:.1f} s, {report['kernels']} kernels", flush=True)
                sizes = (case.network, case.batch, case.image)
                entries.append(Entry(case.name, file, train, *sizes, level, precision, case.parts, report))
                write_index(folder, entries)
    return entries


def compile_step(
    model: ir.Model, recipes: Any, path: Path, arch: str, precision: str, threads: int | None
) -> dict[str, object]:
    start = time.perf_counter()
    optimizer = runtime.SGD(lr=LR, momentum=MOMENTUM)
    step = runtime.compile_step(
        model, target=f"cuda:{arch}", precision=precision, optimizer=optimizer, threads=threads, progress=told
    )
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="bnfuse-gpu-") as place:
        step.export(Path(place) / "step.bnf")
        pack_step(Path(place) / "step.bnf", recipes, path)
    return {
        "compile_s": round(seconds, 2),
        "kernels": step.report.kernels,
        "launches": step.report.launches,
        "arena_bytes": step.report.arena_bytes,
        "device_bytes": step.device_bytes,
    }


def told(done: int, total: int, kernel: str) -> None:
    if sys.stderr.isatty() or done % 20 == 0 or done == total:
        print(f"  {done} of {total} {kernel}", file=sys.stderr, flush=True)


def write_training(model: onnx.ModelProto, case: Case, folder: Path) -> None:
    """data.npz: `x` [steps, batch, c, h, w] and `y`; losses.json: those of the CPU's runtime, float32, level icf."""
    if (folder / "losses.json").exists():
        return
    x, y, source = training_data(case)
    np.savez_compressed(folder / "data.npz", x=x, y=y)
    rewritten = passes.rewrite(open_model(model, case.name).model, level="icf").model
    step = runtime.compile_step(rewritten, optimizer=runtime.SGD(lr=LR, momentum=MOMENTUM))
    losses = [float(step(images, labels)) for images, labels in zip(x, y, strict=True)]
    found = {"data": source, "lr": LR, "momentum": MOMENTUM, "losses": losses}
    (folder / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"losses.json: {source}, {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)


def training_data(case: Case) -> tuple[np.ndarray, np.ndarray, str]:
    """Fashion-MNIST where it is installed, else the embedded digits, enlarged."""
    from bnfuse.core.errors import BnfuseError

    channels = int(str(dict(case.settings)["channels"]))
    try:
        data = load_data("fashion-mnist", image=case.image, channels=channels).normalised()
    except BnfuseError:
        data = load_data("digits", image=case.image, channels=channels).normalised()
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for epoch in range(STEPS):
        found += batches(data.train_x, data.train_y, case.batch, seed=0, epoch=epoch)
        if len(found) >= STEPS:
            break
    x, y = (np.stack([batch[part] for batch in found[:STEPS]]) for part in (0, 1))
    return x.astype(np.float32), y, data.name


def memory_by_batch(case: Case, level: str, precision: str, arch: str) -> None:
    """What a step takes on the GPU but for its code, from the plan alone."""
    from bnfuse.runtime.backends.resolve import resolve
    from bnfuse.runtime.compile import lower_graph

    target = resolve(f"cuda:{arch}", None, precision)
    for batch in PLANNED:
        model = training_model(dataclasses.replace(case, batch=batch))
        rewritten = passes.rewrite(open_model(model, case.name).model, level=level).model
        training, _ = lower_graph(open_graph(rewritten), target, runtime.SGD(lr=LR, momentum=MOMENTUM))
        regions = training.program.regions
        print(json.dumps({"batch": batch, "bytes": sum(regions.values()), "arena": regions.get("arena")}), flush=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("gpu-files"))
    parser.add_argument("--case", action="append", metavar="NAME", help=", ".join(case.name for case in CASES))
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="only these of a case's")
    parser.add_argument("--level", action="append", help="only these of a case's")
    parser.add_argument("--batch", type=int, help="another batch than the case's")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plan", metavar="CASE", help="memory by batch at level icf; builds nothing")
    parser.add_argument("--list", action="store_true", help="say what would be built")
    return parser.parse_args(given)


def narrowed(case: Case, args: argparse.Namespace) -> Case:
    """The case with what was asked for alone."""
    return dataclasses.replace(
        case,
        batch=args.batch or case.batch,
        parts=("memory",) if args.batch else case.parts,
        levels=tuple(level for level in case.levels if level in (args.level or case.levels)),
        precisions=tuple(p for p in case.precisions if p in (args.precision or case.precisions)),
    )


def main() -> None:
    args = arguments()
    if args.plan:
        (case,) = chosen([args.plan])
        for precision in narrowed(case, args).precisions:
            memory_by_batch(case, "icf", precision, args.arch)
        return
    cases = [narrowed(case, args) for case in chosen(args.case)]
    if args.list:
        for case in cases:
            print(f"{case.name}: batch {case.batch}, {', '.join(case.levels)}; {', '.join(case.precisions)}")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        print(f"== {case.name}", flush=True)
        build_case(case, args.folder, args.arch, args.threads)
    total = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{args.folder}: {total / 2**20:.1f} MiB in all")


if __name__ == "__main__":
    main()
