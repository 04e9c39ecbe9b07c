"""The graph that evaluates a trained network: BatchNorms take their running statistics."""

import copy
import io
import warnings

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass

from bnfuse.build import build
from bnfuse.exporting import inference_model
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import LEVELS, rewrite
from bnfuse.runtime.backends.cpu.runner import CpuRunner
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import lower
from bnfuse.runtime.lowering.inference import inference_graph
from bnfuse.verifying.interpreter import run

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
    runner.run([runner.program.whole("forward")], {"forward": {}})
    np.testing.assert_allclose(runner.memory.array(made.program.outputs["y"]), expected, rtol=1e-5, atol=1e-5)


def applied_twice():
    """A network of one BatchNorm behind two convolutions, with running statistics as after training."""
    import torch
    from torch.nn import functional

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3)
            self.norm, self.head = torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 5)

        def forward(self, x):
            y = functional.relu(self.norm(self.first(x)))
            return self.head(functional.relu(self.norm(self.second(y))).mean((2, 3)))

    torch.manual_seed(0)
    network = Network().train()
    with torch.no_grad():
        for value in (network.norm.running_mean, network.norm.running_var, *network.norm.parameters()):
            value.add_(torch.rand(4))
    return network


def forward_of(network) -> onnx.ModelProto:
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False, "opset_version": 17}
        torch.onnx.export(copy.deepcopy(network), torch.zeros(4, 3, 9, 9), file, dynamo=False, input_names=["x"], **how)
    return onnx.load_from_string(file.getvalue())


@pytest.mark.torch
@pytest.mark.parametrize("definition", ["onnx", "torch"])
@pytest.mark.parametrize(
    "how", [*({"level": level} for level in LEVELS), {"local_bn": 2}, {"sample": "fs:1/2"}], ids=str
)
def test_a_batch_norm_that_is_applied_twice_takes_its_running_statistics_twice(how, definition):
    """What the second one moves are those that the first has moved: in evaluation none has."""
    import torch

    network = applied_twice()
    training = build(forward_of(network), running_variance=definition).model
    graph = open_graph(rewrite(ir.from_proto(training), **how).model)
    x = np.random.default_rng(1).standard_normal((4, 3, 9, 9)).astype(np.float32)
    state = {name: torch.tensor(value) for name, value in graph.state().items()}
    network.load_state_dict(state, strict=False)  # exporting has moved its running statistics
    expected = network.eval().double()(torch.tensor(x, dtype=torch.float64)).detach().numpy()
    cut, signature = inference_graph(graph.model, graph.signature, graph.name)
    model = ir.Model(cut, ir_version=9)
    RemoveUnusedNodesPass()(model)
    feeds = {name: value.astype(np.float64) for name, value in {**graph.state(), "x": x}.items()}
    np.testing.assert_allclose(run(ir.to_proto(model), feeds)[signature.loss], expected, rtol=1e-6)
    exported = onnxruntime.InferenceSession(inference_model(graph, graph.state()).SerializeToString())
    np.testing.assert_allclose(exported.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)
