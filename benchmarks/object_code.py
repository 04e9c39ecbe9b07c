"""The machine code of a fixed list of kernels, to see that a change of the sources leaves it as it was.

    python benchmarks/object_code.py --out before.json                    # minutes with an empty cache
    python benchmarks/object_code.py --out after.json --against before.json
    python benchmarks/object_code.py --case densenet121 --out one.json

A case is a network, a level and a target; its kernels are those of the compiled step, in order. What is compared is
the code and the constants of the object file (of a GPU's cubin), without symbols and texts: a kernel may change its
name. Only bnfuse's public functions are called, so the file runs with the sources of any commit (PYTHONPATH).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

import bnfuse
from bnfuse.models import build_forward

ALLOCATED, EXECUTABLE, PROGRAM_BITS = 2, 4, 1  # of a section of an ELF file: two flags, a type
TEXT = re.compile(rb"[ -~]{4,}\0")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to compile."""

    network: str
    level: str
    target: str
    precision: str | None = None
    sample: str | None = None
    optimizer: str = "sgd"

    @property
    def name(self) -> str:
        parts = (self.network, self.level, self.sample, self.target, self.precision, self.optimizer)
        return " ".join(part for part in parts if part)


CPUS = ("cpu:skylake-avx512", "cpu:haswell")
GPUS = (("cuda:sm_90", "bf16"), ("cuda:sm_90", "fp32"), ("cuda:sm_80", "tf32"))

CASES = (
    *(Case("densenet121", level, CPUS[0]) for level in ("none", "rcf", "mvf", "bnff", "icf")),
    *(Case(network, "icf", cpu) for network in ("resnet50", "mobilenetv2") for cpu in CPUS),
    Case("googlenet", "icf", CPUS[0]),
    Case("squeezenet", "bnff", CPUS[0], optimizer="adamw"),
    Case("vgg11", "none", CPUS[1]),
    *(
        Case("resnet20", "icf", CPUS[0], sample=sample)
        for sample in ("fs:1/4", "frs:1/4", "ns:2", "vdn:2", "l1bn", "rbn")
    ),
    *(Case("densenet121", level, *gpu) for gpu in GPUS for level in ("none", "icf")),
    *(Case(network, "icf", *gpu) for gpu in GPUS for network in ("resnet50", "mobilenetv2")),
    Case("squeezenet", "bnff", *GPUS[0], optimizer="adamw"),
    *(
        Case("resnet20", "icf", *GPUS[1], sample=sample)
        for sample in ("fs:1/4", "frs:1/4", "ns:2", "vdn:2", "l1bn", "rbn")
    ),
)


def codes(case: Case) -> list[str]:
    """A digest of each kernel's code, in the order of the step's kernels; training's, then evaluation's."""
    model = bnfuse.build_training_graph(build_forward(case.network, batch=16))
    optimizer: Any = {"sgd": bnfuse.SGD, "adamw": bnfuse.AdamW}[case.optimizer](lr=0.1)
    options = {} if case.sample is None else {"sample": case.sample}
    with tempfile.TemporaryDirectory() as folder:
        source, packed = Path(folder) / "train.onnx", Path(folder) / "step.bnf"
        onnx.save(model, source)
        fused = bnfuse.rewrite(bnfuse.load(source), level=case.level, **options)
        threads = 2 if case.target.startswith("cpu") else None
        step = bnfuse.compile(fused, target=case.target, optimizer=optimizer, precision=case.precision, threads=threads)
        step.export(packed)
        with zipfile.ZipFile(packed) as file:
            kernels = json.loads(file.read("manifest.json"))["kernels"]
            return [digest(file.read(f"code/{name}.o")) for part in kernels.values() for name in part]


def digest(code: bytes) -> str:
    found = hashlib.sha256()
    for section in contents(code[code.index(b"\x7fELF") :]):
        found.update(struct.pack("<Q", len(section)) + section)
    return found.hexdigest()[:16]


def contents(elf: bytes) -> Iterator[bytes]:
    """The sections of a little-endian 64-bit ELF file that hold code, and the constants without texts and padding."""
    start, width, count = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HH", elf, 58)
    for i in range(count):
        kind, flags, _, offset, size = struct.unpack_from("<IQQQQ", elf, start + i * width + 4)
        section = elf[offset : offset + size]
        if kind == PROGRAM_BITS and flags & EXECUTABLE:
            yield section
        elif kind == PROGRAM_BITS and flags & ALLOCATED:
            yield TEXT.sub(b"", section).replace(b"\0", b"")


def compare(old: dict[str, list[str]], new: dict[str, list[str]]) -> int:
    """Prints the cases whose kernels differ; how many cases do."""
    differing = 0
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        if changed or len(before) != len(after):
            differing += 1
            same = "the same code in another order" if sorted(before) == sorted(after) else f"first {changed[:5]}"
            print(f"{name}: {len(before)} kernels, then {len(after)}; {len(changed)} differ ({same})")
    kernels = sum(len(new[name]) for name in old.keys() & new.keys())
    print(f"{len(old.keys() & new.keys())} cases, {kernels} kernels: {differing} cases differ")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="a file of an earlier run: exit status 1 where they differ")
    parser.add_argument("--case", help="only cases whose names contain this")
    arguments = parser.parse_args()
    found = {}
    for case in CASES:
        if arguments.case is None or arguments.case in case.name:
            found[case.name] = codes(case)
            print(f"{case.name}: {len(found[case.name])} kernels", flush=True)
            arguments.out.write_text(json.dumps(found, indent=1))
    return 1 if arguments.against and compare(json.loads(arguments.against.read_text()), found) else 0


if __name__ == "__main__":
    sys.exit(main())
