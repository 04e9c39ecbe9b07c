"""What a user can get wrong: each gives one line that says what is the matter, exit status 2, and no traceback."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bnfuse.build.named import build_model
from bnfuse.cli import main
from bnfuse.models import build_forward

SMALL = {"batch": 2, "image": 8, "growth": 4, "depth": 2}


@pytest.fixture(scope="module")
def train() -> onnx.ModelProto:
    return build_model("densenet40", zoo=SMALL).model


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Runs where the files are."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that ends with status 2."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("[")]  # progress lines begin with [
    assert status == 2, (status, captured)
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("bnfuse: ")
    assert "Traceback" not in captured.err and "internal error" not in captured.err
    return lines[0]


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


# Files that are not what they should be


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
    node.op_type = "Sinh"
    onnx.save(model, at / "t.onnx")
    line = refused(capsys, "compile", "t.onnx", "-o", "s.bnf")
    assert node.name in line and "Sinh" in line


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


# Forward models that cannot be built


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
    sinh = helper.make_node("Sinh", ["c0"], ["c"], name="sinh_7")
    onnx.save(forward(conv, sinh, POOL, FLAT, initializers=[floats("w", 10, 3, 3, 3)]), at / "f.onnx")
    line = refused(capsys, "build", "f.onnx", "-o", "t.onnx")
    assert "sinh_7" in line and "Sinh" in line


def test_a_model_without_parameters(at, capsys):
    pool = helper.make_node("GlobalAveragePool", ["x"], ["p"], name="pool")
    onnx.save(forward(pool, FLAT, y=(2, 3)), at / "f.onnx")
    assert "f.onnx" in refused(capsys, "build", "f.onnx", "-o", "t.onnx")


def test_a_glob_that_matches_nothing(at, capsys):
    onnx.save(forward(CONV, POOL, FLAT, initializers=[floats("w", 10, 3, 3, 3)]), at / "f.onnx")
    assert "nosuch*" in refused(capsys, "build", "f.onnx", "--freeze", "nosuch*", "-o", "t.onnx")


# Options and outputs


def test_an_unknown_level(at, capsys, train):
    onnx.save(train, at / "t.onnx")
    line = refused(capsys, "rewrite", "t.onnx", "-o", "f.onnx", "--level", "max")
    assert "icf" in line


def test_an_output_that_cannot_be_written(at, capsys, train):
    onnx.save(train, at / "t.onnx")
    assert "nowhere" in refused(capsys, "rewrite", "t.onnx", "-o", "nowhere/f.onnx")
    assert "nowhere" in refused(capsys, "diff", "t.onnx", "t.onnx", "-o", "nowhere/d.json")
    assert "nowhere" in refused(capsys, "rewrite", "t.onnx", "-o", "f.onnx", "--report", "nowhere/r.html")
    assert not (at / "f.onnx").exists()  # told before the work


@pytest.mark.parametrize("where", ["nowhere/state", "folder"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(at, capsys, train, where):
    onnx.save(train, at / "t.onnx")
    (at / "folder").mkdir()
    for arguments in (
        *([("train", "t.onnx", "--data", "digits", "--save", where)] if where != "folder" else []),  # that is a place
        *(("train", "t.onnx", "--data", "digits", to, where) for to in ("--export", "--metrics")),
        ("run", "t.onnx", "--save", where),
        ("compile", "t.onnx", "-o", where),
    ):
        status = main(list(arguments))
        assert (status, capsys.readouterr().err.startswith(f"bnfuse: {where}: cannot be written")) == (2, True)


@pytest.mark.parametrize("results", [("--export", "t.onnx"), ("--metrics", "m", "--export", "./m")])
def test_a_training_writes_over_neither_its_model_nor_its_own_results(at, capsys, train, results):
    onnx.save(train, at / "t.onnx")
    before = (at / "t.onnx").read_bytes()
    assert "is named twice" in refused(capsys, "train", "t.onnx", "--data", "digits", *results)
    assert (at / "t.onnx").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("rewrite", "t.onnx", "-o", "f.onnx", "--report", "./t.onnx"), id="the report over the graph"),
        pytest.param(("rewrite", "t.onnx", "-o", "f.html", "--report", "f.html"), id="the report over the result"),
        pytest.param(("diff", "t.onnx", "f.onnx", "--format", "html", "-o", "t.onnx"), id="the page over a graph"),
        pytest.param(("diff", "t.onnx", "f.onnx", "-o", "f.onnx"), id="the difference over the other graph"),
    ],
)
def test_a_report_is_written_over_no_graph(at, capsys, train, arguments):
    for name in ("t.onnx", "f.onnx"):
        onnx.save(train, at / name)
    before = (at / "t.onnx").read_bytes()
    assert "is named twice" in refused(capsys, *arguments)
    assert (at / "t.onnx").read_bytes() == (at / "f.onnx").read_bytes() == before
    assert not (at / "f.html").exists()


def test_what_is_no_file_stays_what_it_is(at, train):
    """A pipe, or /dev/null, is written to and not replaced."""
    onnx.save(train, at / "t.onnx")
    pipe = at / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert main(["rewrite", "t.onnx", "-o", "pipe"]) == 0
        assert onnx.load_from_string(reader.communicate(timeout=60)[0]).graph.node
    assert pipe.is_fifo()


def test_missing_values_are_told_before_kernels_are_compiled(at, capsys, train, monkeypatch):
    model = copy_of(train)
    inputs = {value.name for value in model.graph.input}
    kept = [t for t in model.graph.initializer if t.name not in inputs]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, at / "t.onnx")
    monkeypatch.setattr("bnfuse.runtime.compile_step", lambda *_, **__: pytest.fail("compiled"))
    assert "--checkpoint" in refused(capsys, "compile", "t.onnx", "-o", "s.bnf")


def test_an_output_that_is_a_folder(at, capsys, train):
    onnx.save(train, at / "t.onnx")
    (at / "f.onnx").mkdir()
    assert "f.onnx" in refused(capsys, "rewrite", "t.onnx", "-o", "f.onnx")


def test_a_missing_argument_and_an_unknown_command(capsys):
    assert "--help" in refused(capsys, "rewrite")
    assert "fuse" in refused(capsys, "fuse")


def test_parameters_without_decay_that_the_network_has_not(at, capsys, train):
    onnx.save(train, at / "t.onnx")
    line = refused(capsys, "compile", "t.onnx", "-o", "s.bnf", "--no-decay", "*.bias")
    assert line.startswith("bnfuse: t.onnx: no_decay: no parameter is named like '*.bias' (there are stem/conv")


def test_a_target_that_no_one_has(at, capsys, train):
    onnx.save(train, at / "t.onnx")
    assert "cpu" in refused(capsys, "compile", "t.onnx", "-o", "s.bnf", "--target", "tpu")


# Compiled steps and data


def test_a_step_that_is_no_step(at, capsys):
    (at / "s.bnf").write_bytes(b"PK\x03\x04 not really a zip")
    assert "s.bnf" in refused(capsys, "run", "s.bnf")


def test_a_step_without_its_parts(at, capsys):
    with zipfile.ZipFile(at / "s.bnf", "w") as archive:
        archive.writestr("manifest.json", "{}")
    assert "s.bnf" in refused(capsys, "run", "s.bnf")


def test_data_that_is_not_there(at, capsys):
    from bnfuse.core.errors import BnfuseError
    from bnfuse.data import load_data

    with pytest.raises(BnfuseError, match="is no data"):
        load_data("imagenet")


def test_an_npz_without_images_or_with_wrong_labels(at, capsys):
    from bnfuse.core.errors import BnfuseError
    from bnfuse.data import load_data

    np.savez(at / "empty.npz", z=np.zeros(3))
    with pytest.raises(BnfuseError, match="no array 'x'"):
        load_data(at / "empty.npz")
    np.savez(at / "wrong.npz", x=np.zeros((4, 8, 8), np.float32), y=np.zeros(4, np.float32))
    with pytest.raises(BnfuseError, match="must be integers"):
        load_data(at / "wrong.npz")


def test_a_demo_folder_that_cannot_be_made(at, capsys):
    (at / "taken").write_text("")
    assert "taken: cannot be made" in refused(capsys, "demo", "--folder", "taken")


# As a process: nothing but the line, whatever the streams do


def process(*arguments: str, cwd: Path, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bnfuse", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **options)


def test_a_process_ends_with_status_two_and_one_line(at):
    done = process("inspect", "none.onnx", cwd=at)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_is_no_error(at, train):
    onnx.save(train, at / "t.onnx")
    command = f"{sys.executable} -m bnfuse inspect t.onnx | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=at, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "t.onnx"
    assert done.stderr == ""


def test_a_closed_output_is_no_traceback(at):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "bnfuse", "models", "--json"], cwd=at, stdout=write, stderr=subprocess.PIPE, timeout=300
    )
    os.close(write)
    assert done.stderr == b""


def test_a_command_that_is_cut_short_by_its_reader_is_not_done(at, train):
    onnx.save(train, at / "t.onnx")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "bnfuse", "rewrite", "t.onnx", "-o", "f.onnx"]
    done = subprocess.run(command, cwd=at, stdout=write, stderr=write, timeout=300)
    os.close(write)
    assert done.returncode == 141


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_process_without_streams_does_its_work(at, train, closed):
    onnx.save(train, at / "t.onnx")
    command = f"{sys.executable} -m bnfuse rewrite t.onnx -o f.onnx {closed}"
    assert subprocess.run(["bash", "-c", command], cwd=at, stderr=subprocess.DEVNULL, timeout=300).returncode == 0
    onnx.checker.check_model(at / "f.onnx")


def test_stdout_is_one_of_csv_and_json(at, capsys):
    assert "give one of them" in refused(capsys, "inspect", "densenet40", "--csv", "--json")


def test_a_message_is_one_line_whatever_a_name_holds(at, capsys):
    line = refused(capsys, "inspect", "a\nb\x1b[31m\u2028\u202ec.onnx")
    assert r"a b\x1b[31m \u202ec.onnx" in line
