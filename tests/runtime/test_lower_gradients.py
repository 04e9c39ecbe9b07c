"""The gradient of every rule of bnfuse.autodiff is lowered: it runs on the CPU, and has kernels for a GPU."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from differentiated import Differentiated, close
from gradient_cases import CASES, with_gradient

from bnfuse.graph.signature import GraphSignature
from bnfuse.runtime.backends.cpu.runner import CpuRunner
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.program.program import ARENA
from bnfuse.runtime.targets.target import CudaTarget, Target

# operators that no training graph has
WRITTEN_BY_OTHERS = (
    "BatchNormalization",  # that is frozen: an affine map by channel
    "MaxPool of one dimension",
    "NegativeLogLikelihoodLoss",  # of a file that ends in a loss of its own
)
COMPILED = [name for name in CASES if name not in WRITTEN_BY_OTHERS]


def lowered(found: Differentiated, target: Target) -> Lowered:
    for value in (value for node in found.model.graph for value in node.outputs if value.name):
        array = found.values[value.name]
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
    names = tuple(str(value.name) for value in found.model.graph.inputs)
    signature = GraphSignature(data=names, labels=(), trainable=(), frozen=(), running={}, gradients={}, loss="")
    return lower(found.model.graph, signature, target, opset=found.model.opset_imports[""])


@pytest.mark.parametrize("name", COMPILED)
def test_the_gradient_is_compiled_for_the_cpu(name):
    found, target = with_gradient(name), resolve("cpu", 1)
    made = lowered(found, target)
    runner = CpuRunner(Compiled(made.program, objects(made.requests, Cache(default_folder()))), target)
    runner.memory.regions[ARENA][:] = 0xFF  # what is not written is NaN
    names = [str(value.name) for value in found.model.graph.inputs]
    runner.feed(names, [found.values[name] for name in names])
    runner.run([runner.program.whole("forward")], {"forward": {"seed": 1, "step": 0}})
    for output, tensor in made.program.outputs.items():
        close(runner.memory.array(tensor), found.values[output], 2e-5, output)


@pytest.mark.parametrize("name", COMPILED)
def test_the_gradient_is_lowered_for_a_gpu(name):
    made = lowered(with_gradient(name), CudaTarget("sm_90", 4))
    assert made.program.launches or name in ("Identity", "Flatten")
