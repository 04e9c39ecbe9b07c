"""A small training graph, and a folder to work in."""

import onnx
import pytest
from bad_inputs import SMALL

from bnfuse.build.named import build_model


@pytest.fixture(scope="module")
def train() -> onnx.ModelProto:
    return build_model("densenet40", zoo=SMALL).model


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Runs where the files are."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
