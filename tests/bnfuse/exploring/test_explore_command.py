"""`bnfuse explore` as a user runs it."""

import csv
import json

import pytest

from bnfuse.cli import main

SMALL = ("--batch", "2", "--image", "16")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        status = main(["explore", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


def test_a_sweep_prints_a_table_and_writes_a_picture_and_a_table(run, tmp_path):
    status, out, _ = run(
        "densenet40", "--vary", "depth=2,3", "--vary", "growth=4:8:4", *SMALL, "--plot", "p.png", "-o", "p.csv"
    )
    assert status == 0
    assert out.startswith("densenet40: 4 points, step times on h100 before and after icf")
    assert "depth=3 growth=8" in out
    assert "Pareto front: least parameters, least time" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [(row["depth"], row["growth"]) for row in rows] == [("2", "4"), ("2", "8"), ("3", "4"), ("3", "8")]


def test_counts_alone_as_json(run):
    status, out, _ = run("--preset", "bypass", "--no-estimate", "--pareto", "outputs,max:parameters", "--json")
    found = json.loads(out)
    assert status == 0
    assert [point["changes"]["bypass"] for point in found["points"]] == ["none", "simple", "complex"]
    assert found["hardware"] is None
    assert found["points"][0]["time_s"] is None
    assert found["base"]["squeeze"] == 0.125
    assert found["pareto"] == [{"quantity": "outputs", "more": False}, {"quantity": "parameters", "more": True}]


def test_one_at_a_time_on_other_hardware_with_other_assumptions(run):
    quick = ("resnet20", "--vary", "batch=1,2", "--vary", "classes=5", *("--set", "image=16"), "--one-at-a-time")
    status, out, _ = run(*quick, "--hardware", "a100", "--assume", "mac_operations=2", "--level", "bnff", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["hardware"], found["level"]) == ("a100", "bnff")
    assert [point["changes"] for point in found["points"]] == [{}, {"batch": 1}, {"batch": 2}, {"classes": 5}]


def test_binary_units(run):
    _, out, _ = run("squeezenet-plain", "--vary", "squeeze=0.125", "--no-estimate", "--units", "binary")
    assert "4.76 MiB" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a network of the zoo, or a preset"),
        (("nonet", "--vary", "batch=1"), "no network named 'nonet'"),
        (("resnet20", "--vary", "batch"), "--vary batch: write it as KEY=VALUE"),
        (("resnet20", "--vary", "batch=1:500"), "allow them with --limit 500"),
        (("resnet20", "--vary", "batch=1", "--set", "x"), "--set x: write it as KEY=VALUE"),
        (("resnet20", "--vary", "batch=1", "--assume", "x"), "--assume x: write it as KEY=VALUE"),
        (("resnet20", "--vary", "batch=1", "-o", "no/p.csv"), "no/p.csv: cannot be written"),
        (("resnet20", "--vary", "batch=1", "--accuracy", "none.csv"), "none.csv: cannot be read"),
    ],
)
def test_bad_use_is_one_line_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-estimate", "--hardware", "a100"], "about step times"),
        (["--no-estimate", "--level", "rcf"], "about step times"),
        (["--no-estimate", "--assume", "mac_operations=1"], "about step times"),
        (["--no-estimate", "--pareto", "parameters,time"], "a front of time needs step times"),
        (["--pareto", "accuracy,time"], "a front of accuracy needs accuracies"),
    ],
)
def test_what_would_not_be_known_is_not_asked_for(run, arguments, message):
    status, _, err = run("resnet20", "--vary", "batch=1,2", *arguments)
    assert status == 2
    assert message in err and err.count("\n") == 1


def test_the_points_of_a_preset_count_too(run):
    status, _, err = run("--preset", "nin-changes", "--no-estimate", "--limit", "3")
    assert status == 2
    assert "7 points, and 3 are the limit" in err


def test_accuracies_of_other_points_are_refused(run, tmp_path):
    (tmp_path / "a.csv").write_text("depth,accuracy\n7,90.5\n")
    status, _, err = run("densenet40", "--vary", "depth=2,3", "--accuracy", "a.csv")
    assert status == 2
    assert "a.csv: no line belongs to any of these points" in err and err.count("\n") == 1


def test_the_front_of_the_norms_share_is_of_the_share_that_is_shown(run):
    _, out, _ = run(
        "densenet40", "--vary", "growth=2,4,8", *SMALL, "--set", "depth=1", "--pareto", "bn-share", "--json"
    )
    points = json.loads(out)["points"]
    least = min(points, key=lambda point: point["norm_time_share"])
    assert [point for point in points if point["pareto"]] == [least]
