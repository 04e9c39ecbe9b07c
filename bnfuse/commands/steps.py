"""Commands on compiled steps: compile, run, bench, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bnfuse.commands import options, updates, worlds
from bnfuse.commands.output import Progress, show, show_json
from bnfuse.core.files import require_apart, require_writable
from bnfuse.core.text import Section, number, scaled

Source = Annotated[Path, typer.Argument(metavar="TRAIN.ONNX|STEP.BNF", show_default=False)]


def compile(
    model: options.Model,
    output: options.Output,
    target: options.Target = "cpu",
    precision: options.Precision = None,
    optimizer: options.OptimizerOption = options.OptimizerName.sgd,
    lr: options.LearningRate = 0.1,
    momentum: options.Momentum = 0.9,
    nesterov: options.Nesterov = False,
    weight_decay: options.WeightDecay = 0.0,
    no_decay: options.NoDecay = None,
    freeze: updates.Freeze = None,
    opt: updates.Opt = None,
    lr_of: updates.LrOf = None,
    decay_of: updates.DecayOf = None,
    layer_decay: updates.LayerDecay = 1.0,
    clip_norm: updates.ClipNorm = None,
    clip_value: updates.ClipValue = None,
    accumulate: updates.Accumulate = 1,
    ema: updates.Ema = None,
    ema_warm_up: updates.EmaWarmUp = False,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, metavar="N", help="A batch size (default: the graph's); may be repeated.", show_default=False
        ),
    ] = None,
    threads: options.Threads = None,
    tune: options.Tune = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """Compile a training graph into one file that runs without a compiler.

    The file holds native code: trust it like a program.

    \b
    bnfuse compile fused.onnx -o step.bnf
    bnfuse compile fused.onnx -o step.bnf --tune
    bnfuse compile fused.onnx -o step.bnf --batch 32 --batch 7
    bnfuse compile fused.onnx -o step.bnf --target cuda:sm_90 --precision bf16
    bnfuse compile fused.onnx -o step.bnf --optimizer adamw --lr 0.001 --no-decay '*bias'
    """
    from bnfuse import api

    recipe = updates.recipe(opt, lr_of, decay_of, layer_decay, clip_norm, clip_value, accumulate, ema, ema_warm_up)
    require_apart(model, output)
    require_writable(output)
    progress = Progress()
    step = api.compile(
        model,
        target=target,
        precision=precision,
        freeze=freeze or (),
        optimizer=api.optimizer(optimizer.value, lr, momentum, nesterov, weight_decay, no_decay or (), **recipe),
        batches=batch or (),
        threads=threads,
        progress=progress.bar,
        tune=tune,
        **options.opening(checkpoint, data_input, labels_input),
    )
    progress.clear()
    step.export(output)
    show([describe_step(step, output)])


def describe_step(step: Any, output: Path) -> Section:
    """Tell what was compiled, in a few lines."""
    report = step.report
    return Section.table(
        str(output),
        ("", ""),
        [
            ("kernels", number(report.kernels)),
            ("of them by measurement", number(report.tuned)),
            *((f"launches, {phase}", number(launches)) for phase, launches in report.launches.items()),
            ("working memory", scaled(report.arena_bytes, "B")),
            ("parameters", scaled(report.parameter_bytes, "B")),
            *((what, scaled(size, "B")) for what, size in step.kept_bytes.items()),
            ("memory and code, in all", scaled(step.device_bytes, "B")),
            ("target", str(step.target)),
        ],
    )


def run(
    source: Source,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="NAME|DIR|FILE.npz|...", help="Training data (default: random).", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps to run.")] = 10,
    lr: Annotated[
        float | None, typer.Option(min=0, help="Learning rate (default: as compiled, or 0.1).", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="CKPT.safetensors", help="Write the state at the end.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="cpu[:MCPU]|cuda[:sm_XX]", help="Where a graph runs (default: cpu).", show_default=False),
    ] = None,
    precision: options.Precision = None,
    skip_unreadable: options.SkipUnreadable = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    world: worlds.WorldOption = worlds.WorldName.auto,
    world_timeout: worlds.WorldTimeout = None,
    deterministic: worlds.Deterministic = False,
    json: options.Json = False,
) -> None:
    """Run some training steps and print their losses.

    \b
    bnfuse run step.bnf --steps 20
    bnfuse run fused.onnx --data digits --steps 100 --save state.safetensors
    bnfuse run fused.onnx --target cuda --precision bf16
    mpirun -n 2 bnfuse run fused.onnx --data digits
    """
    from bnfuse import api

    ranks = worlds.here.open("run", world, world_timeout, deterministic, target or "cpu")
    losses = api.run(
        source,
        data=data,
        steps=steps,
        lr=lr,
        save_to=save,
        target=target,
        precision=precision,
        skip_unreadable=skip_unreadable,
        seed=seed,
        threads=threads,
        world=ranks,
        progress=Progress(),
    )
    if not worlds.here.leads:
        return
    if json:
        show_json({"losses": losses})
        return
    width = len(str(steps))
    for index, loss in enumerate(losses, 1):
        typer.echo(f"step {index:{width}}  loss {loss:.6f}")
    if save:
        typer.echo(f"wrote {save}")


def bench(
    model: options.Model,
    level: Annotated[
        list[str] | None,
        typer.Option(
            metavar="L,...",
            help="Levels to time (default: none,icf); L+pool-first and L+no-pool-first choose that option.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P,...",
            help="Baselines to time: ort, torch, torch-cl, torch-compile; on a GPU torch's, each also P+graph.",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Each level also with statistics sampled so (as of rewrite); repeatable.",
            show_default=False,
        ),
    ] = None,
    target: options.Target = "cpu",
    precision: options.Precision = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed steps of each candidate.")] = 9,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps of each candidate before those.")] = 2,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Patience for an idle machine before timing.")
    ] = 60,
    profile: Annotated[bool, typer.Option("--profile", help="Our steps kernel by kernel too.")] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="The profile, and beside it what the memory model predicts.")
    ] = False,
    compile_time: Annotated[
        bool, typer.Option("--compile-time", help="Compile time too, with an empty and a filled cache.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Write a picture.", show_default=False)
    ] = None,
    tune: options.Tune = False,
    seed: options.Seed = 0,
    threads: options.Threads = None,
    json: options.Json = False,
    checkpoint: options.Checkpoint = None,
    data_input: options.DataInput = None,
    labels_input: options.LabelsInput = None,
) -> None:
    """Time a step at several levels and in other runtimes, alternating in one process; peak memory in one process each.

    \b
    bnfuse bench train.onnx --level none,icf
    bnfuse bench train.onnx --level icf --against ort,torch,torch-cl,torch-compile --plot bench.png
    bnfuse bench train.onnx --level none,none+pool-first,icf+no-pool-first,icf
    bnfuse bench train.onnx --level icf --profile
    bnfuse bench train.onnx --level none,icf --estimate
    bnfuse bench train.onnx --level none,icf --sample fs:1/32 --sample bs:1/8
    bnfuse bench train.onnx --target cuda --precision bf16 --against torch-cl+graph,torch-compile+graph
    """
    from bnfuse import api

    found = api.bench(
        model,
        levels=level or ["none", "icf"],
        samples=sample or (),
        against=against or (),
        repetitions=repetitions,
        warm_up=warm_up,
        wait=wait,
        profile=profile,
        estimate=estimate,
        compile_time=compile_time,
        tune=tune,
        plot=plot,
        seed=seed,
        threads=threads,
        target=target,
        precision=precision,
        progress=Progress(),
        **options.opening(checkpoint, data_input, labels_input),
    )
    show_json(found.to_json()) if json else show(found.sections())


def demo(
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the files here (default: nowhere).", show_default=False)
    ] = None,
    seed: options.Seed = 0,
    threads: options.Threads = None,
) -> None:
    """The whole job on a small DenseNet and embedded images: build, rewrite, verify, diff, compile, train.

    \b
    bnfuse demo
    bnfuse demo --folder /tmp/demo
    """
    from bnfuse.commands.demo import run_demo

    if not run_demo(folder=folder, seed=seed, threads=threads, say=say, show=show_apart, progress=Progress()):
        raise typer.Exit(1)


def say(text: str) -> None:
    """Print a line, at once."""
    print(text, flush=True)


def show_apart(sections: list[Section]) -> None:
    """Print tables with a blank line after them."""
    show(sections)
    say("")


COMMANDS: tuple[Any, ...] = (compile, run, bench, demo)
