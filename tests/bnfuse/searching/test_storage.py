"""The file of a search: what a kill leaves, what is refused, what goes on."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.searching.evaluation import Evaluation, Score
from bnfuse.searching.space import Space, from_text
from bnfuse.searching.storage import open_log, read_log

SPACE = Space(("a", "b"), (1.0, 2.0))
SAME = {"model": "0123", "epochs": 3, "lambdas": None}
CHILD = Path(__file__).with_name("search_child.py")


def evaluation(iteration, text, value=1 / 3):
    return Evaluation(iteration, from_text(text), Score((value,)), 0.5)


@pytest.fixture
def path(tmp_path):
    """A file with two evaluations."""
    with open_log(tmp_path / "search.jsonl", SPACE, SAME, resume=False) as log:
        log.append(evaluation(0, "11"))
        log.append(evaluation(1, "01", 0.1 + 0.2))
    return tmp_path / "search.jsonl"


def history_of(path, fingerprint=SAME, space=SPACE):
    with open_log(path, space, fingerprint, resume=True) as log:
        return log.history


def test_what_was_stored_comes_back_to_the_last_bit(path):
    assert history_of(path) == (evaluation(0, "11"), evaluation(1, "01", 0.1 + 0.2))
    space, fingerprint, history = read_log(path)
    assert (space, fingerprint, len(history)) == (SPACE, SAME, 2)


def test_a_file_that_is_there_is_never_written_over(path):
    before = path.read_bytes()
    with pytest.raises(BnfuseError, match="--resume"):
        open_log(path, SPACE, SAME, resume=False)
    assert path.read_bytes() == before


def test_a_file_cut_off_anywhere_goes_on_from_its_last_whole_line(path):
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        with open_log(path, SPACE, SAME, resume=True) as log:
            assert len(log.history) == max(whole - 1, 0)
            assert log.dropped == (cut not in (0, *ends))
            for missing in range(len(log.history), 2):
                log.append((evaluation(0, "11"), evaluation(1, "01", 0.1 + 0.2))[missing])
        assert path.read_bytes() == content


def test_blocks_of_zeros_after_a_crash_are_dropped(path):
    content = path.read_bytes()
    for tail in (b"\0" * 100, b"\0" * 100 + b"\n"):
        path.write_bytes(content + tail)
        assert len(history_of(path)) == 2
        assert path.read_bytes() == content


def test_a_damaged_line_in_the_middle_is_named(path):
    lines = path.read_bytes().split(b"\n")
    lines[1] = b"{oops"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BnfuseError, match="line 2 is damaged"):
        history_of(path)


def test_a_line_out_of_order_is_named(path):
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[2], lines[1], b""]))
    with pytest.raises(BnfuseError, match="line 2 does not follow"):
        history_of(path)


@pytest.mark.parametrize(
    ("fingerprint", "what"),
    [
        ({**SAME, "epochs": 4}, r"epochs \(3 there, 4 here\)"),
        ({**SAME, "model": "4567", "epochs": 4}, "model .* epochs"),
        ({**SAME, "lambdas": (0.1,)}, r"lambdas \(null there, \[0.1\] here\)"),
    ],
)
def test_another_search_is_refused_and_the_difference_named(path, fingerprint, what):
    with pytest.raises(BnfuseError, match=what):
        history_of(path, fingerprint)


def test_other_batch_norms_are_refused(path):
    with pytest.raises(BnfuseError, match="other BatchNorms"):
        history_of(path, space=Space(("a", "c"), (1.0, 2.0)))


@pytest.mark.parametrize(
    "content",
    [
        b"[1, 2]\n{}\n",
        b'{"a": 1}\n',
        b'{"bnfuse_search": 99}\n',
        b'{"bnfuse_search": 1, "fingerprint": "x"}\n',
        b"notes without an end of line",
        b"\x08\x0a model \x0a and its last bytes",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(BnfuseError, match=r"no file of a search|has format 99"):
        history_of(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "changed",
    [
        {"accuracies": [float("nan")]},
        {"accuracies": "1"},
        {"accuracies": [200.0]},
        {"iteration": float("inf")},
        {"placement": ["1", "1"]},
        {"seconds": float("nan")},
        {"iteration": 1},
        {"placement": "10"},
    ],
)
def test_a_line_that_no_search_writes_is_named(path, changed):
    head, first, rest = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join([head, json.dumps({**json.loads(first), **changed}).encode(), rest]))
    with pytest.raises(BnfuseError, match=r"line 2 (is damaged|does not follow)"):
        history_of(path)


def test_a_placement_is_stored_once(path):
    lines = path.read_bytes().splitlines()
    lines.append(json.dumps({**json.loads(lines[2]), "iteration": 2}).encode())
    path.write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(BnfuseError, match="line 4 does not follow"):
        history_of(path)


def test_two_searches_do_not_write_into_one_file(path):
    with open_log(path, SPACE, SAME, resume=True), pytest.raises(BnfuseError, match="another search"):
        open_log(path, SPACE, SAME, resume=True)


def run_child(path, pause):
    return subprocess.Popen([sys.executable, str(CHILD), str(path), str(pause)], stdout=subprocess.PIPE, text=True)


def placements_in(path):
    return [(line["placement"], line["accuracies"]) for line in map(json.loads, path.read_text().splitlines()[1:])]


def test_a_search_killed_again_and_again_finds_what_the_unbroken_one_finds(tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert run_child(whole, 0).wait(timeout=120) == 0
    luck, kills = random.Random(0), 0
    while kills < 4:
        child = run_child(broken, 0.15)
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        time.sleep(luck.uniform(0, 0.5))
        child.kill()
        kills += child.wait(timeout=60) != 0
        child.stdout.close()
    assert 0 < len(broken.read_bytes()) < len(whole.read_bytes())
    assert run_child(broken, 0).wait(timeout=120) == 0
    assert placements_in(broken) == placements_in(whole)
    assert len(placements_in(whole)) == 12
