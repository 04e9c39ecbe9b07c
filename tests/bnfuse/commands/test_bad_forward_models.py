"""Forward models that cannot be built: one line that says what is the matter, status 2, no traceback."""

import numpy as np
import onnx
from bad_inputs import refused
from onnx import TensorProto, helper, numpy_helper

from bnfuse.cli import main


def forward(*nodes, x=(2, 3, 8, 8), y=(2, 10), initializers=(), opset=17) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        list(initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


def floats(name: str, *dims: int) -> TensorProto:
    return onnx.numpy_helper.from_array(np.ones(dims, np.float32), name)


CONV = helper.make_node("Conv", ["x", "w"], ["c"], name="conv")
POOL = helper.make_node("GlobalAveragePool", ["c"], ["p"], name="pool")
FLAT = helper.make_node("Flatten", ["p"], ["y"], name="flat")


def test_an_unknown_network(at, capsys):
    line = refused(capsys, "build", "densenet999", "-o", "t.onnx")
    assert "densenet999" in line and "densenet121" in line


def test_a_metaparameter_that_the_network_has_not(at, capsys):
    assert "growth" in refused(capsys, "build", "densenet40", "--set", "speed=9", "-o", "t.onnx")


def test_a_setting_that_is_none(at, capsys):
    assert "KEY=VALUE" in refused(capsys, "build", "densenet40", "--set", "growth", "-o", "t.onnx")


def test_sizes_that_make_no_sense(at, capsys):
    assert "image" in refused(capsys, "build", "densenet40", "--image", "100000000", "-o", "t.onnx")
    assert "--batch" in refused(capsys, "build", "densenet40", "--batch", "0", "-o", "t.onnx")


def test_an_image_too_small_for_the_network(at, capsys):
    assert "densenet121" in refused(capsys, "build", "densenet121", "--image", "4", "-o", "t.onnx")


def test_zoo_settings_for_a_file(at, capsys):
    onnx.save(forward(CONV, POOL, FLAT, initializers=[floats("w", 10, 3, 3, 3)]), at / "f.onnx")
    assert "classes" in refused(capsys, "build", "f.onnx", "--classes", "7", "-o", "t.onnx")


def frozen_batch_norm() -> onnx.ModelProto:
    norm = helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], name="layer3/bn2")
    pool = helper.make_node("GlobalAveragePool", ["n"], ["p"], name="pool")
    values = [floats("w", 10, 3, 3, 3), *(floats(k, 10) for k in "sbmv")]
    return forward(CONV, norm, pool, FLAT, initializers=values)


def test_a_frozen_batch_norm_and_what_to_do_about_it(at, capsys):
    onnx.save(frozen_batch_norm(), at / "f.onnx")
    line = refused(capsys, "build", "f.onnx", "-o", "t.onnx")
    assert "layer3/bn2" in line and "--train-bn" in line
    assert main(["build", "f.onnx", "--train-bn", "-o", "t.onnx"]) == 0


def test_an_operator_without_a_gradient(at, capsys):
    conv = helper.make_node("Conv", ["x", "w"], ["c0"], name="conv")
    align = helper.make_node("RoiAlign", ["c0", "boxes", "images"], ["c"], name="align_7")
    images = numpy_helper.from_array(np.arange(2), "images")
    weights = [floats("w", 10, 3, 3, 3), floats("boxes", 2, 4), images]
    onnx.save(forward(conv, align, POOL, FLAT, initializers=weights), at / "f.onnx")
    line = refused(capsys, "build", "f.onnx", "-o", "t.onnx")
    assert "align_7" in line and "RoiAlign" in line


def test_a_model_without_parameters(at, capsys):
    pool = helper.make_node("GlobalAveragePool", ["x"], ["p"], name="pool")
    onnx.save(forward(pool, FLAT, y=(2, 3)), at / "f.onnx")
    assert "f.onnx" in refused(capsys, "build", "f.onnx", "-o", "t.onnx")


def test_a_glob_that_matches_nothing(at, capsys):
    onnx.save(forward(CONV, POOL, FLAT, initializers=[floats("w", 10, 3, 3, 3)]), at / "f.onnx")
    assert "nosuch*" in refused(capsys, "build", "f.onnx", "--freeze", "nosuch*", "-o", "t.onnx")
