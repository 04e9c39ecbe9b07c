"""The graph that evaluates a trained network: BatchNorms take their running statistics."""

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse.graph.signature import GraphSignature
from bnfuse.runtime.backends.cpu.runner import CpuRunner
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import lower
from bnfuse.runtime.lowering.inference import inference_graph

TARGET = resolve("cpu", 2)
RUNNING = {"m": "m2", "v": "v2"}


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 2, 2), (2, 3, 2, 2, 2)], ids=str)
def test_a_whole_batch_norm_of_any_rank_takes_its_running_statistics(shape):
    dims = ",".join(map(str, shape))
    model = ir.from_proto(
        onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17, "ai.bnfuse": 1]>
        g (float[{dims}] x, float[3] s, float[3] b, float[3] m, float[3] v)
            => (float[{dims}] y, float[3] m2, float[3] v2) <float[{dims}] n> {{
            n, m2, v2, mean, inv = ai.bnfuse.BatchNorm <epsilon = 0.001, momentum = 0.75> (x, s, b, m, v)
            y = Relu(n)
        }}""")
    )
    signature = GraphSignature(("x",), (), ("s", "b"), (), running=RUNNING, gradients={}, loss="", logits="y")
    graph, _ = inference_graph(model, signature)
    names = ("x", "s", "b", *RUNNING)
    fed = GraphSignature(names, (), (), (), running={}, gradients={}, loss="")
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=shape)} | {name: rng.uniform(0.5, 2, size=3) for name in names[1:]}
    x, *rest = feeds.values()
    scale, bias, mean, variance = (value.reshape(-1, *(1,) * (len(shape) - 2)) for value in rest)
    expected = np.maximum((x - mean) / np.sqrt(variance + 1e-3) * scale + bias, 0)
    made = lower(graph, fed, TARGET, opset=17)
    runner = CpuRunner(Compiled(made.program, objects(made.requests, Cache(default_folder()))), TARGET)
    runner.feed(list(feeds), [value.astype(np.float32) for value in feeds.values()])
    runner.run(("forward",), {"forward": {}})
    np.testing.assert_allclose(runner.memory.array(made.program.outputs["y"]), expected, rtol=1e-5, atol=1e-5)
