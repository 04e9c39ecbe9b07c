"""Products of any ranks, what resamples, and transposed convolutions on a GPU, interpreted, against onnxruntime."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import source_files
from lowered_graph import Graph, assert_close, kernels, shapes_of

from bnfuse.runtime.kernels import registry

on_cpu = source_files.load(pathlib.Path(__file__).parents[1] / "test_lower_products.py")
SIZES = ("sizes", np.array([2, 3, 9, 11], np.int64))
GRAPHS = {
    "batches": Graph("y = MatMul(a, b)", (("a", (2, 3, 5, 7)), ("b", (2, 3, 7, 4)))),
    "vector": Graph("y = MatMul(a, b)", (("a", (7,)), ("b", (2, 7, 4)))),
    "transposed": on_cpu.TRANSPOSED,
    "biased": on_cpu.BIASED,
    "channels last": on_cpu.CONVNEXT,
    "gradient of a resize": on_cpu.RESIZED_MAP,
    "resize": Graph(
        f"r = Relu(x)  u = Resize<{on_cpu.RESIZES[0][0]}>(r, , , sizes)  y = Relu(u)", (("x", (2, 3, 6, 5)),), (SIZES,)
    ),
    "resize of rank 3": on_cpu.resized_gradient((3, 5, 6), (9, 13), "cubic"),
    "transposed convolution": Graph(
        "y = ConvTranspose<strides = [2, 3], pads = [1, 0, 0, 1], output_padding = [1, 2]>(x, w, b)",
        (("x", (2, 6, 5, 4)), ("w", (6, 3, 3, 2)), ("b", (3,))),
    ),
    "in groups": Graph(
        f"y = ConvTranspose<{on_cpu.TRANSPOSED_CONVS[1][0]}>(x, w)", (("x", (2, 6, 5, 4)), ("w", (6, 2, 3, 3)))
    ),
    "depthwise": Graph(
        f"y = ConvTranspose<{on_cpu.TRANSPOSED_CONVS[2][0]}>(x, w)", (("x", (2, 6, 5, 4)), ("w", (6, 1, 3, 3)))
    ),
}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 5e-6), ("bf16", 0.02)])
@pytest.mark.parametrize("name", GRAPHS)
def test_is_what_onnxruntime_computes(name, precision, tolerance, monkeypatch):
    wanted = GRAPHS[name].by_onnxruntime()
    _, found = GRAPHS[name].on_gpu(shapes_of(wanted), monkeypatch, precision)
    assert_close(found, wanted, tolerance)


def test_maps_of_16_bits_are_resampled_as_they_lie(monkeypatch):
    graph = GRAPHS["resize"]
    made, _ = graph.on_gpu({"y": (2, 3, 9, 11)}, monkeypatch, "bf16")
    assert kernels(made.program).count("Taps") == 2
    taps = [request.arguments[0] for request in made.requests if request.kind == registry.TAPS]
    assert {kind.dtype for problem in taps for kind in (problem.x, problem.y)} == {"bfloat16"}
