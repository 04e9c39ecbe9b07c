"""Numbers from outside: one check for the command line and for Python."""

from __future__ import annotations

import numpy as np
import pytest

import bnfuse
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import MAX_REAL, check_real, check_whole
from bnfuse.runtime import SGD, AdamW
from bnfuse.training.options import Options

HUGE = "123456789012345678901"


@pytest.mark.parametrize("value", [-1, 1e39, float("inf"), float("nan"), "1", None, True, 1j])
def test_a_rate_is_a_number_that_float32_holds(value):
    with pytest.raises(BnfuseError, match=r"^lr=.* is out of range"):
        check_real("lr", value)


@pytest.mark.parametrize("value", [0, -1, 2**63, 1.0, float("nan"), "1", None, True])
def test_a_count_is_an_integer_that_int64_holds(value):
    with pytest.raises(BnfuseError, match=r"^steps=.* is out of range"):
        check_whole("steps", value, 1)


def test_what_is_in_range_passes():
    for value in (0, 0.1, MAX_REAL, np.float32(3e38), np.int8(3)):
        check_real("lr", value)
    for whole in (1, 2**63 - 1, np.int64(5)):
        check_whole("steps", whole, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lr=1e308),
        lambda: SGD(lr=0.1, momentum=1e39),
        lambda: SGD(lr=0.1, weight_decay=float("inf")),
        lambda: AdamW(lr=0.1, epsilon=1e39),
        lambda: AdamW(lr=0.1, betas=(0.9, 1.0)),
        lambda: AdamW(lr=0.1, betas=0.9),  # type: ignore[arg-type]
        lambda: Options(epochs=2**63).check(),
        lambda: Options(epochs=1, seed=2**63).check(),
        lambda: Options(epochs=1, warm_up=1e39).check(),
        lambda: bnfuse.verify("a.onnx", "b.onnx", seed=2**63),
        lambda: bnfuse.verify("a.onnx", "b.onnx", lr=1e39),
        lambda: bnfuse.bench("a.onnx", repetitions=0),
        lambda: bnfuse.search("a.onnx", "digits", seed=2**64),
    ],
)
def test_python_refuses_them_before_any_work(make):
    with pytest.raises(BnfuseError, match=r"range|must be") as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "compile a.onnx -o {0}/s.bnf --lr 1e308",
        "run a.bnf --seed " + HUGE,
        "run a.bnf --lr 1e39",
        "train a.onnx --data digits --seed " + HUGE,
        "train a.onnx --data digits --epochs " + HUGE,
        "verify a.onnx b.onnx --steps " + HUGE,
        "build densenet40 -o {0}/a.onnx --seed " + HUGE,
        "bench a.onnx --repetitions " + HUGE,
    ],
)
def test_the_command_line_refuses_the_same_in_one_line(arguments, tmp_path, capsys):
    assert main(arguments.format(tmp_path).split()) == 2
    said = capsys.readouterr()
    assert "out of range" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("call", [bnfuse.compile, lambda *a, **k: bnfuse.train(a[0], "digits", **k)])
def test_an_optimiser_of_others_is_one_line(call):
    class Adam:
        pass

    with pytest.raises(BnfuseError, match=r"Adam is none of ours: use bnfuse\.SGD") as caught:
        call("train.onnx", optimizer=Adam())
    assert "\n" not in str(caught.value)
