"""Files that are not what they should be: one line that says what is the matter, status 2, no traceback."""

import json

import numpy as np
import onnx
import pytest
from bad_inputs import SMALL, copy_of, process, refused
from onnx import TensorProto, helper

from bnfuse.build.named import build_model
from bnfuse.models import build_forward


def test_a_file_that_is_not_there(at, capsys):
    assert "none.onnx" in refused(capsys, "inspect", "none.onnx")


def test_a_folder_in_place_of_a_file(at, capsys):
    (at / "folder.onnx").mkdir()
    assert "folder.onnx: cannot be read: it is a folder. Name a file in it." in refused(
        capsys, "rewrite", "folder.onnx", "-o", "out.onnx"
    )


def test_an_empty_file(at, capsys):
    (at / "empty.onnx").write_bytes(b"")
    assert "not an ONNX model: it is empty" in refused(capsys, "inspect", "empty.onnx")


def test_a_file_that_is_no_onnx(at, capsys):
    (at / "text.onnx").write_text("hello, this is no protobuf at all\n" * 10)
    assert "text.onnx: is not an ONNX model" in refused(capsys, "diff", "text.onnx", "text.onnx")


def test_an_archive_in_place_of_a_graph(at, capsys):
    np.savez(at / "arrays.npz", x=np.zeros(3))
    assert "it is an archive, as .npz and .bnf files are. Name an .onnx file" in refused(
        capsys, "inspect", "arrays.npz"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "t.onnx", "-o", "./t.onnx"),
        ("compile", "t.onnx", "-o", "t.onnx"),
        ("run", "t.onnx", "--save", "t.onnx"),
        ("bench", "t.onnx", "--plot", "t.onnx"),
        ("search", "t.onnx", "--data", "digits", "--plot", "t.onnx"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_result_is_not_written_over_what_it_is_made_of(at, capsys, arguments):
    (at / "t.onnx").write_bytes(b"a graph")
    assert "t.onnx: is named twice" in refused(capsys, *arguments)
    assert (at / "t.onnx").read_bytes() == b"a graph"


@pytest.mark.parametrize("command", ["build", "rewrite", "diff"])
def test_a_place_that_cannot_be_written_is_told_before_the_graph_is_read(at, capsys, command):
    (at / "t.onnx").write_bytes(b"no graph")
    graphs = ("t.onnx", "t.onnx") if command == "diff" else ("t.onnx",)
    assert "nowhere/o: cannot be written: No such file" in refused(capsys, command, *graphs, "-o", "nowhere/o")


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["estimate"], ["estimate", "--level", "none,icf"], ["estimate", "--hardware", "3r1g"]],
    ids=" ".join,
)
@pytest.mark.parametrize("change", ["no shapes", "a symbol within", "a symbol"])
def test_a_training_graph_without_fixed_shapes(at, capsys, train, command, change):
    """Nothing is counted as if it were one element."""
    model = copy_of(train)
    if change == "no shapes":
        del model.graph.value_info[:]
    images = [v for v in (*model.graph.value_info, *model.graph.input) if len(v.type.tensor_type.shape.dim) == 4]
    for value in images if change == "a symbol" else images[:1]:
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(model, at / "open.onnx")
    line = refused(capsys, command[0], "open.onnx", *command[1:])
    assert line.startswith("bnfuse: open.onnx: ") and "no fixed shape" in line and "--batch" in line


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.99])
def test_a_file_that_is_cut_short(at, capsys, train, share):
    data = train.SerializeToString()
    (at / "cut.onnx").write_bytes(data[: int(share * len(data))])
    assert "cut.onnx" in refused(capsys, "verify", "cut.onnx", "cut.onnx")


def test_a_forward_graph_in_place_of_a_training_graph(at, capsys):
    onnx.save(build_forward("densenet40", **SMALL), at / "forward.onnx")
    for command in (["inspect"], ["rewrite", "-o", "f.onnx"], ["compile", "-o", "s.bnf"]):
        assert "bnfuse build" in refused(capsys, command[0], "forward.onnx", *command[1:])


def test_roles_that_name_what_is_not_there(at, capsys, train):
    model = copy_of(train)
    signature = next(p for p in model.metadata_props if p.key == "bnfuse.roles")
    signature.value = json.dumps({**json.loads(signature.value), "loss": "nowhere"})
    onnx.save(model, at / "t.onnx")
    assert "nowhere" in refused(capsys, "inspect", "t.onnx")


def test_roles_that_are_no_roles(at, capsys, train):
    model = copy_of(train)
    next(p for p in model.metadata_props if p.key == "bnfuse.roles").value = "[1, 2"
    onnx.save(model, at / "t.onnx")
    assert "bnfuse.roles" in refused(capsys, "rewrite", "t.onnx", "-o", "f.onnx")


def test_dimensions_that_no_machine_holds(at, capsys, train):
    model = copy_of(train)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 1 << 40
    onnx.save(model, at / "huge.onnx")
    assert "huge.onnx" in refused(capsys, "inspect", "huge.onnx")


def test_a_tensor_that_holds_less_than_it_claims(at, capsys, train):
    model = copy_of(train)
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4)
    tensor.raw_data = tensor.raw_data[:-8]
    onnx.save(model, at / "short.onnx")
    assert tensor.name in refused(capsys, "verify", "short.onnx", "short.onnx")


def external(train: onnx.ModelProto, location: str) -> onnx.ModelProto:
    model = copy_of(train)
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return model


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd"])
def test_external_data_outside_the_models_folder(at, capsys, train, location):
    (at / "models").mkdir()
    (at / "secret.bin").write_bytes(b"\0" * 100_000)
    onnx.save(external(train, location), at / "models" / "t.onnx")
    assert "outside the model's folder" in refused(capsys, "inspect", "models/t.onnx")


def test_external_data_behind_a_link_out_of_the_folder(at, capsys, train):
    (at / "models").mkdir()
    (at / "secret.bin").write_bytes(b"\0" * 100_000)
    (at / "models" / "link.bin").symlink_to(at / "secret.bin")
    onnx.save(external(train, "link.bin"), at / "models" / "t.onnx")
    assert "outside the model's folder" in refused(capsys, "inspect", "models/t.onnx")


def test_external_data_that_is_not_there(at, capsys, train):
    onnx.save(external(train, "gone.bin"), at / "t.onnx")
    assert "gone.bin" in refused(capsys, "inspect", "t.onnx")


def test_an_operator_of_an_unknown_domain(at, capsys, train):
    model = copy_of(train)
    node = next(n for n in model.graph.node if n.op_type == "Relu")
    node.domain, node.op_type = "org.example", "Wobble"
    onnx.save(model, at / "t.onnx")
    line = refused(capsys, "rewrite", "t.onnx", "-o", "f.onnx")
    assert node.name in line and "Wobble" in line


def test_an_operator_that_the_runtime_does_not_have(at, capsys, train):
    model = copy_of(train)
    node = next(n for n in model.graph.node if n.op_type == "Relu")
    node.op_type = "NonZero"
    onnx.save(model, at / "t.onnx")
    line = refused(capsys, "compile", "t.onnx", "-o", "s.bnf")
    assert node.name in line and "NonZero" in line


def test_an_operator_of_our_domain_that_the_set_does_not_have(at, capsys, train):
    model = copy_of(train)
    node = next(n for n in model.graph.node if n.op_type == "Relu")
    node.domain, node.op_type = "ai.bnfuse", "NormalizeWobble"
    onnx.save(model, at / "t.onnx")
    assert "NormalizeWobble" in refused(capsys, "compile", "t.onnx", "-o", "s.bnf")


def test_nodes_out_of_order_or_missing(at, capsys, train):
    model = copy_of(train)
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, at / "t.onnx")
    assert "out of order" in refused(capsys, "rewrite", "t.onnx", "-o", "f.onnx")
    model = copy_of(train)
    model.graph.node[5].input[0] = "nowhere"
    onnx.save(model, at / "t.onnx")
    line = refused(capsys, "verify", "t.onnx", "t.onnx")
    assert model.graph.node[5].name in line and "nowhere" in line


def test_a_value_that_two_nodes_write(at, capsys, train):
    model = copy_of(train)
    model.graph.node.append(model.graph.node[0])
    onnx.save(model, at / "t.onnx")
    assert f"writes '{model.graph.node[0].output[0]}'" in refused(capsys, "inspect", "t.onnx")


def test_an_output_that_nothing_writes(at, capsys, train):
    model = copy_of(train)
    model.graph.output[0].name = "nowhere"
    onnx.save(model, at / "t.onnx")
    assert "output 'nowhere'" in refused(capsys, "inspect", "t.onnx")


@pytest.mark.parametrize(("attribute", "value"), [("strides", [0, 0]), ("pads", [-5, -5, -5, -5]), ("group", 0)])
def test_a_window_that_makes_no_sense(at, train, attribute, value):
    model = copy_of(train)
    node = next(n for n in model.graph.node if n.op_type == "Conv")
    kept = [attr for attr in node.attribute if attr.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    (at / "t.onnx").write_bytes(model.SerializeToString())
    done = process("verify", "t.onnx", "t.onnx", cwd=at)  # onnxruntime divides by a stride of 0: a process of its own
    assert done.returncode == 2, done
    assert f"node '{node.name}' (Conv) has {attribute}=" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "sources", ["no json", '{"a": 1}', "[1]", '"a"', "null", "[" * 100_000], ids=lambda text: text[:9]
)
def test_metadata_that_a_pass_did_not_write(at, capsys, train, sources):
    model = copy_of(train)
    model.graph.node[3].metadata_props.add(key="bnfuse.sources", value=sources)
    onnx.save(model, at / "t.onnx")
    for command in (("diff", "t.onnx", "t.onnx", "--format", "html"), ("rewrite", "t.onnx", "-o", "f.onnx")):
        line = refused(capsys, *command)
        assert "t.onnx" in line and model.graph.node[3].name in line and "bnfuse.sources" in line


def test_an_initial_value_of_another_shape_than_its_input(at, capsys, train):
    model = copy_of(train)
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4 and t.dims[0] != t.dims[1])
    tensor.dims[0], tensor.dims[1] = tensor.dims[1], tensor.dims[0]
    onnx.save(model, at / "t.onnx")
    assert f"input '{tensor.name}' is" in refused(capsys, "verify", "t.onnx", "t.onnx")


def test_a_training_graph_without_shapes(at, capsys, train):
    model = copy_of(train)
    for value in (*model.graph.input[:1], *model.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, at / "t.onnx")
    assert "shape" in refused(capsys, "compile", "t.onnx", "-o", "s.bnf")


def test_a_training_graph_with_a_dynamic_batch(at, capsys, train):
    model = copy_of(train)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(model, at / "t.onnx")
    assert "--batch" in refused(capsys, "verify", "t.onnx", "t.onnx")


def test_parameters_without_values(at, capsys, train):
    model = copy_of(train)
    inputs = {value.name for value in model.graph.input}
    kept = [t for t in model.graph.initializer if t.name not in inputs]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, at / "t.onnx")
    assert "--checkpoint" in refused(capsys, "verify", "t.onnx", "t.onnx")


def test_a_checkpoint_that_is_none(at, capsys, train):
    onnx.save(train, at / "t.onnx")
    (at / "ckpt").write_bytes(b"no checkpoint")
    assert "ckpt" in refused(capsys, "inspect", "t.onnx", "--checkpoint", "ckpt")


def test_two_networks_that_are_not_the_same(at, capsys, train):
    onnx.save(train, at / "a.onnx")
    onnx.save(build_model("densenet40", zoo={**SMALL, "batch": 3}).model, at / "b.onnx")
    assert "another network" in refused(capsys, "verify", "a.onnx", "b.onnx")
