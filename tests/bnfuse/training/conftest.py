"""Steps of the small network of tests/helpers/small_training.py; its kernels are compiled once."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from small_training import small_data, small_graph

import bnfuse
from bnfuse.data import Dataset
from bnfuse.runtime import SGD, Step


@pytest.fixture(scope="session")
def graph() -> onnx.ModelProto:
    """Sampled statistics, virtual samples, Dropout."""
    return small_graph()


@pytest.fixture(scope="session")
def new_step(graph) -> Callable[..., Step]:
    def make(lr: float = 0.05, momentum: float = 0.9, model: onnx.ModelProto = graph) -> Step:
        return bnfuse.compile(model, optimizer=SGD(lr=lr, momentum=momentum), threads=1)

    return make


@pytest.fixture(scope="session")
def data() -> Dataset:
    return small_data()
