"""The commands as a user runs them: what they print, what they write, how they end."""

import io
import json
import os
import signal
import subprocess
import sys

import onnx
import pytest

import bnfuse
from bnfuse.cli import main
from bnfuse.core.text import Section, change, scaled

GRAPH_COMMANDS = ("models", "build", "inspect", "rewrite", "diff", "verify")
COMMANDS = (*GRAPH_COMMANDS, "compile", "run", "train", "search", "estimate", "explore", "bench", "demo")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """train.onnx, and fused.onnx with report.json beside it."""
    folder = tmp_path_factory.mktemp("files")
    network = ["densenet40", "--set", "growth=4", "--set", "depth=2", "--batch", "4", "--image", "8", "--channels", "1"]
    assert main(["build", *network, "-o", str(folder / "train.onnx")]) == 0
    report = ["--report", str(folder / "report.json")]
    assert main(["rewrite", str(folder / "train.onnx"), "-o", str(folder / "fused.onnx"), *report]) == 0
    return folder


@pytest.fixture
def run(files, monkeypatch, capsys):
    """Runs a command among the files: its status and what it printed."""
    monkeypatch.chdir(files)

    def command(*arguments):
        status = main(list(arguments))
        return status, capsys.readouterr().out

    return command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(run, command):
    status, text = run(command, "--help")
    assert status == 0
    assert f"bnfuse {command}" in text.split("Options:")[0].split("Usage:")[1].split("\n", 1)[1]


def test_help_lists_every_command_and_the_exit_status(run):
    status, text = run("--help")
    assert status == 0
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "Exit status" in text


def test_no_arguments_show_the_help(run):
    assert "Usage" in run()[1]


def test_the_version(run):
    assert run("--version") == (0, f"bnfuse {bnfuse.__version__}\n")


def test_models_lists_the_zoo_with_parameters(run):
    status, text = run("models", "--json")
    models = {entry["name"]: entry for entry in json.loads(text)["models"]}
    assert status == 0
    assert models["densenet121"]["parameters"] == 7_978_856  # as published, without its running statistics
    assert models["resnet50"]["parameters"] == 25_557_032
    assert "densenet121" in run("models")[1]


def test_build_writes_a_valid_training_graph(files):
    model = onnx.load(files / "train.onnx")
    assert model.graph.output[0].name == "loss"
    assert bnfuse.inspect(model).total["parameters"] > 0


def test_build_with_the_same_seed_writes_the_same_file(run, files):
    network = ["build", "densenet40", "--set", "growth=4", "--set", "depth=1", "--batch", "2", "--image", "8"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run(*network, "--seed", seed, "-o", f"{name}.onnx")[0] == 0
    a, b, c = ((files / f"{name}.onnx").read_bytes() for name in "abc")
    assert a == b != c


def test_rewrite_reports_what_it_did(files):
    report = json.loads((files / "report.json").read_text())
    assert report["batch_norms"] == 9
    assert report["unfused"] == []
    assert all(entry.keys() >= {"name", "changed"} for entry in report["passes"])
    assert sum(entry["changed"] for entry in report["passes"]) > 0


def test_rewrite_prints_its_report(run):
    status, text = run("rewrite", "train.onnx", "-o", "again.onnx", "--level", "bnff")
    assert status == 0
    assert text.startswith("9 BatchNorms, 0 unfused") or "Unfused" in text
    assert text.rstrip().endswith("wrote again.onnx")


def test_rewrite_to_json_prints_nothing_else(run):
    assert json.loads(run("rewrite", "train.onnx", "-o", "again.onnx", "--json")[1])["level"] == "icf"


def test_diff_as_text_as_json_and_into_a_file(run, files):
    status, text = run("diff", "train.onnx", "fused.onnx")
    assert status == 0 and text.startswith("Feature maps read and written")
    found = json.loads(run("diff", "train.onnx", "fused.onnx", "--format", "json")[1])
    assert found["feature_map_bytes"]["after"]["forward"] < found["feature_map_bytes"]["before"]["forward"]
    assert run("diff", "train.onnx", "fused.onnx", "--format", "json", "-o", "diff.json") == (0, "")
    assert json.loads((files / "diff.json").read_text()) == found


def test_diff_says_by_its_status_whether_graphs_differ_if_asked(run):
    assert run("diff", "train.onnx", "fused.onnx", "--exit-code")[0] == 1
    assert run("diff", "train.onnx", "train.onnx", "--exit-code")[0] == 0


def test_verify_says_yes_and_no_by_its_status(run, files):
    assert run("verify", "train.onnx", "fused.onnx")[0] == 0
    wrong = onnx.load(files / "fused.onnx")
    node = next(n for n in wrong.graph.node if n.op_type == "BatchNormFinalize")
    next(a for a in node.attribute if a.name == "epsilon").f = 0.5
    onnx.save(wrong, files / "wrong.onnx")
    status, text = run("verify", "train.onnx", "wrong.onnx")
    assert status == 1 and text.startswith("NOT equal")
    found = json.loads(run("verify", "train.onnx", "wrong.onnx", "--json")[1])
    assert found["equal"] is False and found["worst"]["tensor"]


def test_inspect_as_text_and_as_json(run):
    assert run("inspect", "train.onnx")[1].splitlines()[-1].split()[0] == "total"
    assert json.loads(run("inspect", "train.onnx", "--json")[1])["layers"]


def test_batch_sizes_to_compile_for_reach_the_compiler(run, monkeypatch):
    asked = []

    def compile(*_, batches, **__):
        asked.extend(batches)
        raise bnfuse.BnfuseError("enough")

    monkeypatch.setattr("bnfuse.api.compile", compile)
    run("compile", "fused.onnx", "-o", "step.bnf", "--batch", "32", "--batch", "7")
    assert asked == [32, 7]


def test_compile_then_run_from_the_file_alone(run, files):
    status, text = run("compile", "fused.onnx", "-o", "step.bnf", "--lr", "0.05")
    assert status == 0 and "kernels" in text
    status, text = run("run", "step.bnf", "--steps", "6", "--json")
    losses = json.loads(text)["losses"]
    assert status == 0 and len(losses) == 6
    assert losses[-1] < losses[0]
    assert run("run", "step.bnf", "--steps", "2", "--data", "digits", "--save", "state.safetensors")[0] == 0
    assert (files / "state.safetensors").exists()


def test_verify_in_our_runtime(run):
    status, text = run("verify", "train.onnx", "fused.onnx", "--runtime", "tvm", "--steps", "3", "--json")
    found = json.loads(text)
    assert status == 0, found
    assert found["runtime"] == "tvm" and len(found["curves"]["after"]) == 3


def test_train_prints_epochs_and_can_be_resumed(run):
    command = ("train", "fused.onnx", "--data", "digits", "--epochs", "1", "--lr", "0.02", "--json")
    first = json.loads(run(*command, "--save", "state.safetensors")[1])
    assert first["epochs"][0]["epoch"] == 1 and 0 <= first["accuracy"] <= 1
    second = json.loads(run(*command, "--resume", "state.safetensors")[1])
    assert second["epochs"][0]["loss"] < first["epochs"][0]["loss"]


def test_an_interrupt_is_one_line_and_status_130(monkeypatch, files, capsys):
    from bnfuse import api

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "inspect", interrupt)
    assert main(["inspect", str(files / "train.onnx")]) == 130
    assert capsys.readouterr().err == "bnfuse: interrupted\n"


def test_an_unforeseen_error_is_one_line_too(monkeypatch, files, capsys):
    from bnfuse import api

    def fail(*_, **__):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.delenv("BNFUSE_DEBUG", raising=False)
    monkeypatch.setattr(api, "inspect", fail)
    assert main(["inspect", str(files / "train.onnx")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "ZeroDivisionError: by zero" in line


def test_the_installed_command_is_the_same():
    done = subprocess.run([sys.executable, "-m", "bnfuse", "--version"], capture_output=True, text=True)
    assert done.stdout == f"bnfuse {bnfuse.__version__}\n"


def test_a_page_is_utf8_whatever_the_encoding_of_the_output_is(files):
    command = [sys.executable, "-m", "bnfuse", "diff", "train.onnx", "fused.onnx", "--format", "html"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=files, env=environment, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "train.onnx \u2192 fused.onnx" in done.stdout.decode("utf-8")


def test_numbers_for_people():
    assert [scaled(v, "B") for v in (0, 999, 1000, 1234567, 17.5e9)] == ["0 B", "999 B", "1 kB", "1.23 MB", "17.5 GB"]
    assert [change(*pair) for pair in ((100, 50), (3, 3), (0, 1))] == ["-50.0 %", "0 %", "new"]


def test_a_table_is_aligned_numbers_to_the_right():
    text = str(Section.table("T", ("name", "n"), [("a", 5), ("long", 1234)]))
    assert text.splitlines() == ["T", "  name     n", "  a        5", "  long  1234"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_full_bar_leaves_the_terminals_line_empty(monkeypatch):
    from bnfuse.commands.output import Progress

    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress()
    progress.bar(1, 2, "one")
    assert sys.stderr.getvalue().endswith("1/2 one")
    progress.bar(2, 2, "two")
    assert sys.stderr.getvalue().endswith("\r\x1b[K")


def test_an_error_wipes_the_bar_off_the_terminals_line(monkeypatch):
    from bnfuse.cli import fail

    monkeypatch.setattr(sys, "stderr", Terminal())
    fail("no")
    assert sys.stderr.getvalue() == "\r\x1b[Kbnfuse: no\n"


def test_compiling_tells_how_far_it_is(files, monkeypatch):
    heard = []

    class Watcher:
        def __call__(self, text):
            heard.append(text)

        def bar(self, done, total, text=""):
            heard.append((done, total))

    monkeypatch.setenv("BNFUSE_CACHE", str(files / "empty-cache"))
    bnfuse.verify(files / "train.onnx", files / "fused.onnx", runtime="tvm", progress=Watcher())
    assert any(isinstance(entry, tuple) and entry[0] == entry[1] > 0 for entry in heard)


def test_an_interrupt_that_comes_out_as_another_error_is_still_one(run, capsys, monkeypatch):
    def interrupted(*_, **__):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise bnfuse.BnfuseError("kernel conv does not compile") from None

    monkeypatch.setattr("bnfuse.api.inspect", interrupted)
    assert main(["inspect", "train.onnx"]) == 130
    assert capsys.readouterr().err == "bnfuse: interrupted\n"
