"""As a process: nothing but the line, whatever the streams do."""

import os
import subprocess
import sys

import onnx
import pytest
from bad_inputs import process


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
