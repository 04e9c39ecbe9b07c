"""Files that are written: whole, in parts, and what cannot be."""

import os
from pathlib import Path

import pytest

from bnfuse.core import files
from bnfuse.core.errors import BnfuseError


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_line_that_finds_no_room_names_its_file():
    refused = pytest.raises(BnfuseError, match=r"a\.jsonl: cannot be written")
    with Path("/dev/full").open("ab", buffering=0) as stream, refused:
        files.append_line(stream, Path("a.jsonl"), {"loss": 1.0})


def test_a_line_is_whole_where_the_file_takes_it_in_parts():
    class Narrow:
        held = b""

        def write(self, data):
            self.held += bytes(data[:3])
            return min(3, len(data))

    stream = Narrow()
    files.append_line(stream, Path("a.jsonl"), {"loss": 1.0})
    assert stream.held == b'{"loss": 1.0}\n'


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BnfuseError, match="no ordinary file"):
        files.require_writable(tmp_path / "pipe")
