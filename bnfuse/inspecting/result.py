"""What an inspection found: a row a layer and their sum, as text, JSON and CSV."""

from __future__ import annotations

import dataclasses
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import Section, count, csv_text, join, number, percent, scaled

UNITS = {"decimal": (1000, ("B", "kB", "MB", "GB", "TB")), "binary": (1024, ("B", "KiB", "MiB", "GiB", "TiB"))}
WIDTH = 100  # of the text: what is too long loses its beginning
OPERATOR_WIDTH = 12
INPUTS = 4  # of a network that has many, the text names so many


@dataclasses.dataclass(frozen=True)
class Layer:
    """`output_bytes`: what it stores. `input_bytes`: the activations that its forward node reads.

    Sweeps are feature maps read or written once by one node, `moved_bytes` their bytes, as `bnfuse diff` counts them;
    those of the backward pass belong to the layer whose gradient they are. `batch_norm_sweeps` and `batch_norm_bytes`
    are the part of both passes that is there for a BatchNorm alone. `kernel_shape` and `strides` of a convolution or
    pooling.
    """

    name: str
    op: str
    output_shape: tuple[Any, ...]
    output_bytes: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    flops_forward: int = 0
    flops_backward: int = 0
    input_bytes: int = 0
    sweeps_forward: int = 0
    sweeps_backward: int = 0
    moved_bytes_forward: int = 0
    moved_bytes_backward: int = 0
    batch_norm_sweeps: int = 0
    batch_norm_bytes: int = 0
    kernel_shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


FIELDS = tuple(field.name for field in dataclasses.fields(Layer) if field.type == "int")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """`source` says what the backward pass was counted from: the training graph, or rules for a forward graph."""

    name: str
    layers: tuple[Layer, ...]
    inputs: dict[str, str]  # data and labels: name -> type
    batch: int
    source: str

    @property
    def total(self) -> dict[str, int]:
        """The sums over all layers, by the names of the fields."""
        return {field: sum(getattr(layer, field) for layer in self.layers) for field in FIELDS}

    @property
    def batch_norm_share(self) -> dict[str, float]:
        """What part of all bytes moved, and of all sweeps, is there for BatchNorms alone."""
        total = self.total
        moved = total["moved_bytes_forward"] + total["moved_bytes_backward"]
        sweeps = total["sweeps_forward"] + total["sweeps_backward"]
        return {
            "bytes": total["batch_norm_bytes"] / moved if moved else 0.0,
            "sweeps": total["batch_norm_sweeps"] / sweeps if sweeps else 0.0,
        }

    def layer(self, name: str) -> Layer:
        """Find a layer by its name. Raises BnfuseError where there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise BnfuseError(f"{self.name} has no layer '{name}'")

    def to_json(self) -> dict[str, Any]:
        """Give it as JSON's types; the keys are in docs/cli.md."""
        return {
            "name": self.name,
            "inputs": self.inputs,
            "batch": self.batch,
            "source": self.source,
            "total": {**self.total, "batch_norm_share": self.batch_norm_share},
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def to_csv(self) -> str:
        """Give a row a layer, the columns in the order of the JSON's keys; sizes in bytes, shapes as 96x55x55."""
        columns = [field.name for field in dataclasses.fields(Layer)]
        return csv_text(columns, (map(plain, dataclasses.asdict(layer).values()) for layer in self.layers))

    def sections(self, units: str = "decimal") -> list[Section]:
        """Show the layers and what they come to. `units` are decimal or binary."""
        norms = self.total["batch_norm_sweeps"] > 0
        rows = [
            (
                x.name,
                shortened(OPERATOR_NAMES.get(x.op, x.op), OPERATOR_WIDTH),
                plain(x.output_shape[1:] or x.output_shape),
                *cells(dataclasses.asdict(x), units, norms),
            )
            for x in self.layers
        ]
        rows.append(("total", "", "", *cells(self.total, units, norms)))
        columns = ["layer", "operator", "output", "size", "parameters", "forward", "backward", "sweeps", "BN"]
        return [
            Section.lines(self.name, self.inputs_shown()),
            self.traffic(units),
            fitted(f"Layers (batch of {number(self.batch)}; F: FLOP)", columns[: 8 + norms], rows),
        ]

    def inputs_shown(self) -> list[str]:
        """Write the inputs, as many as there is room for."""
        lines = [f"{name}: {kind}" for name, kind in self.inputs.items()]
        more = len(lines) - INPUTS
        return lines if more < 1 else [*lines[:INPUTS], f"and {count(more, 'input')} more"]

    def traffic(self, units: str) -> Section:
        """Show how many sweeps there are over feature maps, and of how many bytes."""
        total, share = self.total, self.batch_norm_share
        ways = [
            f"{way}: {number(total[f'sweeps_{way}'])} sweeps over feature maps, "
            f"{size(total[f'moved_bytes_{way}'], units)} moved"
            for way in ("forward", "backward")
        ]
        norms = (
            f"for BatchNorms alone: {percent(share['sweeps'])} of the sweeps, {percent(share['bytes'])} of the bytes"
        )
        return Section.lines(f"Traffic ({self.source})", [*ways, norms])

    def __str__(self) -> str:
        return join(self.sections())


def fitted(title: str, columns: list[str], rows: list[tuple[str, ...]]) -> Section:
    """Fit a table into WIDTH: its first column takes what the others leave."""
    others = sum(2 + max(len(row[i]) for row in (columns, *rows)) for i in range(1, len(columns)))
    room = WIDTH - 2 - others
    return Section.table(title, columns, [(shortened(row[0], room), *row[1:]) for row in rows])


OPERATOR_NAMES = {
    "BatchNormalization": "BatchNorm",
    "GlobalAveragePool": "GlobalPool",
    "SoftmaxCrossEntropyLoss": "Loss",
}


def cells(values: dict[str, int], units: str, norms: bool) -> tuple[str, ...]:
    """Write the last cell, where there are BatchNorms: what part of the bytes moved is there for them alone."""

    def flops(n: int) -> str:
        return scaled(n, "F") if n else "-"

    sweeps = (values["sweeps_forward"], values["sweeps_backward"])
    moved = values["moved_bytes_forward"] + values["moved_bytes_backward"]
    share = f"{100 * values['batch_norm_bytes'] / moved:.0f} %" if values["batch_norm_bytes"] else "-"
    return (
        size(values["output_bytes"], units) if values["output_bytes"] else "-",
        number(values["parameters"]) if values["parameters"] else "-",
        flops(values["flops_forward"]),
        flops(values["flops_backward"]),
        f"{sweeps[0]}+{sweeps[1]}" if any(sweeps) else "-",
        *([share] if norms else []),
    )


def size(value: float, units: str = "decimal") -> str:
    """Write 1234567 as 1.23 MB; with units binary as 1.18 MiB."""
    if units not in UNITS:
        raise BnfuseError(f"units={units} is unknown: it is {' or '.join(UNITS)}")
    base, names = UNITS[units]
    for name in names:
        if abs(value) < base - 0.5 or name == names[-1]:
            break
        value /= base
    return f"{value:.3g} {name}" if value < 1000 else f"{value:.0f} {name}"


def plain(value: Any) -> Any:
    """Write a shape as 96x55x55; any other value stays."""
    return "x".join(map(str, value)) if isinstance(value, tuple | list) else value


def shortened(text: str, width: int) -> str:
    """Give the end of a long name: that is what tells it from its neighbours."""
    return text if len(text) <= width else "…" + text[-(width - 1) :]
