"""Models in and out: what is kept, and one line for what is damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnfuse.analysis.executed import require_fixed_shapes
from bnfuse.build import build_training_graph
from bnfuse.core import files
from bnfuse.core.errors import BnfuseError
from bnfuse.graph import io
from bnfuse.graph.signature import METADATA_KEY, signature_of
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward, build_graph


@pytest.fixture(scope="module")
def training() -> onnx.ModelProto:
    return build_training_graph(build_forward("densenet40", batch=2, depth=1, image=8))


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def message_of(path: Path, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        io.load(path, **options)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


def written(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "train.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_what_is_saved_is_what_was_loaded(training, tmp_path):
    training = copy_of(training)
    training.metadata_props.add(key="mine", value="kept")
    training.graph.node[3].metadata_props.add(key="bnfuse.sources", value="[]")
    body = [helper.make_node("Relu", ["a"], ["b"])]
    training.functions.append(helper.make_function("mine", "Act", ["a"], ["b"], body, [helper.make_opsetid("", 17)]))
    training.opset_import.append(helper.make_opsetid("mine", 1))
    path = tmp_path / "out.onnx"
    io.save(io.load(training), path)
    again = onnx.load(path)
    assert {e.key: e.value for e in again.metadata_props} == {e.key: e.value for e in training.metadata_props}
    assert again.graph.node[3].metadata_props[0].key == "bnfuse.sources"
    assert [f.name for f in again.functions if f.domain == "mine"] == ["Act"]
    assert {(o.domain, o.version) for o in again.opset_import} == {(o.domain, o.version) for o in training.opset_import}
    assert again.ir_version == training.ir_version
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in training.graph.node]
    assert {v.name for v in again.graph.value_info} >= {v.name for v in training.graph.value_info}
    before = {t.name: numpy_helper.to_array(t) for t in training.graph.initializer}
    after = {t.name: numpy_helper.to_array(t) for t in again.graph.initializer}
    assert before.keys() == after.keys() and all(np.array_equal(before[k], after[k]) for k in before)


def test_every_form_of_a_model_loads(training, tmp_path):
    path = written(training, tmp_path)
    model = io.load(path)
    assert io.file_of(model) == str(path)
    assert io.load(model) is model
    for source in (str(path), training, gs.import_onnx(training)):
        assert len(io.load(source).graph) == len(training.graph.node)
    assert len(io.load(build_graph("resnet20", seed=0)).graph) == 73
    with pytest.raises(BnfuseError, match="cannot load a int: give a path"):
        io.load(3)


def test_saving_replaces_the_file_or_leaves_it(training, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(BnfuseError, match="cannot be written"):
        files.write_atomically(tmp_path / "no" / "model.onnx", b"new")
    io.save(training, path)
    assert onnx.load(path).graph.name == training.graph.name
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~files._umask()


def test_no_file(tmp_path):
    assert message_of(tmp_path / "none.onnx") == "cannot be read: No such file or directory"
    assert message_of(tmp_path) == "cannot be read: it is a folder. Name a file in it."


@pytest.mark.parametrize("content", [b"", b"hello, I am text", b"\x08\x08\xff\xff", b"PK\x03\x04zip"])
def test_not_onnx(tmp_path, content):
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    assert message_of(path).startswith("is not an ONNX model")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.999])
def test_truncated(training, tmp_path, share):
    path = tmp_path / "x.onnx"
    data = training.SerializeToString()
    path.write_bytes(data[: int(len(data) * share)])
    assert message_of(path)


def test_tensor_that_holds_less_than_it_says(training, tmp_path):
    model = copy_of(training)
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    name = model.graph.initializer[0].name
    assert message_of(written(model, tmp_path)).startswith(f"tensor '{name}' holds ")


@pytest.mark.parametrize("held", [0, 1, 3, 5])
@pytest.mark.parametrize("where", ["initializer", "attribute"])
@pytest.mark.parametrize(
    ("kind", "field", "needed"),
    [
        (TensorProto.FLOAT, "float_data", 4),
        (TensorProto.INT64, "int64_data", 4),
        (TensorProto.DOUBLE, "double_data", 4),
        (TensorProto.BOOL, "int32_data", 4),
        (TensorProto.FLOAT16, "int32_data", 4),
        (TensorProto.UINT32, "uint64_data", 4),
        (TensorProto.COMPLEX64, "float_data", 8),
        (TensorProto.INT4, "int32_data", 2),
    ],
)
def test_tensor_whose_values_do_not_fill_its_shape(training, tmp_path, kind, field, needed, where, held):
    model = copy_of(training)
    if where == "initializer":
        tensor = model.graph.initializer.add()
    else:
        node = model.graph.node.add(op_type="Constant", output=["some"])
        attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
        tensor = attribute.t
    tensor.name, tensor.data_type = "some", kind
    tensor.dims.extend([2, 2])
    getattr(tensor, field).extend([1] * held)
    assert f"tensor 'some' holds {held} values where its shape needs {needed}" in message_of(written(model, tmp_path))
    if where == "initializer":
        getattr(tensor, field).extend([1] * (needed - held))
        if held <= needed:
            io.load(written(model, tmp_path))


@pytest.mark.parametrize("dims", [[1 << 40], [1 << 20, 1 << 20], [-3, 4], [1 << 62, 1 << 62, 0]])
def test_absurd_dimensions(training, tmp_path, dims):
    model = copy_of(training)
    tensor = model.graph.initializer.add(name="big", data_type=TensorProto.FLOAT, dims=dims)
    assert "tensor 'big' claims the shape" in message_of(written(model, tmp_path))
    model.graph.initializer.remove(tensor)
    model.graph.value_info.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, dims))
    assert "tensor 'wide' claims the shape" in message_of(written(model, tmp_path))


def external(training: onnx.ModelProto, location: str, **more: str) -> onnx.ModelProto:
    model = copy_of(training)
    tensor = next(t for t in model.graph.initializer if t.name == "stem/conv/weight")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=value)
    return model


WEIGHT_BYTES = 16 * 3 * 9 * 4


def test_external_data_beside_the_model_is_read(training, tmp_path):
    values = np.arange(WEIGHT_BYTES // 4, dtype=np.float32)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0" * 8 + values.tobytes() + b"more")
    model = io.load(written(external(training, "data/w.bin", offset="8", length=str(WEIGHT_BYTES)), tmp_path))
    found = model.graph.initializers["stem/conv/weight"].const_value.numpy()
    assert np.array_equal(found.ravel(), values)
    io.save(model, tmp_path / "out.onnx")
    assert np.array_equal(
        io.load(tmp_path / "out.onnx").graph.initializers["stem/conv/weight"].const_value.numpy(), found
    )


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret", "link"])
def test_external_data_outside_the_folder_is_refused(training, tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"\0" * WEIGHT_BYTES)
    (folder / "link").symlink_to(tmp_path / "secret")
    text = message_of(written(external(training, location), folder))
    assert text == (
        f"tensor 'stem/conv/weight' has its data in '{location}', outside the model's folder: move it there"
    )


def test_external_data_that_is_missing_short_or_damaged(training, tmp_path):
    assert "which is not there" in message_of(written(external(training, "w.bin"), tmp_path))
    assert "without a location" in message_of(written(external(training, ""), tmp_path))
    (tmp_path / "w.bin").write_bytes(b"\0" * (WEIGHT_BYTES - 1))
    assert "is cut short" in message_of(written(external(training, "w.bin"), tmp_path))
    assert "is cut short" in message_of(written(external(training, "w.bin", offset="-9"), tmp_path))
    assert "damaged external data" in message_of(written(external(training, "w.bin", offset="x"), tmp_path))


def test_unknown_domain(training, tmp_path):
    model = copy_of(training)
    model.graph.node[2].domain, model.graph.node[2].op_type = "my.ops", "Mine"
    model.opset_import.append(helper.make_opsetid("my.ops", 1))
    name, op = model.graph.node[2].name, model.graph.node[2].op_type
    text = message_of(written(model, tmp_path))
    assert text.startswith(f"node '{name}' (my.ops::{op}) is of an unknown domain. Known: ai.onnx, ai.bnfuse, ")


def test_a_forward_graph_is_no_training_graph(training, tmp_path):
    open_graph(written(training, tmp_path)).state()
    forward = tmp_path / "forward.onnx"
    onnx.save(build_forward("resnet20", batch=1), forward)
    with pytest.raises(BnfuseError, match=f"^{forward}: is not a training graph: no output is the gradient"):
        open_graph(forward)


def test_what_is_counted_or_run_has_shapes_and_values(training, tmp_path):
    model = copy_of(training)
    gone = next(v for v in model.graph.value_info if v.name == "stem/conv")
    model.graph.value_info.remove(gone)
    with pytest.raises(BnfuseError, match=r"node 'stem/conv' \(Conv\) has 'stem/conv' of no fixed shape"):
        require_fixed_shapes(open_graph(model))
    model = copy_of(training)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    with pytest.raises(BnfuseError, match=r"input 'data' has no fixed shape .* Build it with --batch"):
        require_fixed_shapes(open_graph(model))
    model = copy_of(training)
    del model.graph.initializer[-1]
    with pytest.raises(BnfuseError, match=r"has no initial value\. Pass --checkpoint"):
        open_graph(model).state()


def test_a_core_import_pulls_no_torch():
    code = """
import sys, bnfuse.graph.io, bnfuse.data
from bnfuse.build import build
from bnfuse.models import build_forward
build(build_forward("densenet40", batch=2, depth=1, image=8))
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "sklearn")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# GraphSignature


def foreign(training: onnx.ModelProto) -> ir.Model:
    model = io.load(training)
    del model.metadata_props[METADATA_KEY]
    return model


def test_roles_of_a_foreign_file_are_inferred(training):
    assert signature_of(foreign(training)) == signature_of(io.load(training))


def test_frozen_parameters_of_a_foreign_file_are_told_from_data():
    source = build_forward("resnet20", batch=2, image=8)
    model = build_training_graph(source, freeze=["stem/*"])
    assert signature_of(foreign(model)) == signature_of(io.load(model))


def test_roles_can_be_given(training):
    model = copy_of(training)
    for value in model.graph.input:
        if value.name == "data":
            value.name = "picture"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "data":
                node.input[index] = "picture"
    del model.metadata_props[:]
    loaded = io.load(model, data_input="picture", labels_input="labels")
    assert signature_of(loaded).data == ("picture",)
    with pytest.raises(BnfuseError, match="has no input 'image': there are picture, labels, "):
        io.load(model, data_input="image")


def test_damaged_roles(training):
    for text in ("{", "[]", '{"data": 3}', '{"data": ["data"]}', "null", '{"what": 1}'):
        model = io.load(training)
        model.metadata_props[METADATA_KEY] = text
        with pytest.raises(BnfuseError, match=r"its bnfuse.roles metadata is damaged .*: build it anew") as caught:
            signature_of(model)
        assert "\n" not in str(caught.value)


def test_roles_that_do_not_match_the_graph(training):
    model = io.load(training)
    text = model.metadata_props[METADATA_KEY]
    model.metadata_props[METADATA_KEY] = text.replace('"labels"]', '"nobody"]')
    with pytest.raises(BnfuseError, match="has no input 'nobody', which its roles name"):
        signature_of(model)
    model.metadata_props[METADATA_KEY] = text.replace('"loss": "loss"', '"loss": "gain"')
    with pytest.raises(BnfuseError, match="has no output 'gain', which its roles name"):
        signature_of(model)
    model.metadata_props[METADATA_KEY] = text.replace('"data": ["data"]', '"data": []')
    with pytest.raises(BnfuseError, match="input 'data' must have exactly one role"):
        signature_of(model)


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.FLOAT, TensorProto.UINT8])
def test_labels_of_a_type_that_the_loss_does_not_take(training, kind):
    model = copy_of(training)
    next(v for v in model.graph.input if v.name == "labels").type.tensor_type.elem_type = kind
    name = TensorProto.DataType.Name(kind)
    with pytest.raises(BnfuseError, match=f"labels input 'labels' is {name}: it must be int64"):
        signature_of(io.load(model))


def test_labels_of_a_squared_error_are_float32():
    model = build_training_graph(build_forward("densenet40", batch=2, depth=1, image=8), loss="mse")
    assert signature_of(io.load(model)).labels == ("labels",)


def test_what_an_unknown_input_is_for(training):
    model = copy_of(training)
    del model.metadata_props[:]
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, [1]))
    with pytest.raises(BnfuseError, match="what input 'flag' is for cannot be told"):
        signature_of(io.load(model))


def test_names_that_are_no_text(training, tmp_path):
    path = tmp_path / "x.onnx"
    for wrong in (b"stem\xffconv", b"stem\nconv"):
        path.write_bytes(training.SerializeToString().replace(b"stem/conv", wrong))
        assert message_of(path) == "is damaged: it has a name that is no text"


def test_files_with_a_wrong_byte_load_or_say_why(training, tmp_path):
    data, path, rng = training.SerializeToString(), tmp_path / "x.onnx", np.random.default_rng(0)
    failed = 0
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            open_graph(path).state()
        except BnfuseError as error:
            failed += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    assert failed
