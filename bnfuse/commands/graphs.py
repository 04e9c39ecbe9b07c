"""Commands on graphs: inspect, rewrite, diff, verify."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bnfuse.commands import options, updates
from bnfuse.commands.output import Progress, require_text_writable, show, show_json, to_json, write_text
from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import require_apart
from bnfuse.core.text import Section, count, number, scaled

if TYPE_CHECKING:
    pass

Before = Annotated[Path, typer.Argument(metavar="BEFORE.ONNX", show_default=False)]
After = Annotated[Path, typer.Argument(metavar="AFTER.ONNX", show_default=False)]


class Level(str, enum.Enum):
    """How far BatchNorm is fused."""

    none = "none"
    rcf = "rcf"
    mvf = "mvf"
    bnff = "bnff"
    icf = "icf"


class Format(str, enum.Enum):
    """How a difference is shown."""

    text = "text"
    json = "json"
    html = "html"


class Runtime(str, enum.Enum):
    """What runs the graphs that are compared."""

    ort = "ort"
    tvm = "tvm"
    float64 = "float64"


def inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="NAME|TRAIN.ONNX", help="A zoo network or a training graph.", show_default=False),
    ],
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch (zoo).", show_default=False)] = None,
    image: options.ImageSize = None,
    channels: options.Channels = None,
    classes: options.Classes = None,
    set_: options.Settings = None,
    units: options.Units = options.Unit.decimal,
    json: options.Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout, a row a layer.")] = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """Sizes, parameters, FLOPs and feature-map traffic of a network, layer by layer (docs/design-space.md).

    \b
    bnfuse inspect train.onnx
    bnfuse inspect nin --batch 1024 --set filters8=1536
    bnfuse inspect squeezenet-plain --image 227 --units binary
    bnfuse inspect densenet121 --batch 32 --csv
    """
    if csv and json:
        raise BnfuseError("--csv and --json are both for stdout: give one of them")
    from bnfuse import api

    zoo = options.zoo(batch, image, channels, classes, set_)
    found = api.inspect(source, zoo=zoo, **options.opening(checkpoint, data_input, labels_input))
    if csv:
        typer.echo(found.to_csv(), nl=False)
    elif json:
        show_json(found.to_json())
    else:
        show(found.sections(units.value))


def rewrite(
    model: options.Model,
    output: options.Output,
    level: Annotated[
        Level, typer.Option(help="How far BatchNorm is fused; each level includes those before.")
    ] = Level.icf,
    pool_first: Annotated[
        bool | None,
        typer.Option(
            "--pool-first/--no-pool-first",
            help="Average pools in front of 1x1 convolutions (default at icf).",
            show_default=False,
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="BatchNorms to take out: 1,4-7, all, all-except:5,8, paper, or globs of node names.",
            show_default=False,
        ),
    ] = None,
    keep_affine: Annotated[
        bool, typer.Option("--keep-affine", help="Keep scale and bias of those that are taken out.")
    ] = False,
    decay: Annotated[
        float | None,
        typer.Option(metavar="A", help="Weight of a batch in the running statistics, in (0, 1].", show_default=False),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="What statistics are taken from: ns:4, bs:4, fs:1/32, frs:1/32, vdn:1, l1bn, rbn, fs:1/64+vdn:2@0.5; "
            "GLOB=SPEC,... by layer.",
            show_default=False,
        ),
    ] = None,
    local_bn: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Normalise each group of N samples on its own.", show_default=False),
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Statistics of all ranks of a data-parallel run (SyncBN).")
    ] = False,
    sync_ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --sync: of the first N ranks alone.", show_default=False),
    ] = None,
    freeze: updates.Freeze = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the report as JSON, or as a page with both graphs where FILE ends in .html.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """Split BatchNorms and fuse their halves into the neighbouring operators.

    \b
    bnfuse rewrite train.onnx -o fused.onnx
    bnfuse rewrite train.onnx -o fused.onnx --level bnff --report report.json
    bnfuse rewrite train.onnx -o fused.onnx --remove all-except:5,7 --keep-affine --decay 0.05
    bnfuse rewrite train.onnx -o fused.onnx --sample 'fs:1/32,stem*=bn'
    bnfuse rewrite train.onnx -o fused.onnx --local-bn 4 --sample bn+vdn:1
    bnfuse rewrite train.onnx -o fused.onnx --sync
    """
    from bnfuse import api

    require_text_writable(output)
    if report:
        require_apart(model, report)  # the rewritten graph may take the place of the graph
        require_apart(output, report)
        require_text_writable(report)
    signature = options.opening(checkpoint, data_input, labels_input)
    rewritten = api.rewrite(
        model,
        level=level.value,
        pool_first=pool_first,
        remove=remove,
        keep_affine=keep_affine,
        decay=decay,
        sample=sample,
        local_bn=local_bn,
        sync=sync,
        sync_ranks=sync_ranks,
        freeze=freeze or (),
        **signature,
    )
    api.save(rewritten.model, output)
    found = rewritten.report.to_json()
    if report:
        write_text(report, report_page(model, rewritten, output, signature) if is_page(report) else to_json(found))
    if json:
        show_json(found)
        return
    show(report_sections(found))
    typer.echo(f"\nwrote {output}")


def is_page(path: Path) -> bool:
    """Tell whether a report is to be a page."""
    return path.suffix.lower() in (".html", ".htm")


def report_page(model: Path, rewritten: Any, output: Path, signature: dict[str, Any]) -> str:
    """Write the page of a rewrite."""
    from bnfuse.diffing.page import rewrite_page

    return rewrite_page(model, rewritten, output=output, **signature)


def report_sections(report: dict[str, Any]) -> list[Section]:
    """Show a rewrite report as text."""
    passes = [(p["name"], number(p["changed"])) for p in report["passes"]]
    title = unfused_title(report, "BatchNorm", "batch_norms")
    if report["group_norms"]:
        title += f"; {unfused_title(report, 'GroupNorm', 'group_norms')}"
    if report["layer_norms"]:
        title += f"; {unfused_title(report, 'LayerNorm', 'layer_norms')}"
    sections = [Section.table(title, ("pass", "changed"), passes)]
    if report["removed"]:
        gone = [(number(e["index"]), e["node"], "stays" if e["kept_affine"] else "") for e in report["removed"]]
        sections.append(Section.table("Removed", ("number", "BatchNorm", "scale and bias"), gone))
    if report["sampled"]:
        taken = [(e["node"], e["spec"], number(e["elements"]), f"{e['ratio']:.4f}") for e in report["sampled"]]
        sections.append(Section.table("Sampled", ("BatchNorm", "spec", "elements a channel", "of all"), taken))
    if (sent := report["exchanged"])["moments"]:
        rows = [("statistics", number(sent["moments"]), scaled(sent["moment_bytes"], "B"))]
        rows.append(("sums of their gradients", number(sent["terms"]), scaled(sent["term_bytes"], "B")))
        sections.append(Section.table("Exchanged between ranks in a step", ("what", "exchanges", "a rank sends"), rows))
    if report["unfused"]:
        for norm in dict.fromkeys(entry["norm"] for entry in report["unfused"]):
            mine = [entry for entry in report["unfused"] if entry["norm"] == norm]
            rows = [(entry["node"], entry["half"], entry["reason"]) for entry in mine]
            sections.append(Section.table("Unfused", (norm, "half", "reason"), rows))
    return sections


def unfused_title(report: dict[str, Any], norm: str, counted: str) -> str:
    """Count the norms of a kind and those of which a half is unfused."""
    unfused = {entry["node"] for entry in report["unfused"] if entry["norm"] == norm}
    return f"{count(report[counted], norm)}, {len(unfused)} unfused"


def diff(
    before: Before,
    after: After,
    format: Annotated[Format, typer.Option(help="text, json (docs/cli.md) or html, a page.")] = Format.text,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.", show_default=False)
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when the graphs differ.")] = False,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """What differs between two training graphs: nodes, BatchNorms, feature-map traffic.

    \b
    bnfuse diff train.onnx fused.onnx
    bnfuse diff train.onnx fused.onnx --format json -o diff.json
    bnfuse diff train.onnx fused.onnx --format html -o diff.html
    bnfuse diff train.onnx other.onnx --exit-code
    """
    from bnfuse import api
    from bnfuse.diffing.page import diff_page
    from bnfuse.graph.training_graph import open_graph

    for graph in (before, after):
        require_apart(graph, output)
    if output:
        require_text_writable(output)
    signature: dict[str, Any] = {"data_input": data_input, "labels_input": labels_input}
    graphs = (open_graph(before, **signature), open_graph(after, **signature))
    found = api.diff(*graphs)
    if format is Format.text and not output:
        show(found.sections())
    else:
        forms = {
            Format.text: found.__str__,
            Format.json: lambda: to_json(found.to_json()),
            Format.html: lambda: diff_page(*graphs),
        }
        text = forms[format]()
        if output:
            write_text(output, text)
        else:
            print(text)
    if exit_code and not found.equal:
        raise typer.Exit(1)


def verify(
    before: Before,
    after: After,
    runtime: Annotated[
        Runtime, typer.Option(help="What runs AFTER: onnxruntime, our compiled step, or float64 (both files, slowly).")
    ] = Runtime.ort,
    steps: Annotated[int, typer.Option(min=0, help="Train both for so many steps and compare the losses.")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of these steps.")] = 0.01,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Compare at another batch than that of the files.", show_default=False)
    ] = None,
    target: options.Target = "cpu",
    precision: options.Precision = None,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    json: options.Json = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """Tell whether two training graphs compute the same loss, gradients and running statistics (docs/numerics.md).

    \b
    bnfuse verify train.onnx fused.onnx
    bnfuse verify train.onnx fused.onnx --runtime tvm --steps 5
    bnfuse verify train.onnx fused.onnx --runtime float64     (where rounding leaves no verdict)
    bnfuse verify train.onnx fused.onnx --batch 7
    bnfuse verify training_model.onnx fused.onnx --checkpoint checkpoint
    """
    from bnfuse import api

    found = api.verify(
        before,
        after,
        runtime=runtime.value,
        steps=steps,
        seed=seed,
        lr=lr,
        target=target,
        precision=precision,
        batch=batch,
        threads=threads,
        progress=Progress(),
        **options.opening(checkpoint, data_input, labels_input),
    )
    show_json(found.to_json()) if json else show(found.sections())
    if not found.equal:
        raise typer.Exit(1)


COMMANDS = (inspect, rewrite, diff, verify)
