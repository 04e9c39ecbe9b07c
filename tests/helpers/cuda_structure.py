"""What the CUDA that is generated for a kernel is made of, as a few lines of text that a test can keep."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator

from bnfuse.runtime.kernels.cuda.compile import cuda_source, symbol_of
from bnfuse.runtime.kernels.cuda.device import Stage
from bnfuse.runtime.kernels.kernel import Kernel

BYTES = {"char": 1, "short": 2, "half": 2, "int": 4, "float": 4, "double": 8, "long": 8, "int64_t": 8}
ACCESS = re.compile(  # of a parameter's memory: as a vector, as another type, as its own; not its address
    r"\*\((?P<vector>\w+)\*\)\((?:\(\(\w+\*\))?(?P<a>[a-zA-Z]\w*)_ptr\)? \+"
    r"|\(\((?P<cast>\w+)\*\)(?P<b>[a-zA-Z]\w*)_ptr\)\["
    r"|(?<!&\()\b(?P<c>[a-zA-Z]\w*)_ptr\["
)
HELPER = re.compile(r"__device__ [\w ]+? \**(tvm_builtin_\w+)\([^)]*\) \{\n(.*?)\n\}", re.DOTALL)
CALLED = re.compile(r"\b(tvm_builtin_\w+|__fmaf_rn)\(")


def structure(make: Callable[[str], Kernel], architectures: tuple[str, ...] = ("sm_80", "sm_90")) -> str:
    """The kernel that `make` gives for each architecture: of each stage its launch, and how often its source has each
    instruction, loops not unrolled. One text where they are alike."""
    texts: dict[str, list[str]] = {}
    for arch in architectures:
        kernel = make(arch)
        stages = kernel.build()
        source = cuda_source(stages, arch)
        texts.setdefault("\n".join(line for s in stages for line in describe(kernel, s, source)), []).append(arch)
    return "".join(f"{' and '.join(archs)}\n{text}\n" for text, archs in texts.items())


def describe(kernel: Kernel, stage: Stage, source: str) -> Iterator[str]:
    counts = collections.Counter(instructions(body_of(source, symbol_of(stage)), source))
    grid = "x".join(map(str, stage.grid))
    name = stage.name.removeprefix(kernel.name).strip("_") or "main"
    yield f"  stage {name}: {grid} blocks of {stage.threads} threads, {stage.shared} B shared"
    for name, count in sorted(counts.items()):
        yield f"    {count:4} {name}"


def body_of(source: str, symbol: str) -> str:
    """The definition of a device function, without its head."""
    found = re.search(rf"\b{symbol}\([^)]*\) \{{\n(.*?)\n\}}", source, re.DOTALL)
    assert found, symbol
    return found[1]


def instructions(body: str, source: str) -> Iterator[str]:
    known = {name: instruction(text) for name, text in HELPER.findall(source)}
    for line in body.splitlines():
        for name in CALLED.findall(line):
            yield known.get(name, name)
        for match in ACCESS.finditer(line):
            is_store = line.lstrip().startswith(match[0]) and " = " in line
            name = match["a"] or match["b"] or match["c"]
            kind = match["vector"] or match["cast"] or declared(source, name)
            yield f"{'store' if is_store else 'load'} of {bytes_of(kind)} B, {name}"
        if "for (" in line:
            yield "loop"


def declared(source: str, name: str) -> str:
    """The type of what a parameter points to."""
    found = re.search(rf"(\w+)\* (?:__restrict__ )?{name}_ptr\b", source)
    assert found, name
    return found[1]


def bytes_of(kind: str) -> int:
    """Of a type such as float, ushort or uint4."""
    name, lanes = re.fullmatch(r"u?(int64_t|[a-z]+)(\d*)", kind).groups()  # type: ignore[union-attr]
    return BYTES[name] * int(lanes or 1)


def instruction(helper: str) -> str:
    """What a helper of TVM's does: its instruction, or the intrinsic that it calls."""
    assembly = re.search(r'asm volatile\("\{?\s*([\w.:]+)', helper)
    called = re.search(r"(\w+)\(", helper)
    return assembly[1] if assembly else called[1] if called else helper.strip()
