"""The pictures of docs/architecture.md: the way of the data, laid by hand, and the rooms of the package, read from it.

    python benchmarks/documents.py       writes both

Each is an SVG on a light card of its own, so that it is legible on a dark page too.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]

INK, FAINT, CARD, RULE = "#1f2933", "#52606d", "#ffffff", "#d5dae0"
COLOURS = {  # by kind: fill, stroke
    "file": ("#fdf3d7", "#b58a2a"),
    "room": ("#dce9f6", "#3b6ea5"),
    "outside": ("#eceff2", "#7b8794"),
    "running": ("#dff2e1", "#3f8f4f"),
}


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle of the picture: what it is, its name, and a line about it."""

    kind: str
    x: int
    y: int
    width: int
    name: str
    about: str = ""
    height: int = 46

    def svg(self) -> str:
        fill, stroke = COLOURS[self.kind]
        radius = 3 if self.kind == "file" else 8
        middle = self.x + self.width // 2
        place = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="{radius}"'
        parts = [
            f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>',
            text(middle, self.y + (20 if self.about else self.height // 2 + 5), self.name, weight="bold"),
        ]
        if self.about:
            parts.append(text(middle, self.y + 36, self.about, size=11, fill=FAINT))
        return "".join(parts)

    @property
    def left(self) -> tuple[int, int]:
        return self.x, self.y + self.height // 2

    @property
    def right(self) -> tuple[int, int]:
        return self.x + self.width, self.y + self.height // 2

    @property
    def top(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y

    @property
    def bottom(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y + self.height


def text(
    x: int, y: int, words: str, *, size: int = 13, fill: str = INK, weight: str = "", anchor: str = "middle"
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    look = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"{bold}'
    return f'<text x="{x}" y="{y}" {look}>{html.escape(words)}</text>'


def arrow(*points: tuple[int, int], label: str = "", both: bool = False) -> str:
    """A line through the points, with a tip at its end (or both), and words above its first stretch."""
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    start = ' marker-start="url(#tip)"' if both else ""
    line = f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5"{start} marker-end="url(#tip)"/>'
    if not label:
        return line
    (x, y), (next_x, _) = points[:2]
    return line + text((x + next_x) // 2, y - 6, label, size=11, fill=FAINT)


def band(y: int, height: int, name: str, about: str, width: int = 960) -> str:
    return (
        f'<rect x="12" y="{y}" width="{width - 24}" height="{height}" rx="10" fill="#f7f9fb" stroke="{RULE}"/>'
        + text(26, y + 20, name, weight="bold", anchor="start")
        + text(140, y + 20, about, size=11, fill=FAINT, anchor="start")
    )


def document(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n  ".join(parts)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} \
font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif">
  <!-- Generated: python benchmarks/documents.py -->
  <title>{html.escape(title)}</title>
  <defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{FAINT}"/></marker></defs>
  <rect width="{width}" height="{height}" rx="12" fill="{CARD}"/>
  {body}
</svg>
"""


def architecture() -> str:
    """docs/architecture.svg: the way of the data, a band for each stage."""
    return document(960, 740, "From a network to a step: build, passes, runtime, and what reads the graphs", _stages())


def _stages() -> Iterator[str]:
    yield band(12, 148, "Build", "bnfuse.build: one ONNX graph of a whole training step")
    module = Box("outside", 28, 44, 126, "torch module")
    forward = Box("file", 290, 44, 150, "forward ONNX file")
    zoo = Box("room", 290, 102, 150, "models", "networks by name")
    build = Box("room", 496, 44, 160, "build", "repairs, loss, shapes")
    autodiff = Box("room", 496, 102, 160, "autodiff", "a rule an operator")
    graph = Box("file", 716, 72, 218, "training graph", "forward, loss, backward: train.onnx")
    yield from (box.svg() for box in (module, forward, zoo, build, autodiff, graph))
    yield arrow(module.right, forward.left, label="torch.onnx.export")
    yield arrow(forward.right, build.left)
    yield arrow(zoo.right, (468, 125), (468, 72), (build.x, 72))
    yield arrow(build.bottom, autodiff.top, both=True)
    yield arrow(build.right, (686, 67), (686, 95), graph.left)

    yield band(188, 120, "Passes", "bnfuse.passes: what a level asks for, in this order; what is refused has a reason")
    names = (("removal", "BNs go"), ("sampling", "part of the batch"), ("dialect", "one form"), ("fission", "halves"))
    names += (("fusion", "into neighbours"), ("concat", "across Concats"))
    rooms = [Box("room", 28 + 118 * i, 236, 104, name, about) for i, (name, about) in enumerate(names)]
    rewritten = Box("file", 756, 236, 178, "rewritten file", "fused.onnx, functions inside")
    yield from (box.svg() for box in (*rooms, rewritten))
    yield from (arrow(a.right, b.left) for a, b in zip(rooms, [*rooms[1:], rewritten], strict=True))
    yield arrow(rooms[5].bottom, (670, 297), (552, 297), rooms[4].bottom)
    yield arrow(graph.bottom, (825, 174), (116, 174), (116, 236))

    yield band(
        336, 176, "Runtime", "bnfuse.runtime: a kernel for every operator, one planned memory; nothing else imports TVM"
    )
    lowering = Box("room", 28, 378, 150, "lowering", "operators to launches")
    program = Box("room", 214, 378, 150, "program", "launches, memory plan")
    codegen = Box("room", 400, 378, 150, "codegen", "TVM: object code")
    backends = Box("room", 586, 378, 150, "backends", "cpu, cuda")
    step = Box("running", 772, 378, 162, "step", "forward, backward, update")
    kernels = Box("room", 214, 448, 150, "kernels", "generators: cpu, cuda")
    cache = Box("file", 400, 448, 150, "cache", "kernels on disk")
    bnf = Box("file", 586, 448, 150, "step.bnf", "a step in one file")
    yield from (box.svg() for box in (lowering, program, codegen, backends, step, kernels, cache, bnf))
    chain = (lowering, program, codegen, backends, step)
    yield from (arrow(a.right, b.left) for a, b in itertools.pairwise(chain))
    yield arrow(kernels.right, (382, 471), (382, 412), (codegen.x, 412))
    yield arrow(codegen.bottom, cache.top, both=True)
    yield arrow(step.bottom, (853, 471), bnf.right, both=True)
    yield arrow(rewritten.bottom, (845, 322), (116, 322), (116, 378))

    yield band(540, 84, "Train", "")
    yield text(26, 580, "data in,", size=11, fill=FAINT, anchor="start")
    yield text(26, 595, "a network out", size=11, fill=FAINT, anchor="start")
    data = Box("room", 214, 560, 150, "data", "digits, folders, .npz")
    training = Box("room", 400, 560, 150, "training", "epochs, checkpoints")
    exporting = Box("room", 586, 560, 150, "exporting", "for inference")
    model = Box("file", 772, 560, 162, "model.onnx", "standard operators")
    yield from (box.svg() for box in (data, training, exporting, model))
    yield arrow(data.right, training.left)
    yield arrow(training.right, exporting.left)
    yield arrow(exporting.right, model.left)
    yield arrow((900, step.y + 46), (900, 526), (475, 526), training.top, both=True)

    yield band(644, 84, "Ask", "")
    yield text(26, 684, "of the training graph", size=11, fill=FAINT, anchor="start")
    yield text(26, 699, "or the rewritten one", size=11, fill=FAINT, anchor="start")
    asks = (("inspecting", "sizes, work"), ("estimating", "time before a run"), ("diffing", "what changed"))
    asks += (("verifying", "the same results?"), ("benchmarking", "beside baselines"))
    yield from (Box("room", 156 + 158 * i, 664, 146, *ask).svg() for i, ask in enumerate(asks))


@dataclasses.dataclass(frozen=True)
class Contract:
    """Layers of rooms, the highest first: `rooms` by layer, `container` is what their names hang under."""

    name: str
    container: str
    layers: tuple[tuple[str, ...], ...]

    @property
    def rooms(self) -> tuple[str, ...]:
        return tuple(room for layer in self.layers for room in layer)


def contracts() -> tuple[Contract, ...]:
    """The layers that import-linter keeps, from pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        entries: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return tuple(
        Contract(
            entry["name"],
            container := entry.get("containers", ["bnfuse"])[0],
            tuple(
                tuple(room.strip().removeprefix(f"{container}.") for room in layer.split("|"))
                for layer in entry["layers"]
            ),
        )
        for entry in entries
        if entry["type"] == "layers"
    )


@functools.cache
def imports() -> frozenset[tuple[str, str]]:
    """Which module of the package imports which, those for types alone left out."""
    import grimp

    graph = grimp.build_graph("bnfuse", exclude_type_checking_imports=True, cache_dir=None)
    return frozenset((a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a))


def edges(contract: Contract) -> set[tuple[str, str]]:
    """Which room of a contract imports from which other one."""

    def room(module: str) -> str | None:
        inside = module.removeprefix(f"{contract.container}.")
        return inside.partition(".")[0] if inside != module else None

    pairs = {(room(a), room(b)) for a, b in imports()}
    return {(a, b) for a, b in pairs if a and b and a != b and {a, b} <= set(contract.rooms)}


def packages() -> str:
    """docs/packages.svg: for every set of layers a square, a row and a column for each room."""
    package, *inner = contracts()
    parts = [*_square(package, 12, 12)]
    y = 12
    for contract in inner:
        parts += _square(contract, 760, y)
        y += 150 + CELL * len(contract.rooms)
    height = max(y, 150 + CELL * len(package.rooms))
    return document(1120, height, "Which room imports from which: everything is right of the diagonal", parts)


CELL = 22


def _square(contract: Contract, x: int, y: int) -> Iterator[str]:
    rooms, found = contract.rooms, edges(contract)
    left, top, size = x + 116, y + 122, CELL * len(rooms)
    yield text(x + 6, y + 18, contract.container, size=15, weight="bold", anchor="start")
    for i, room in enumerate(rooms):
        middle = i * CELL + CELL // 2
        yield text(left - 8, top + middle + 4, room, size=12, anchor="end")
        place = f"{left + middle + 4} {top - 8}"
        yield f'<text transform="translate({place}) rotate(-60)" font-size="12" fill="{INK}">{room}</text>'
        corner = f'x="{left + i * CELL}" y="{top + i * CELL}"'
        yield f'<rect {corner} width="{CELL}" height="{CELL}" fill="{COLOURS["room"][0]}"/>'
    at = 0
    for layer in (*contract.layers, ()):
        line = f"M{left - 112} {top + at} H{left + size} M{left + at} {top} V{top + size}"
        yield f'<path d="{line}" stroke="{RULE}" fill="none"/>'
        at += CELL * len(layer)
    for importer, imported in sorted(found):
        row, column = rooms.index(importer), rooms.index(imported)
        cx, cy = left + column * CELL + CELL // 2, top + row * CELL + CELL // 2
        fill = COLOURS["room"][1] if column > row else "#c0392b"
        yield f'<circle cx="{cx}" cy="{cy}" r="5" fill="{fill}"><title>{importer} imports {imported}</title></circle>'


def rooms_table(contract: Contract) -> str:
    """A Markdown table of the rooms of a contract: the layer, the name, what its docstring begins with."""
    rows = ["| layer | room | |", "|---:|---|---|"]
    for height, layer in zip(range(len(contract.layers), 0, -1), contract.layers, strict=True):
        for room in layer:
            rows.append(f"| {height} | `{room}` | {first_line(f'{contract.container}.{room}')} |")
    return "\n".join(rows)


def first_line(module: str) -> str:
    """The first sentence of a module's docstring, for a table."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    words = (ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(words.split()).replace("|", "\\|")
