"""Steps and kernels for processors that are not this one: narrower x86 runs here, Arm is compiled, exported and read.

Arm code runs under emulation in tests/emulation.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
from source_files import load

from bnfuse import cli
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.io import save
from bnfuse.runtime import SGD, compile_step, load_step
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu import conv_backward, conv_forward, tir
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.targets import cpus

FOREIGN = "haswell" if cpus.is_arm(cpus.host_cpu()) else "neoverse-n1"
SIZE, CIN, COUT = 14, 32, 48


nets = load(pathlib.Path(__file__).with_name("test_session.py"))


@pytest.mark.parametrize("level", ["none", "icf"])
@pytest.mark.parametrize("mcpu", ["haswell", "x86-64"])
def test_narrower_vectors_give_the_same_steps(mcpu, level):
    if cpus.missing_features(cpus.features_of(mcpu)):
        pytest.skip(f"this processor cannot run code for {mcpu}")
    graph = nets.graph_of(nets.dense_net if level == "icf" else nets.residual_net, level)
    host, other = (
        compile_step(graph, target=target, optimizer=SGD(0.1, momentum=0.9), threads=2)
        for target in ("cpu", f"cpu:{mcpu}")
    )
    for seed in range(3):
        assert other(*nets.batch(seed)) == pytest.approx(host(*nets.batch(seed)), rel=1e-4)
    for name, value in host.gradients().items():
        error = np.linalg.norm(other.gradients()[name] - value) / max(np.linalg.norm(value), 1e-3)
        assert error < 1e-2, (name, error)
    image = nets.batch()[0]
    np.testing.assert_allclose(other.evaluate(image), host.evaluate(image), rtol=1e-2, atol=1e-2)


def test_a_step_for_another_architecture_is_compiled_and_exported_but_not_run(tmp_path, capsys):
    source, path = tmp_path / "train.onnx", tmp_path / "step.bnf"
    save(build_training_graph(nets.residual_net()), source)
    assert cli.main(["compile", str(source), "-o", str(path), "--target", f"cpu:{FOREIGN}", "--threads", "2"]) == 0
    assert FOREIGN in capsys.readouterr().out
    with pytest.raises(BnfuseError, match=f"compiled for {FOREIGN}; this CPU lacks") as caught:
        load_step(path)
    assert "\n" not in str(caught.value)
    step = compile_step(source, target=f"cpu:{FOREIGN}", threads=2)
    with pytest.raises(BnfuseError, match=f"compiled for {FOREIGN}; this CPU lacks .*: export it and run it there"):
        step(*nets.batch())
    with pytest.raises(BnfuseError, match="this CPU lacks"):
        step.evaluate(nets.batch()[0])


def convolutions(mcpu: str) -> list[Kernel]:
    """A 3x3 convolution with everything around it, and its gradients, by every algorithm."""
    target = resolve(f"cpu:{mcpu}", 2)
    x, y = MapType(2, SIZE, SIZE, CIN, CIN), MapType(2, SIZE, SIZE, COUT, COUT)
    window = {"dilations": (1, 1), "group": 1, "kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (1, 1)}
    maps = (("x", x), ("y", y))
    forward = Problem("NormalizeReluConvStatistics", maps, tuple(window.items()), (COUT, CIN, 3, 3))
    gradient = Problem(
        "BatchNormGradNormalizeReluConvGradReluGradReduce",
        (("dy", y), ("grad_x", y), ("x", x), ("dx", x)),
        tuple(window.items()),
        (COUT, CIN, 3, 3),
    )
    return [
        generator(problem, target, algorithm)
        for generator, module, problem in (
            (conv_forward.conv_forward, conv_forward, forward),
            (conv_backward.conv_backward, conv_backward, gradient),
        )
        for algorithm in module.algorithms(problem, target)
    ]


@pytest.mark.parametrize(
    ("mcpu", "multiply"),
    [
        ("haswell", r"vfmadd\d+ps\s.*%ymm"),
        ("cortex-a72", r"fmla\s+v\d+\.4s"),
        ("neoverse-n1", r"fmla\s+v\d+\.4s"),
        ("apple-m1", r"fmla\.4s\s+v\d+|fmla\s+v\d+\.4s"),
    ],
)
def test_convolutions_multiply_in_vector_registers_and_call_nothing_but_the_runtime(mcpu, multiply):
    for kernel in convolutions(mcpu):
        assembly = tir.compile_function(kernel.build(), kernel.target).mod.inspect_source("asm")
        assert len(re.findall(multiply, assembly)) >= cpus.vector_registers(kernel.target) // 2, kernel.name
        called = set(re.findall(r"^\s+(?:bl|callq?)\s+([A-Za-z_]\w*)", assembly, re.MULTILINE))
        foreign = {name for name in called if not re.match(r"_*(TVM|tvm)|.*_compute_|memset|memcpy|bzero", name)}
        assert not foreign, (kernel.name, foreign)
