"""Small graphs in ONNX's text form, lowered and run, and the same in onnxruntime or by onnx's reference evaluator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import pytest

from bnfuse.graph.signature import GraphSignature
from bnfuse.ort.oracle import OrtGraph
from bnfuse.runtime.backends.cpu.runner import CpuRunner
from bnfuse.runtime.backends.execution import Compiled
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.codegen.cache import Cache, default_folder
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.program.program import ARENA, Program
from bnfuse.runtime.targets.target import CudaTarget, Target

CPU = resolve("cpu", 2)
Arrays = Mapping[str, np.ndarray]
RANDOM = {"forward": {"seed": 1, "step": 0}}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The nodes of a graph that makes `y`, ...; its inputs are float32 and have shapes, its constants are arrays."""

    body: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    constants: tuple[tuple[str, np.ndarray], ...] = ()
    outputs: tuple[str, ...] = ("y",)
    opset: int = 18
    types: str = ""  # of values between

    def feeds(self) -> dict[str, np.ndarray]:
        return {name: numbers(*shape, seed=i) for i, (name, shape) in enumerate(self.inputs)}

    def model(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> onnx.ModelProto:
        """The outputs have the shapes, or none."""
        ends = ", ".join(f"float{list(shape)} {name}" for name, shape in self.inputs)
        known = shapes or dict.fromkeys(self.outputs, ())
        results = ", ".join(f"float{list(known[name]) or ''} {name}" for name in self.outputs)
        imports = f"""<ir_version: 9, opset_import: ["": {self.opset}, "ai.bnfuse": 1]>"""
        text = f"{imports} g ({ends}) => ({results}) {f'<{self.types}>' if self.types else ''} {{ {self.body} }}"
        model = onnx.parser.parse_model(text)
        for index, node in enumerate(model.graph.node):
            node.name = f"n{index}"
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in self.constants)
        if not shapes:
            for value in model.graph.output:
                value.type.tensor_type.ClearField("shape")
        return model

    def by_onnxruntime(self) -> dict[str, np.ndarray]:
        return OrtGraph(ir.from_proto(self.model()), name="g", threads=1).run(self.feeds(), self.outputs)

    def by_evaluator(self) -> dict[str, np.ndarray]:
        found = onnx.reference.ReferenceEvaluator(self.model()).run(None, self.feeds())
        return dict(zip(self.outputs, found, strict=True))

    def lowered(self, shapes: Mapping[str, tuple[int, ...]], target: Target = CPU, file: str | None = None) -> Lowered:
        model = ir.from_proto(self.model(shapes))
        names = tuple(name for name, _ in self.inputs)
        signature = GraphSignature(data=names, labels=(), trainable=(), frozen=(), running={}, gradients={}, loss="")
        return lower(model.graph, signature, target, opset=self.opset, file=file)

    def on_cpu(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Lowered, dict[str, np.ndarray]]:
        """What is not written is NaN."""
        made = self.lowered(shapes)
        runner = CpuRunner(Compiled(made.program, objects(made.requests, Cache(default_folder()))), CPU)
        runner.memory.regions[ARENA][:] = 0xFF
        feeds = self.feeds()
        runner.feed(list(feeds), list(feeds.values()))
        runner.run([runner.program.whole("forward")], RANDOM)
        return made, {name: runner.memory.array(tensor).copy() for name, tensor in made.program.outputs.items()}

    def on_gpu(
        self, shapes: Mapping[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, precision: str = "fp32"
    ) -> tuple[Lowered, dict[str, np.ndarray]]:
        """Its kernels interpreted."""
        from fake_cuda import FakeCuda, install
        from gpu_step import interpreted

        from bnfuse.runtime.backends.cuda.runner import CudaRunner

        target, fake = CudaTarget("sm_90", 4, precision), install(monkeypatch, FakeCuda(seed=1))
        made = self.lowered(shapes, target)
        runner = CudaRunner(interpreted(made, fake), target)
        feeds = self.feeds()
        runner.feed(list(feeds), list(feeds.values()))
        runner.run([runner.program.whole("forward")], RANDOM)
        return made, {name: np.array(runner.memory.read(tensor)) for name, tensor in made.program.outputs.items()}


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def kernels(program: Program) -> list[str]:
    """The operators of the launches, in order."""
    return [program.kernels[launch.kernel].partition("_")[0] for launch in program.launches]


def assert_close(found: Arrays, wanted: Arrays, tolerance: float = 3e-6) -> None:
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        error = np.abs(found[name] - value).max() / max(np.abs(value).max(), 1e-6)
        assert error < tolerance, f"{name}: {error:.1e}"
