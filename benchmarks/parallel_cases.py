"""What parallel.py measures: networks and batches of a rank, ways to run a step on several of them, and compiling."""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_pack import pack_model, pack_step, recipes_of
from parallel_worlds import Planned

from bnfuse.parallel.ranks import BUCKET

ON_GPUS = ("densenet121:64", "resnet50:64", "densenet121:256", "resnet50:256")
ON_CPUS = ("resnet20:32", "densenet40:32")
IMAGES = {"densenet40": 32, "resnet20": 32}
SMALL = {"densenet40": {"growth": 12, "depth": 6}}  # settings, where not the network's own
LEVEL = "icf"
LR, MOMENTUM = 0.1, 0.9
ALONE = "alone"  # a step without any exchange, of the same graph


@dataclasses.dataclass(frozen=True)
class Case:
    """A network with `batch` samples a rank."""

    network: str
    batch: int
    image: int
    classes: int

    @property
    def name(self) -> str:
        return f"{self.network}-{self.batch}"


@dataclasses.dataclass(frozen=True)
class Way:
    """How our step is compiled: `level`, `sync`, a bucket's bytes; `ranks` is 1 for one that exchanges nothing. With
    `nccl` that carries what SyncBN exchanges, where kernels could."""

    level: str = LEVEL
    sync: bool = False
    bucket: int = BUCKET
    wire: str = "fp32"
    ranks: int = 1
    nccl: bool = False

    @property
    def name(self) -> str:
        sync = ("+sync" if self.sync else "") + ("+nccl" if self.nccl else "")
        bucket = f"+{self.bucket / 2**20:g}MB" if self.bucket != BUCKET else ""
        wire = f"+{self.wire}" if self.wire != "fp32" else ""
        return f"{self.level}{sync}{bucket}{wire}" + (f" {ALONE}" if self.ranks == 1 else "")

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.replace("+", "-")) + f"-{self.ranks}"


def case_of(text: str) -> Case:
    """densenet121:64, or densenet40:8:16 with images of 16 pixels."""
    network, batch, *image = text.split(":")
    pixels = int(image[0]) if image else IMAGES.get(network, 224)
    return Case(network, int(batch), pixels, 10 if network in IMAGES else 1000)


def ways(
    levels: list[str], buckets: list[float], ranks: int, *, gpus: bool, sync: bool, wire: bool = False
) -> list[Way]:
    """Those that are compiled for a run: each level alone and with its exchanges, in buckets of so many MB; SyncBN
    beside it, which alone is what it is without, between GPUs by kernels and by NCCL; and gradients as bfloat16 on the
    wire."""
    found = []
    for level in levels:
        found.append(Way(level))
        if ranks > 1:
            found += [Way(level, bucket=round(size * 2**20), ranks=ranks) for size in buckets or [BUCKET / 2**20]]
            found += (
                [Way(level, sync=True, ranks=ranks, nccl=nccl) for nccl in (False, True)[: 1 + gpus]] if sync else []
            )
            found += [Way(level, wire="bf16", ranks=ranks)] if wire else []
    return found


def training_model(case: Case) -> Any:
    """The graph as a ModelProto, with parameters that gpu_pack.py can draw again."""
    from gpu_pack import redraw

    from bnfuse.build import build_training_graph
    from bnfuse.models import build_forward

    settings = {"classes": case.classes, **SMALL.get(case.network, {})}
    forward = build_forward(case.network, batch=case.batch, image=case.image, **settings)
    return redraw(build_training_graph(forward))


def rewritten(model: Any, case: Case, way: Way) -> Any:
    import onnx_ir as ir

    from bnfuse import passes
    from bnfuse.graph.training_graph import open_graph

    options: dict[str, Any] = {"sync": True} if way.sync else {}
    graph = open_graph(ir.from_proto(model), name=case.name)
    return passes.rewrite(graph.model, level=way.level, signature=graph.signature, **options).model


def file_of(case: Case, way: Way, precision: str) -> str:
    return f"{case.name}-{way.file}-{precision}.step"


def compile_only(args: argparse.Namespace) -> None:
    """All steps that a run of these options needs, packed; those that are there stay."""
    args.folder.mkdir(parents=True, exist_ok=True)
    for case in args.cases:
        model = training_model(case)
        if not (train := args.folder / f"{case.name}.train").exists():
            pack_model(model, train)
        for way in ways(args.level, args.bucket, args.ranks, gpus=True, sync=args.sync, wire=args.wire):
            path = args.folder / file_of(case, way, args.precision)
            if path.exists():
                continue
            start = time.perf_counter()
            step = compiled(model, case, way, f"cuda:{args.arch}", args, planned(way))
            with tempfile.TemporaryDirectory(prefix="bnfuse-parallel-") as place:
                step.export(Path(place) / "step.bnf")
                pack_step(Path(place) / "step.bnf", recipes_of(model), path)
            size, exchanges = path.stat().st_size / 2**20, sum(launch.exchanges for launch in step.program.launches)
            seconds = time.perf_counter() - start
            print(f"{path.name}: {size:.2f} MiB, {seconds:.0f} s, {exchanges} exchanges", flush=True)


def planned(way: Way) -> Planned | None:
    """The ranks of a way, where none of them are."""
    return Planned(way.ranks, maps=way.sync and not way.nccl) if way.ranks > 1 else None


def compiled(model: Any, case: Case, way: Way, target: str, args: argparse.Namespace, world: Any) -> Any:
    from bnfuse import runtime

    about: dict[str, Any] = {"precision": args.precision} if target != "cpu" else {}
    return runtime.compile_step(
        rewritten(model, case, way),
        target=target,
        optimizer=runtime.SGD(lr=LR, momentum=MOMENTUM),
        threads=args.threads if target == "cpu" else None,
        evaluates=False,
        world=world,
        bucket=way.bucket,
        wire=way.wire,
        **about,
    )
