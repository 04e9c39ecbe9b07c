"""Options and outputs that make no sense: one line that says what is the matter, status 2, no traceback."""

import os
import subprocess

import onnx
import pytest
from bad_inputs import copy_of, refused

from bnfuse.cli import main


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


def test_stdout_is_one_of_csv_and_json(at, capsys):
    assert "give one of them" in refused(capsys, "inspect", "densenet40", "--csv", "--json")


def test_a_message_is_one_line_whatever_a_name_holds(at, capsys):
    line = refused(capsys, "inspect", "a\nb\x1b[31m\u2028\u202ec.onnx")
    assert r"a b\x1b[31m \u202ec.onnx" in line
