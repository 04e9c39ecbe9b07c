"""Compiles sets of trainings (training_sets.py) into files that training_run.py trains, here or on a GPU machine.

    python benchmarks/training_build.py --set sampling --folder files --target cuda:sm_90 --precision tf32
    python benchmarks/training_build.py --set errors --folder files

Beside the steps it writes data.npz: Fashion-MNIST from Debian's package. Files that are there stay; remove them to
build anew.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from gpu_pack import pack_step, recipes_of, redraw
from training_sets import SETS, Training, write_index

from bnfuse import passes, runtime
from bnfuse.build import build_training_graph
from bnfuse.data import sources
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward

CLASSES = 10


def build(training: Training, folder: Path, args: argparse.Namespace) -> None:
    if (folder / training.file).exists():
        return
    start = time.perf_counter()
    model = redraw(build_training_graph(forward_of(training)))
    rewritten = rewrite(model, training)
    if training.instrumented:
        instrument(rewritten)
    optimizer = runtime.SGD(lr=training.lr, momentum=0.9, weight_decay=training.weight_decay)
    step = runtime.compile_step(
        rewritten, target=args.target, precision=args.precision, optimizer=optimizer, threads=args.threads
    )
    with tempfile.TemporaryDirectory(prefix="bnfuse-training-") as place:
        step.export(Path(place) / "step.bnf")
        pack_step(Path(place) / "step.bnf", recipes_of(model), folder / training.file)
    size = (folder / training.file).stat().st_size / 2**10
    print(f"{training.file}: {size:.0f} KiB, {time.perf_counter() - start:.1f} s", flush=True)


def forward_of(training: Training) -> onnx.ModelProto:
    settings = dict(training.settings)
    return build_forward(
        training.network,
        batch=training.batch,
        image=training.image,
        channels=1,
        classes=CLASSES,
        **settings,
    )


def rewrite(model: onnx.ModelProto, training: Training) -> ir.Model:
    level = "none" if training.instrumented else "icf"
    graph = open_graph(ir.from_proto(model), name=training.name)
    return passes.rewrite(graph.model, level=level, sample=training.sample or None).model


def instrument(model: ir.Model) -> None:
    """The mean and variance that each BN used, and those of its whole input, as outputs of the graph.

    They are named `<BN>/used_mean`, `<BN>/used_variance`, `<BN>/full_mean`, `<BN>/full_variance`.
    """
    from bnfuse.opset.functions import add_functions
    from bnfuse.opset.spec import DOMAIN

    graph = model.graph
    for node in [node for node in graph if node.op_type == "BatchNormFinalize"]:
        name = (node.name or "").removesuffix("/finalize")
        used = node.inputs[2:4]
        maps = [other for other in graph if other.name == name and other.op_type == "NormalizePointwise"]
        x = maps[0].inputs[0]
        assert x is not None and x.shape is not None
        full = ir.Node(DOMAIN, "BatchNormStatistics", [x], num_outputs=2, name=f"{name}/full")
        graph.insert_before(node, full)
        whole = [(f"{name}/full_{what}", value) for what, value in zip(("mean", "variance"), full.outputs, strict=True)]
        part = [(f"{name}/used_{what}", value) for what, value in zip(("mean", "variance"), used, strict=True)]
        for label, value in (*whole, *part):
            assert value is not None
            copy = ir.Node("", "Identity", [value], num_outputs=1, name=label)
            copy.outputs[0].name = label
            copy.outputs[0].shape = ir.Shape([x.shape[1]])
            copy.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
            value.shape, value.type = copy.outputs[0].shape, copy.outputs[0].type
            graph.insert_before(node, copy)
            graph.outputs.append(copy.outputs[0])
        for what, value in zip(("mean", "variance"), full.outputs, strict=True):
            value.name = f"{name}/full/{what}"
    graph.sort()
    add_functions(model)


def write_data(folder: Path) -> None:
    """Fashion-MNIST as arrays."""
    path = folder / "data.npz"
    if not path.exists():
        train, test = (sources.fashion_mnist().parts[name] for name in ("train", "test"))
        np.savez_compressed(path, x=train.x, y=train.y, x_test=test.x, y_test=test.y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("training-files"))
    parser.add_argument("--set", action="append", choices=SETS, required=True)
    parser.add_argument("--only", help="trainings whose name has this in it")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    trainings = [t for name in args.set for t in SETS[name]() if (args.only or "") in t.name]
    write_data(args.folder)
    for training in trainings:
        build(training, args.folder, args)
        write_index(args.folder, [training])
    total = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{args.folder}: {total / 2**20:.1f} MiB in all")


if __name__ == "__main__":
    main()
