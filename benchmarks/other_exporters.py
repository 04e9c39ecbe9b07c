"""Whether networks of Keras (tf2onnx) and PaddlePaddle (paddle2onnx) are built as what their files compute.

    python benchmarks/other_exporters.py [--keras PYTHON] [--paddle PYTHON] [--image 64] [--batch 4]

PYTHON is the interpreter of an environment with tensorflow-cpu and tf2onnx, or with paddlepaddle, paddle2onnx and
packaging: they want another numpy and onnx than bnfuse. There the networks are exported (networks/by_keras.py,
by_paddle.py). Then, a column each:

    BatchNorms    that train; of files with none left, whether `build` refuses and says how to export instead
    Transposes    of maps, in the file and in the training graph
    error         of the scores, of the training graph and of its rewrite by level icf, against the file in onnxruntime
    launches      of the rewritten step, which is lowered and not compiled

The exit status is 1 where an error is above 1e-3: ResNet50 at 64x64 ends in maps of 2x2, and its rounding errors grow.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.signature import METADATA_KEY, GraphSignature
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.compile import lower_graph

HERE = Path(__file__).parent
TOLERANCE = 1e-3


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], output: str) -> np.ndarray:
    """Give an output of a model by onnxruntime; inputs that only the file has, tf2onnx's, are read by nothing."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    unread = {
        value.name: np.zeros(value.shape, np.float32) for value in session.get_inputs() if value.name not in feeds
    }
    known = {value.name for value in session.get_inputs()}
    return session.run([output], {name: value for name, value in {**unread, **feeds}.items() if name in known})[0]


def in_training(model: onnx.ModelProto) -> onnx.ModelProto:
    """Switch the BatchNorms of a file to the statistics of the batch."""
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            kept = [attribute for attribute in node.attribute if attribute.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("training_mode", 1)])
            node.output.extend(f"{node.output[0]}/{what}" for what in ("mean", "variance"))
    return model


def transposes(model: onnx.ModelProto) -> int:
    """Count the Transposes of a graph."""
    return sum(node.op_type == "Transpose" for node in model.graph.node)


def check(path: Path) -> tuple[str, bool]:
    """Give the line of a file, and whether it holds."""
    source = in_training(onnx.load(path))
    try:
        built = build(path, train_bn=True).model
    except BnfuseError as refusal:
        return f"{path.stem:28} {str(refusal).partition(': ')[2][:140]}", "folded away by its exporter" in str(refusal)
    signature = GraphSignature.from_json({e.key: e.value for e in built.metadata_props}[METADATA_KEY])
    after = ir.to_proto(rewrite(ir.from_proto(built), level="icf").model)
    value = source.graph.input[0]
    images = np.random.default_rng(0).normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim])
    feeds = {value.name: images.astype(np.float32), signature.labels[0]: np.zeros(len(images), np.int64)}
    expected = run(source, feeds, source.graph.output[0].name)
    errors = [np.abs(run(m, feeds, signature.logits) - expected).max() / np.abs(expected).max() for m in (built, after)]
    trained, _ = lower_graph(open_graph(after), resolve("cpu"), None)
    norms = sum(node.op_type == "BatchNorm" for node in built.graph.node)
    turned = f"{transposes(source):4} -> {transposes(built):2}"
    launches = len(trained.program.launches)
    line = f"{path.stem:28} {norms:10} {turned:>12} {errors[0]:10.1e} {errors[1]:10.1e} {launches:9}"
    return line, max(errors) < TOLERANCE


def main() -> int:
    """Export, and check each file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keras", metavar="PYTHON")
    parser.add_argument("--paddle", metavar="PYTHON")
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="of files that are exported already, or to be kept")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    for python, script in ((options.keras, "by_keras.py"), (options.paddle, "by_paddle.py")):
        if python:
            command = [python, HERE / "networks" / script, folder, str(options.image), str(options.batch)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"{'':28} {'BatchNorms':>10} {'Transposes':>12} {'error':>10} {'of icf':>10} {'launches':>9}")
    fine = True
    for path in sorted(folder.glob("*.onnx")):
        line, holds = check(path)
        print(line, "" if holds else "  <- wrong", flush=True)
        fine &= holds
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
