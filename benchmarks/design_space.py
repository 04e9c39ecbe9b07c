"""The tables of [Iandola16] beside what bnfuse computes, with the relative difference.

    python benchmarks/design_space.py [--bandwidth 6GB/s] [--write docs/design-space.md] [--plot docs/scaling.png]

Tables 4.1 to 4.8, 3.1, 5.1 and the model sizes of chapter 5 come from the forward graphs of the zoo (`bnfuse inspect`),
tables 3.2 and 3.3 from equations 3.3 and 3.4 (bnfuse/estimating/parallel/scaling.py). Nothing is measured: the figures
are the same on every machine. A difference is marked where a figure does not round to what is printed; NOTES says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import design_space_printed as paper
import onnx_graphsurgeon as gs
from documents import write_into

import bnfuse
from bnfuse.analysis.work import POOLS
from bnfuse.core.text import Section, join, scaled
from bnfuse.estimating.parallel import scaling
from bnfuse.estimating.parallel.scaling import Quantities, Scaling, scale
from bnfuse.inspecting import Inspection, Layer
from bnfuse.inspecting.network import DENSE
from bnfuse.models import build_graph
from bnfuse.models.count import parameters_of
from bnfuse.models.layers import Network

BATCH = 1024
IMAGES = 1_281_167  # training images of ImageNet-1k
NOMINAL = 6e9  # bytes/s in and out of a node of the Titan's Gemini network, about what its nodes sustain
FITTED_ROW = ("NiN", 32, 256)  # the one row of tables 3.2 and 3.3 that the bandwidth is fitted to

UNITS = {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20}
UNITS |= {"GF": 1e9, "TF": 1e12, "x": 1.0, "h": 1.0}


@dataclasses.dataclass(frozen=True)
class Figure:
    """What the paper prints and what is computed, in bytes, FLOP, hours or as a ratio."""

    printed: str
    computed: float

    @property
    def value(self) -> float:
        return self._split()[0]

    @property
    def last_place(self) -> float:
        """The value of one in the last printed digit; the zeros at the end of 1190MB count for nothing."""
        return self._split()[1]

    @property
    def rounds(self) -> bool:
        """Whether the computed figure rounds to the printed one."""
        return abs(self.computed - self.value) <= 0.5 * self.last_place * (1 + 1e-9)

    @property
    def difference(self) -> str:
        if not self.value:
            return "" if not self.computed else "new"
        return f"{100 * (self.computed / self.value - 1):+.1f} %"

    def shown(self) -> str:
        """The computed figure in the printed unit, with a digit more than is printed."""
        unit = self._split()[2]
        amount = self.computed / UNITS[unit]
        return f"{amount:,.0f}{unit}" if amount >= 1000 or not amount else f"{amount:.4g}{unit}"

    def _split(self) -> tuple[float, float, str]:
        found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", self.printed)
        if found is None:
            raise ValueError(f"no figure: {self.printed}")
        digits, unit = found.groups()
        decimals = len(digits.partition(".")[2])
        zeros = len(digits) - len(digits.rstrip("0")) if decimals == 0 and unit and float(digits) >= 100 else 0
        return float(digits) * UNITS[unit], 10.0 ** (zeros - decimals) * UNITS[unit], unit


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a table: words first, then a figure a quantity (None where the paper prints none)."""

    name: str
    words: tuple[str, ...]
    figures: tuple[Figure | None, ...]
    extra: tuple[float | None, ...] = ()  # what is computed where nothing is printed


@dataclasses.dataclass(frozen=True)
class Table:
    key: str
    title: str
    words: tuple[str, ...]
    quantities: tuple[str, ...]
    lines: tuple[Line, ...]

    @property
    def off(self) -> dict[tuple[str, str, str], Figure]:
        """The figures that do not round to what is printed: (table, row, quantity)."""
        return {
            (self.key, line.name, quantity): figure
            for line in self.lines
            for quantity, figure in zip(self.quantities, line.figures, strict=True)
            if figure is not None and not figure.rounds
        }

    def section(self) -> Section:
        columns = [*self.words]
        for quantity in self.quantities:
            columns += [f"{quantity}: paper", "bnfuse", "difference"]
        rows = [[*line.words, *(cell for figure in line.figures for cell in cells(figure))] for line in self.lines]
        return Section.table(self.title, columns, rows)


def cells(figure: Figure | None) -> tuple[str, str, str]:
    if figure is None:
        return "", "", ""
    return figure.printed, figure.shown(), figure.difference + ("" if figure.rounds else " *")


# Where a figure does not round to the printed one, and why.
CUT = "0.852 is cut, not rounded"
DOWN = "4.69 is cut, not rounded"
RATIO = "55x55 against 27x27 is 4.15 in every column; this one has 4.2"
POOL = "its output is 1x1 in both networks, as the table itself says"
QUOTIENT = "not the quotient of the table's own columns"
NOTES: dict[tuple[str, str, str], str] = {
    ("4.2", "pool3", "computation"): "0.64499 is cut, not rounded",
    ("4.2", "conv12", "output"): "that of conv11, with 1024 channels; conv12 has 1000",
    ("4.2", "pool12", "output"): "4.096 is cut, not rounded",
    ("4.2", "pool12", "computation"): "two operations an element; the other poolings have one",
    ("4.3", "amount", "output"): "the unit is a slip, and the data are those of table 4.2 (with 12 channels: 7.79 GB)",
    ("4.3", "amount", "computation"): "the sum of rounded figures; 2.914 rounds to 2.91",
    ("4.3", "amount", "parameters"): "that of table 4.2; conv1 alone has 0.42 MB more",
    **{("4.5", layer, "output"): CUT for layer in ("conv7", "conv8", "conv9")},
    ("4.6", "amount", "parameters"): "42.68 is cut, or is without biases (42.65)",
    ("4.7", "pool12", "output"): POOL,
    ("4.7", "pool9", "computation"): DOWN,
    ("4.7", "pool12", "computation"): DOWN,
    **{("4.8", layer, "computation"): RATIO for layer in ("pool3", "conv4", "conv5", "conv6")},
    ("4.8", "pool12", "output"): POOL,
    ("3.1", "AlexNet", "|D|"): "images of 227; with 224, rounded up in the poolings, it is 1683 MB",
    **{("3.1", name, "|D|/|W|"): QUOTIENT for name in ("NiN", "AlexNet", "GoogLeNet", "VGG-19")},
    ("3.1", "GoogLeNet", "|W|"): "with its auxiliary heads; 53.5, and 54 with the biases",
    ("3.1", "NiN", "computation"): "6.76 is cut, not rounded",
    ("5.3", "table 5.3: complex bypass", "size"): (
        "four 1x1 convolutions, around modules whose channels change, are what the text describes, and 341,248"
        " parameters; with twice as many it would be 7.72 MB of 10^6 bytes"
    ),
    ("5.3", "figure 5.3: squeeze ratio 0.75", "size"): "19.4 MB of 10^6 bytes; every other size has MB of 2^20",
}


def layers_of(text: str) -> dict[str, tuple[str, ...]]:
    """The rows of a printed table by their first word."""
    rows = [row.split() for row in re.split(r"[;\n]", text) if row.strip()]
    return {row[0]: tuple(row[1:]) for row in rows}


def nin(**settings: object) -> Inspection:
    return bnfuse.inspect("nin", zoo={"batch": BATCH, **settings})


def quantities(found: Inspection) -> dict[str, tuple[float, float, float]]:
    """Output bytes, parameter bytes and forward FLOPs of the layers that [Iandola16] lists."""
    rows: dict[str, tuple[float, float, float]] = {"data": (found.layer("conv1/conv").input_bytes, 0, 0)}
    for layer in found.layers:
        if layer.op == "Conv" or layer.op in POOLS:
            name = layer.name.removesuffix("/conv")
            rows[name] = (layer.output_bytes, layer.parameter_bytes, layer.flops_forward)
    rows["total"] = (data_size(found), found.total["parameter_bytes"], found.total["flops_forward"])
    return rows


def data_size(found: Inspection) -> float:
    """The paper's |D|: the input of every convolution and linear layer, as often as it is read."""
    return sum(layer.input_bytes for layer in found.layers if layer.op in DENSE)


def sum_of_rows(rows: dict[str, tuple[float, float, float]]) -> float:
    return sum(row[0] for name, row in rows.items() if name != "total")


def maps_of(found: Inspection) -> dict[str, str]:
    """Side of each layer's output map."""
    data = found.inputs["data"].rstrip("]").split(", ")[-1]
    sides = {"data": data}
    for layer in found.layers:
        sides.setdefault(layer.name.removesuffix("/conv"), str(layer.output_shape[-1]))
    return sides


QUANTITIES = ("output", "parameters", "computation")


def table_4_2() -> Table:
    rows, sides = quantities(nin()), maps_of(nin())
    lines = [
        Line(name, (name, sides.get(name, "")), tuple(map(Figure, printed, rows[name])))
        for name, printed in layers_of(paper.TABLE_4_2).items()
    ]
    lines.append(Line("rows", (f"sum of the rows above: {scaled(sum_of_rows(rows), 'B')}", ""), (None, None, None)))
    return Table("4.2", "Table 4.2: Network in Network, batch of 1024", ("layer", "map"), QUANTITIES, tuple(lines))


def table_of_changes(key: str) -> Table:
    what, settings, _, text = paper.VARIANTS[key]
    before, found = quantities(nin()), nin(**settings)
    after, sides = quantities(found), maps_of(found)
    lines = []
    for name, printed in layers_of(text).items():
        row = after["total" if name == "amount" else name]
        base = (1.0, 1.0, 1.0) if name == "amount" else before[name]
        nothing = 0.0 if name == "data" else 1.0  # a pooling has as many parameters as before: none
        changes = [now / old if old else nothing for now, old in zip(row, base, strict=True)]
        lines.append(Line(name, (name, sides.get(name, "")), tuple(map(Figure, printed, changes))))
    whole = f"sum of the rows: {scaled(sum_of_rows(after), 'B')}, {sum_of_rows(after) / sum_of_rows(before):.3g}x"
    lines.append(Line("rows", (whole, ""), (None, None, None)))
    return Table(key, f"Table {key}: {what}", ("layer", "map"), QUANTITIES, tuple(lines))


def table_4_1() -> Table:
    lines = []
    for key in paper.VARIANTS:
        total = next(line for line in table_of_changes(key).lines if line.name == "total")
        lines.append(Line(key, (key, paper.VARIANTS[key][0]), total.figures))
    return Table("4.1", "Table 4.1: changes of the totals", ("table", "change"), QUANTITIES, tuple(lines))


def weight_bytes(graph: gs.Graph) -> int:
    """The paper's |W|, equation 3.1: weights of convolutions and linear layers, without biases."""
    weights = {p.name: p for node in graph.nodes for p in parameters_of(node) if len(p.shape) > 1}
    return sum(math.prod(p.shape) * 4 for p in weights.values())


def with_auxiliary_heads(graph: Network) -> Network:
    """GoogLeNet with its two auxiliary classifiers (Szegedy et al. 2015, section 5), which the zoo leaves out.

    Each reads the output of an inception module: 5x5 average pooling of stride 3, 128 1x1 convolutions, 1024 hidden
    features, the classes.
    """
    outputs = {node.name: node.outputs[0] for node in graph.nodes}
    for index, source in enumerate(("inception4a/concat", "inception4d/concat"), 1):
        x = graph.average_pool_layer(outputs[source], 5, stride=3, name=f"aux{index}/pool")
        x = graph.conv_relu_layer(x, 128, 1, norm=False, name=f"aux{index}/conv")
        x = graph.flatten_layer(x, name=f"aux{index}/flatten")
        x = graph.linear_layer(x, 1024, name=f"aux{index}/linear")
        graph.linear_layer(x, 1000, name=f"aux{index}/classifier")
    return graph


def gradients(label: str) -> int:
    """|W| of table 3.1 as bnfuse has it."""
    name, settings, _ = paper.TABLE_3_1[label]
    graph = build_graph(name, batch=1, **settings)
    return weight_bytes(with_auxiliary_heads(graph) if label == "GoogLeNet" else graph)


def dense_flops(found: Inspection) -> int:
    """Equation 4.4: convolutions and linear layers, forward."""
    return sum(layer.flops_forward for layer in found.layers if layer.op in DENSE)


def table_3_1() -> Table:
    lines = []
    for label, (name, settings, text) in paper.TABLE_3_1.items():
        found = bnfuse.inspect(name, zoo={"batch": BATCH, **settings})
        data, weights = data_size(found), gradients(label)
        values = (data, weights, data / weights, 3 * dense_flops(found))
        shown = f"{label} ({name}{''.join(f', {key} {value}' for key, value in settings.items())})"
        lines.append(Line(label, (shown,), tuple(map(Figure, text.split(), values))))
    title = "Table 3.1: data and weights, forward and backward of a batch of 1024"
    return Table("3.1", title, ("network",), ("|D|", "|W|", "|D|/|W|", "computation"), tuple(lines))


def table_5_1() -> Table:
    """Images of 227: the printed maps follow from these, and not from 224 (conv1 has no padding)."""
    found = bnfuse.inspect("squeezenet-plain", zoo={"batch": 1, "image": 227})
    names = {"maxpool": "pool", "avgpool": "pool"}
    lines = []
    for label, (shape, parameters) in layers_of(paper.TABLE_5_1).items():
        part = re.sub("^(maxpool|avgpool)", lambda match: names[match[0]], label)
        mine = [x for x in found.layers if label == "total" or x.name == part or x.name.startswith(f"{part}/")]
        figure = Figure(parameters, sum(x.parameters for x in mine))
        lines.append(Line(label, (label, shape, "" if label == "total" else map_of(mine)), (figure,)))
    words = ("layer", "output: paper", "bnfuse")
    return Table("5.1", "Table 5.1: SqueezeNet, parameters", words, ("parameters",), tuple(lines))


def map_of(layers: Sequence[Layer]) -> str:
    """55x55x128 of the last feature map among the layers."""
    _, channels, height, width = [x.output_shape for x in layers if len(x.output_shape) == 4][-1]
    return f"{height}x{width}x{channels}"


def model_sizes() -> Table:
    lines = [
        Line(where, (where,), (Figure(size, parameter_bytes("squeezenet-plain", **settings)),))
        for where, settings, size in paper.MODEL_SIZES
    ]
    return Table("5.3", "Model sizes of SqueezeNet (the paper's MB is 2^20 here)", ("model",), ("size",), tuple(lines))


def parameter_bytes(name: str, **settings: object) -> float:
    return bnfuse.inspect(name, zoo={"batch": 1, **settings}).total["parameter_bytes"]


def images_per_second(name: str) -> float:
    """Of one K20 with Caffe: its training time in the first rows of tables 3.2 and 3.3."""
    epochs, hours = paper.BASELINES[name]
    return epochs * IMAGES / (hours * 3600)


def on_k20s(
    name: str, batch: int, workers: Sequence[int], bandwidth: float, mode: str = "strong", size: float | None = None
) -> Scaling:
    whole = Quantities(name, batch, gradients(name) if size is None else size, step_s=batch / images_per_second(name))
    return scale(whole, None, workers, scaling.Network(bandwidth), "tree", mode)  # type: ignore[arg-type]


def fitted_bandwidth() -> float:
    """The bandwidth at which FITTED_ROW has its printed speed-up: t/p + c/BW = t/speed-up."""
    name, workers, batch = FITTED_ROW
    row = next(r for r in paper.TABLES_3_2_AND_3_3 if r[:3] == FITTED_ROW)
    whole = batch / images_per_second(name)
    unit = on_k20s(name, batch, [workers], 1.0).points[0].communication_s  # at a byte a second
    return unit / (whole / Figure(row[5], 0).value - whole / workers)


def convolutions_alone() -> float:
    """The weight bytes of AlexNet's convolutions: what cuda-convnet2 exchanges, its linear layers being split."""
    found = bnfuse.inspect("alexnet", zoo={"batch": 1})
    return sum(layer.parameter_bytes for layer in found.layers if layer.op == "Conv")


def scaling_section(nominal: float) -> Section:
    rows = []
    for name, workers, batch, epochs, hours, speedup in paper.TABLES_3_2_AND_3_3:
        sizes = (None, convolutions_alone()) if name == "AlexNet" else (None,)
        for size in sizes:
            found = [
                train(on_k20s(name, batch, [workers], bandwidth, size=size), epochs, name)
                for bandwidth in (fitted_bandwidth(), nominal)
            ]
            figure = Figure(speedup, found[0][1])
            note = "fitted" if (name, workers, batch) == FITTED_ROW else figure.difference
            label = name if size is None else f"{name}, convolutions alone"
            times = [f"{taken:.3g}h" if hours else "" for taken, _ in found]
            speeds = [f"{speed:.3g}x" for _, speed in found]
            rows.append((label, workers, batch, epochs, hours, *times, speedup, speeds[0], note, speeds[1]))
    fit, given = scaled(fitted_bandwidth(), "B/s"), scaled(nominal, "B/s")
    title = f"Tables 3.2 and 3.3: training on NVIDIA K20s, reduction tree; {fit} fitted to one row, {given} to none"
    head = (
        "network",
        "workers",
        "batch",
        "epochs",
        "time: paper",
        fit,
        given,
        "speed-up: paper",
        fit,
        "difference",
        given,
    )
    return Section.table(title, head, rows)


def train(found: Scaling, epochs: int, name: str) -> tuple[float, float]:
    """Hours of so many epochs, and the speed-up over the hours of the baseline.

    GoogLeNet's 23x is for the 64 epochs of the baseline, 20x and 47x for 72.
    """
    hours = epochs * IMAGES / found.points[0].samples_per_s / 3600
    return hours, paper.BASELINES[name][1] / hours


def rates_section() -> Section:
    rows = []
    for name in paper.BASELINES:
        network_name, settings, _ = paper.TABLE_3_1[name]
        work = 3 * dense_flops(bnfuse.inspect(network_name, zoo={"batch": 1, **settings}))
        rate = images_per_second(name)
        found = on_k20s(name, BATCH, [32], fitted_bandwidth())
        rows.append((name, f"{rate:.0f}", scaled(work, "F"), scaled(rate * work, "F/s"), f"{found.balance:.0f}"))
    columns = ("network", "images/s", "an image", "rate", "balance")
    return Section.table("One K20, as the first rows of tables 3.2 and 3.3 have it", columns, rows)


def tables() -> list[Table]:
    changes = [table_of_changes(key) for key in paper.VARIANTS]
    return [table_4_1(), table_4_2(), *changes, table_3_1(), table_5_1(), model_sizes()]


def notes(found: Iterable[Table]) -> Section:
    off = {key: figure for table in found for key, figure in table.off.items()}
    lines = [f"table {key[0]}, {key[1]}, {key[2]}: {NOTES.get(key, 'unexplained')}" for key in off]
    return Section.lines("* does not round to the printed figure", lines)


def sections(nominal: float) -> list[Section]:
    found = tables()
    return [*(table.section() for table in found), notes(found), rates_section(), scaling_section(nominal)]


def draw(path: str) -> None:
    """Speed-ups of NiN and GoogLeNet, batch 1024, and those of tables 3.2 and 3.3.

    The curves are of images a second: 47x with 72 epochs in place of 64 is 52.9x there.
    """
    from bnfuse.estimating.parallel.plot import plot

    workers = [1, 2, 4, 8, 16, 32, 64, 128]
    rate = fitted_bandwidth()
    curves = [on_k20s("NiN", BATCH, workers, rate), on_k20s("GoogLeNet", BATCH, workers, rate)]
    curves += [on_k20s("NiN", 32, workers, rate, "weak"), on_k20s("GoogLeNet", 32, workers, rate, "weak")]
    marks = [("NiN", 32, 23.0), ("NiN", 128, 39.0), ("GoogLeNet", 32, 23.0), ("GoogLeNet", 128, 47 * 72 / 64)]
    title = f"NVIDIA K20s: a batch of 1024 (strong) or 32 a worker (weak), reduction tree at {scaled(rate, 'B/s')}"
    plot(curves, path, marks=marks, title=title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default=f"{NOMINAL / 1e9:g}GB/s", help="of the network, fitted to nothing")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into a document")
    parser.add_argument("--plot", metavar="FILE", help="scaling curves")
    given = parser.parse_args()
    parts = sections(scaling.network(given.bandwidth).bandwidth)
    print(join(parts))
    if given.write:
        write_into(given.write, Path(__file__).name, parts)
    if given.plot:
        draw(given.plot)


if __name__ == "__main__":
    main()
