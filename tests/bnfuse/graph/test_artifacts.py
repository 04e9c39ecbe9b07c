"""What onnxruntime's `generate_artifacts` writes: a graph that works in place, and its checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnfuse.analysis.executed import require_fixed_shapes
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph import io
from bnfuse.graph.artifacts import expose_results
from bnfuse.graph.signature import signature_of
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward


@pytest.fixture(scope="module")
def training() -> onnx.ModelProto:
    return build_training_graph(build_forward("densenet40", batch=2, depth=1, image=8))


@pytest.mark.torch
@pytest.mark.ort_training
def test_torch_and_onnxruntime_training_can_still_be_imported_afterwards():
    code = """
from bnfuse.ort import library as ort
ort.training_library("this")
import torch
from onnxruntime.training import artifacts
torch.zeros(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    """A training graph and its checkpoint, as onnxruntime's own tool leaves them."""
    folder = tmp_path_factory.mktemp("artifacts")
    source = build_forward("densenet40", batch=2, depth=1, image=8)
    onnx.save(source, folder / "forward.onnx")
    code = f"""
import onnx
onnx.IR_VERSION = 10
from onnxruntime.training import artifacts
model = onnx.load("forward.onnx")
running = sorted(n for n in (t.name for t in model.graph.initializer) if "/running_" in n)
train = [t.name for t in model.graph.initializer if t.name not in running]
artifacts.generate_artifacts(model, requires_grad=train, frozen_params=running,
    loss=artifacts.LossType.CrossEntropyLoss, artifact_directory={str(folder)!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, capture_output=True)
    return folder


@pytest.mark.torch
@pytest.mark.ort_training
def test_graph_and_checkpoint_of_generate_artifacts_load(artifacts, training):
    model = io.load(artifacts / "training_model.onnx", checkpoint=artifacts / "checkpoint")
    graph = open_graph(model)
    graph.state(), require_fixed_shapes(graph)
    found, expected = signature_of(model), signature_of(io.load(training))
    assert set(found.trainable) == set(expected.trainable) and found.running == expected.running
    assert (found.data, found.labels, found.logits) == (("data",), ("labels",), "logits")
    source = {t.name: numpy_helper.to_array(t) for t in onnx.load(artifacts / "forward.onnx").graph.initializer}
    for name in (*found.trainable, *found.running):
        assert np.array_equal(model.graph.initializers[name].const_value.numpy(), source[name])


@pytest.mark.torch
@pytest.mark.ort_training
def test_generate_artifacts_graph_gives_the_same_results(artifacts, training):
    import onnxruntime

    rng = np.random.default_rng(0)
    feeds = {"data": rng.standard_normal((2, 3, 8, 8)).astype(np.float32), "labels": np.array([1, 3])}
    model = io.load(artifacts / "training_model.onnx", checkpoint=artifacts / "checkpoint")
    results = []
    for proto in (ir.to_proto(model), training):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = ["stem/conv/weight_grad", "final/norm/new_running_var", "logits"]
        results.append(session.run(names, feeds))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.torch
@pytest.mark.ort_training
@pytest.mark.parametrize("loss", ["BCEWithLogitsLoss", "MSELoss", "L1Loss"])
def test_labels_and_scores_of_other_losses_are_found(loss, tmp_path):
    import bnfuse

    scores = helper.make_node("Gemm", ["data", "w"], ["scores"], name="gemm")
    inputs = [helper.make_tensor_value_info("data", TensorProto.FLOAT, [4, 3])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [4, 2])]
    weight = numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    graph = helper.make_graph([scores], "g", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "forward.onnx")
    code = f"""
import onnx
onnx.IR_VERSION = 10
from onnxruntime.training import artifacts
artifacts.generate_artifacts(onnx.load("forward.onnx"), requires_grad=["w"], loss=artifacts.LossType.{loss},
    artifact_directory={str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
    model = io.load(tmp_path / "training_model.onnx", checkpoint=tmp_path / "checkpoint")
    found = signature_of(model)
    assert (found.data, found.labels, found.logits) == (("data",), ("target",), "scores")
    step = bnfuse.compile(model, optimizer=bnfuse.SGD(lr=0.1), threads=1)
    x, y = np.eye(4, 3, dtype=np.float32), np.full((4, 2), 0.25, np.float32)
    losses = [step(x, y) for _ in range(5)]
    assert losses[-1] < losses[0] and step.evaluate(x).shape == (4, 2)


@pytest.mark.torch
@pytest.mark.ort_training
def test_generate_artifacts_graph_without_its_checkpoint(artifacts):
    path = artifacts / "training_model.onnx"
    with pytest.raises(BnfuseError, match=f"^{path}: input 'stem/conv/weight' has no initial value. Pass --checkpoint"):
        open_graph(path).state()


@pytest.mark.torch
@pytest.mark.ort_training
def test_checkpoints_that_are_none(artifacts, tmp_path, training):
    graph, good = artifacts / "training_model.onnx", (artifacts / "checkpoint").read_bytes()
    for content in (b"", b"no", good[:8], good[:100], good[: len(good) // 2], good[:-10], b"\0\0\0\0ODTC" + good[8:90]):
        path = tmp_path / "checkpoint"
        path.write_bytes(content)
        with pytest.raises(BnfuseError, match=rf"^{path}: is (no checkpoint|damaged or cut short)") as caught:
            io.load(graph, checkpoint=path)
        assert "\n" not in str(caught.value)
    other = build_training_graph(build_forward("squeezenet", batch=2, image=32))
    with pytest.raises(BnfuseError, match="it belongs to another model"):
        io.load(other, checkpoint=artifacts / "checkpoint")


@pytest.mark.torch
@pytest.mark.ort_training
def test_generate_artifacts_graph_and_checkpoint_on_the_command_line(artifacts, tmp_path, capsys):
    from bnfuse.cli import main

    graph, fused = str(artifacts / "training_model.onnx"), str(tmp_path / "fused.onnx")
    values = ["--checkpoint", str(artifacts / "checkpoint")]
    assert main(["rewrite", graph, "-o", fused, *values]) == 0
    assert main(["verify", graph, fused]) == 2
    assert "--checkpoint" in capsys.readouterr().err
    assert main(["verify", graph, fused, *values]) == 0
    assert main(["compile", graph, "-o", str(tmp_path / "step.bnf"), *values]) == 0
    assert main(["run", str(tmp_path / "step.bnf"), "--steps", "1"]) == 0


def test_logits_of_artifacts_with_a_loss_written_in_steps():
    """generate_artifacts' mean squared error: what its own steps read of the network is the logits."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["out"]),
        helper.make_node("Sub", ["out", "target"], ["onnx::sub_output::1"]),
        helper.make_node("Mul", ["onnx::sub_output::1", "onnx::sub_output::1"], ["onnx::mul_output::4"]),
        helper.make_node("ReduceMean", ["onnx::mul_output::4"], ["onnx::reducemean_output::6"], keepdims=0),
        helper.make_node("Mul", ["onnx::sub_output::1", "half"], ["out_grad"]),
        helper.make_node("Gemm", ["x", "out_grad"], ["w_grad"], transA=1),
        helper.make_node("InPlaceAccumulatorV2", ["buffer", "w_grad", "lazy"], ["out.flag"], domain="com.microsoft"),
    ]
    sizes = {"x": [4, 3], "target": [4, 2], "w": [3, 2], "buffer": [3, 2], "lazy": [1]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()]
    outputs = [helper.make_tensor_value_info("onnx::reducemean_output::6", TensorProto.FLOAT, [])]
    outputs.append(helper.make_tensor_value_info("out.flag", TensorProto.BOOL, [1]))
    half = numpy_helper.from_array(np.array(0.25, np.float32), "half")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [half])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    expose_results(model)
    found = signature_of(ir.from_proto(model), labels_input="target")
    assert (found.logits, found.loss) == ("out", "onnx::reducemean_output::6")
    assert (found.data, found.trainable) == (("x",), ("w",))
