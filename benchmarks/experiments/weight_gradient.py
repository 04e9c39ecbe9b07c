"""How long onnxruntime takes for a convolution's weight gradient in standard operators (docs/decisions.md, D58).

ConvGrad    com.microsoft's, where this onnxruntime has it (onnxruntime-training)
function    the body of `ConvGradWeight` of ai.bnfuse
conv        one Conv of x with dy as its weight: batch and channels exchanged, strides and dilations too

    python benchmarks/experiments/weight_gradient.py [--threads 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper

from bnfuse.opset.functions import function_for
from bnfuse.opset.spec import DOMAIN, OpSpec

OPSET = 18


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution of square maps: padding keeps their size but for the stride."""

    n: int
    cin: int
    size: int
    cout: int
    kernel: int
    stride: int = 1
    group: int = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shapes of dy, x and w."""
        out = (self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1
        return {
            "dy": (self.n, self.cout, out, out),
            "x": (self.n, self.cin, self.size, self.size),
            "w": (self.cout, self.cin // self.group, self.kernel, self.kernel),
        }

    def attributes(self) -> dict[str, object]:
        """Give those of the forward convolution."""
        pads, kernel = [self.kernel // 2] * 4, [self.kernel] * 2
        strides = [self.stride] * 2
        return {"dilations": [1, 1], "group": self.group, "kernel_shape": kernel, "pads": pads, "strides": strides}


CASES = (
    Case(16, 256, 28, 128, 1),
    Case(16, 1024, 14, 128, 1),
    Case(16, 64, 56, 64, 3),
    Case(16, 128, 28, 32, 3),
    Case(16, 3, 224, 64, 7, stride=2),
    Case(16, 256, 14, 256, 3, group=32),
    Case(16, 96, 56, 96, 3, group=96),
)


def as_conv(case: Case) -> list[onnx.NodeProto]:
    """Write dw as one Conv."""
    group, per_group = case.group, case.cin // case.group

    def constant(name: str, values: list[int]) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [name], value_ints=values)

    pads, steps = [case.kernel // 2] * 4, [case.stride] * 2
    return [
        constant("split", [case.n, group, per_group, case.size, case.size]),
        constant("joined", [per_group, group * case.n, case.size, case.size]),
        *(
            constant(name, values)
            for name, values in (("zero", [0, 0]), ("kernel", [case.kernel] * 2), ("axes", [2, 3]))
        ),
        helper.make_node("Reshape", ["x", "split"], ["groups"]),
        helper.make_node("Transpose", ["groups"], ["turned"], perm=[2, 1, 0, 3, 4]),
        helper.make_node("Reshape", ["turned", "joined"], ["map"]),
        helper.make_node("Transpose", ["dy"], ["weight"], perm=[1, 0, 2, 3]),
        helper.make_node("Conv", ["map", "weight"], ["wide"], dilations=steps, pads=pads, group=group),
        helper.make_node("Slice", ["wide", "zero", "kernel", "axes"], ["cut"]),
        helper.make_node("Transpose", ["cut"], ["dw"], perm=[1, 0, 2, 3]),
    ]


def ways(case: Case) -> dict[str, list[onnx.NodeProto]]:
    """Give the nodes that make dw of dy, x and w, by the name of the way."""
    given = case.attributes()
    return {
        "ConvGrad": [helper.make_node("ConvGrad", ["dy", "x", "w"], ["", "dw"], domain="com.microsoft", **given)],
        "function": [helper.make_node("ConvGradWeight", ["dy", "x", "w"], ["dw"], domain=DOMAIN, **given)],
        "conv": as_conv(case),
    }


def seconds(nodes: list[onnx.NodeProto], feeds: dict[str, np.ndarray], threads: int) -> float | None:
    """Give the least time of five runs; None where this onnxruntime has no such operator."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in feeds.items()]
    result = helper.make_tensor_value_info("dw", TensorProto.FLOAT, feeds["w"].shape)
    graph = helper.make_graph(nodes, "weight_gradient", values, [result])
    imports = [helper.make_opsetid(*each) for each in (("", OPSET), (DOMAIN, 1), ("com.microsoft", 1))]
    function = ir.serde.serialize_function(function_for(OpSpec((), "ConvGradWeight"), OPSET))
    model = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has exceptions of its own for each status
        if "not a registered function/op" in str(error):
            return None
        raise
    times = []
    for _ in range(5):
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print a line for each case: milliseconds of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    rng = np.random.default_rng(0)
    for case in CASES:
        feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in case.shapes().items()}
        found = {name: seconds(nodes, feeds, threads) for name, nodes in ways(case).items()}
        texts = (f"{name} {'-' if t is None else f'{1e3 * t:.0f} ms'}" for name, t in found.items())
        print(f"{case}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
