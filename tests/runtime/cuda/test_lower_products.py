"""Products of any ranks, what resamples, and transposed convolutions on a GPU, interpreted, against onnxruntime."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import source_files
from lowered_graph import Graph, assert_close, kernels, shapes_of

from bnfuse.opset import reference
from bnfuse.opset.spec import MAPS_LIKE_X, parse
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


DEPTHWISE = {
    "NormalizeReluConvTransposeBiasStatistics": ["Pointwise", "ConvGradInput", "Bias"],
    "NormalizeReluConvTransposeReluStatistics": ["Pointwise", "ConvGradInput", "Relu"],
    "ConvTransposeStatistics": ["ConvGradInput", "BatchNormStatistics"],
    "BatchNormGradNormalizeReluConvTransposeGradInputAddGradientReluGradReduce": ["Grad", "Conv", "Reduce"],
    "BatchNormGradNormalizeReluConvTransposeGradWeightBiasGrad": ["Grad", "Pointwise", "ConvGradWeight", "BiasGrad"],
}


def transposed(op: str, x: tuple[int, ...], weight: tuple[int, ...], group: int) -> tuple[Graph, dict, dict]:
    """A graph of one operator (stride 2, kernel 3), what it gives by the reference, and the shapes of that."""
    spec = parse(op)
    window = {"dilations": (1, 1), "group": group, "kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)}
    window |= {"output_padding": (1, 1)} if spec.core == "ConvTranspose" else {}
    y = (x[0], weight[1] * group, 2 * x[2], 2 * x[3])
    maps = {**dict.fromkeys((*MAPS_LIKE_X, "dx"), x), **dict.fromkeys(("y", "dy", "grad_x"), y)}
    of_y = {"bias", "dbias", "grad_a", "grad_b", "grad_p", "grad_q", "grad_w"}
    of_y |= set() if spec.is_gradient else {"mean", "variance"}
    shapes = {**maps, "weight": weight, "dweight": weight, **dict.fromkeys(of_y, y[1:2])}
    shapes = {name: shapes.get(name, x[1:2]) for name in (*spec.operands, *spec.results)}
    text = ", ".join(f"{name} = {list(value) if isinstance(value, tuple) else value}" for name, value in window.items())
    body = f"{', '.join(spec.results)} = ai.bnfuse.{op}<{text}>({', '.join(spec.operands)})"
    graph = Graph(body, tuple((name, shapes[name]) for name in spec.operands), outputs=spec.results)
    wide = {name: value.astype(np.float64) for name, value in graph.feeds().items()}
    return graph, reference.run(spec, wide, window), {name: shapes[name] for name in spec.results}


def launched(made) -> list[str]:
    """What is launched beside changes of layout."""
    return [name for name in kernels(made.program) if not name.lower().startswith(("nchw", "nhwc", "layout"))]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("op", DEPTHWISE)
def test_a_depthwise_transposed_convolution_with_steps(op, target, monkeypatch):
    """On a GPU its steps are sweeps around a depthwise kernel, on a CPU it is one kernel."""
    graph, wanted, shapes = transposed(op, (2, 6, 5, 4), (6, 1, 3, 3), 6)
    made, found = graph.on_gpu(shapes, monkeypatch) if target == "gpu" else graph.on_cpu(shapes)
    assert_close(found, wanted, 1e-5)
    names = launched(made)
    assert len(names) == (len(DEPTHWISE[op]) if target == "gpu" else 1), names
    assert target == "cpu" or all(part in name for part, name in zip(DEPTHWISE[op], names, strict=True)), names


@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("op", DEPTHWISE)
def test_a_transposed_convolution_with_steps(op, outputs, monkeypatch):
    """It is one kernel behind the one that packs its weight, also of one output channel."""
    graph, wanted, shapes = transposed(op, (2, 6, 5, 4), (6, outputs, 3, 3), 1)
    made, found = graph.on_gpu(shapes, monkeypatch)
    assert_close(found, wanted, 1e-5)
    assert len(launched(made)) == (1 if "GradWeight" in op else 2), launched(made)
