"""A case: a mutated input and the commands that it is given to. All of it follows from the kind and the seed.

A kind is added by a function that writes its input into the working folder, and a line in `KINDS`.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from . import files

Arguments = tuple[str, ...]
LEVELS = ("none", "rcf", "mvf", "bnff", "icf", "icf")
OTHERWISE = (
    *(
        "--sample fs:1/4",
        "--sample vdn:1",
        "--sample l1bn",
        "--local-bn 2",
        "--remove 1",
        "--remove all",
        "--decay 0.1",
    ),
    *("--report report.json", "--report report.html"),
)
GRAPHS = ("dense", "residual", "residual", "dense-fused", "residual-fused", "residual-sampled")


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a case does in its folder."""

    what: str  # the mutation
    commands: tuple[Arguments, ...]  # each where those before it ended with 0
    outputs: tuple[str, ...] = ()  # files that may be there afterwards
    control: Arguments | None = None  # where this says 0, the commands after the first must have said so too


def prepare(case: Case, bases: Path, folder: Path) -> Plan:
    """Writes the mutated input into the folder."""
    return KINDS[case.kind][1](bases, folder, random.Random(str(case)))


def draw_cases(count: int, seed: int, kinds: tuple[str, ...] = ()) -> list[Case]:
    """Kinds by their weights. A seed's first cases are the same for every count."""
    chosen = [kind for kind in KINDS if not kinds or kind in kinds]
    rng = random.Random(seed)
    drawn = rng.choices(chosen, [KINDS[kind][0] for kind in chosen], k=count)
    return [Case(kind, seed * 1_000_000 + index) for index, kind in enumerate(drawn)]


def training(bases: Path, folder: Path, rng: random.Random) -> Plan:
    """A training graph, plain or rewritten. Now and then one that nothing but a second reading changes."""
    name = rng.choice(GRAPHS)
    data, what = files.mutate_model((bases / f"{name}.onnx").read_bytes(), rng)
    (folder / "m.onnx").write_bytes(data)
    shutil.copyfile(bases / f"{name}.onnx", folder / "base.onnx")
    outputs, control = ("f.onnx", "report.json", "report.html", "d.html", "s.bnf"), None
    command = weighted(rng, TRAINING_COMMANDS)
    match command:
        case "rewrite":
            commands = rewritten("m.onnx", rng.choice(LEVELS))
            control = verify("m.onnx", "m.onnx")
        case "rewrite otherwise":
            options = tuple(text.split() for text in OTHERWISE)
            commands = (("rewrite", "m.onnx", "-o", "f.onnx", *rng.choice(options)),)
        case "diff":
            form = rng.choice((("--format", "html", "-o", "d.html"), ("--format", "json"), ("--exit-code",), ()))
            pair = rng.choice((("m.onnx", "base.onnx"), ("base.onnx", "m.onnx"), ("m.onnx", "m.onnx")))
            commands = (("diff", *pair, *form),)
        case "verify":
            commands = (verify(*rng.choice((("m.onnx", "base.onnx"), ("base.onnx", "m.onnx"), ("m.onnx", "m.onnx")))),)
        case "verify compiled":
            commands = (verify("m.onnx", "m.onnx"), (*verify("m.onnx", "m.onnx"), "--runtime", "tvm"))
        case "inspect":
            commands = (("inspect", "m.onnx", *rng.choice(((), ("--json",), ("--csv",)))),)
        case "estimate":
            options = (
                (),
                ("--level", "none,icf"),
                ("--reuse",),
                ("--roofline",),
                ("--hardware", "3r1g"),
                ("--workers", "1,4"),
                ("--json",),
            )
            commands = (("estimate", "m.onnx", *rng.choice(options)),)
        case "compile":
            commands = (("compile", "m.onnx", "-o", "s.bnf", "--threads", "1"), ("run", "s.bnf", "--steps", "2"))
        case "run":
            commands = (("run", "m.onnx", "--steps", "2", "--threads", "1"),)
        case _:
            export = ("--export", "f.onnx")
            commands = (("train", "m.onnx", "--data", f"{bases}/data.npz", "--epochs", "1", "--threads", "1", *export),)
    return Plan(f"{name}: {what}", commands, outputs, control)


TRAINING_COMMANDS = {
    "rewrite": 30,
    "rewrite otherwise": 10,
    "diff": 14,
    "verify": 8,
    "inspect": 14,
    "estimate": 14,
    "verify compiled": 3,  # the rest compile kernels: seconds each
    "compile": 3,
    "run": 2,
    "train": 2,
}


def forward(bases: Path, folder: Path, rng: random.Random) -> Plan:
    """What `build` makes of it must be a training graph that can be rewritten."""
    name = rng.choice(("dense", "residual"))
    data, what = files.mutate_model((bases / f"{name}-forward.onnx").read_bytes(), rng)
    (folder / "m.onnx").write_bytes(data)
    options = rng.choice(((), (), ("--train-bn",), ("--loss", "mse"), ("--freeze", "w*"), ("--batch", "2")))
    commands = (("build", "m.onnx", "-o", "t.onnx", *options), *rewritten("t.onnx", rng.choice(LEVELS)))
    return Plan(f"{name}: {what}", commands, ("t.onnx", "f.onnx"), verify("t.onnx", "t.onnx"))


def step(bases: Path, folder: Path, rng: random.Random) -> Plan:
    data, what = files.mutate_step((bases / "step.bnf").read_bytes(), rng)
    (folder / "step.bnf").write_bytes(data)
    options = rng.choice(((), (), ("--data", f"{bases}/data.npz"), ("--json",), ("--save", "after.safetensors")))
    return Plan(what, (("run", "step.bnf", "--steps", "2", *options),), ("after.safetensors",))


def state(bases: Path, folder: Path, rng: random.Random) -> Plan:
    data, what = files.mutate_safetensors((bases / "run" / "last.safetensors").read_bytes(), rng)
    (folder / "state.safetensors").write_bytes(data)
    return Plan(what, ((*train(bases), "--resume", "state.safetensors"),))


def run(bases: Path, folder: Path, rng: random.Random) -> Plan:
    shutil.copytree(bases / "run", folder / "run")
    what = files.mutate_run(folder / "run", rng)
    commands = ((*train(bases), "--save", "run", "--resume", "auto", "--metrics", "run/run.jsonl", "--log-every", "2"),)
    return Plan(what, commands, ("run",))


def npz(bases: Path, folder: Path, rng: random.Random) -> Plan:
    data, what = files.mutate_npz((bases / "data.npz").read_bytes(), rng)
    (folder / "data.npz").write_bytes(data)
    return Plan(what, (fed(bases, "data.npz", rng),))


def photos(bases: Path, folder: Path, rng: random.Random) -> Plan:
    shutil.copytree(bases / "photos", folder / "photos")
    return Plan(files.mutate_images(folder / "photos", rng), (fed(bases, "photos", rng),))


def rewritten(source: str, level: str) -> tuple[Arguments, ...]:
    return ("rewrite", source, "-o", "f.onnx", "--level", level), verify(source, "f.onnx")


def verify(before: str, after: str) -> Arguments:
    return ("verify", before, after, "--threads", "1")


def train(bases: Path) -> Arguments:
    """As the run of the bases was begun."""
    return ("train", f"{bases}/dense-fused.onnx", "--data", f"{bases}/data.npz", "--epochs", "2", "--threads", "1")


def fed(bases: Path, data: str, rng: random.Random) -> Arguments:
    """Data is read alike by all who take it; a compiled step is there soonest."""
    if rng.random() < 0.8:
        return ("run", f"{bases}/step.bnf", "--data", data, "--steps", "2")
    return ("train", f"{bases}/dense-fused.onnx", "--data", data, "--epochs", "1", "--threads", "1")


def weighted(rng: random.Random, table: dict[str, int]) -> str:
    return rng.choices(list(table), list(table.values()))[0]


KINDS: dict[str, tuple[int, Callable[[Path, Path, random.Random], Plan]]] = {
    "training": (52, training),
    "forward": (20, forward),
    "step": (10, step),
    "state": (3, state),
    "run": (4, run),
    "npz": (7, npz),
    "photos": (4, photos),
}
