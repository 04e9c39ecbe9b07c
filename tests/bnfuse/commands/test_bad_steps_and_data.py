"""Compiled steps and data that are none: one line that says what is the matter, status 2, no traceback."""

import zipfile

import numpy as np
import pytest
from bad_inputs import refused


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
