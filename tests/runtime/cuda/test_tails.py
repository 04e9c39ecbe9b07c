"""What is computed per channel of an operator's sums, where these are joined: the same as in a launch of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from cuda_conv import CudaCase, in_slot
from cuda_kernels import gpu, run_kernel
from packed_weights import packed_raw

from bnfuse.build import build_training_graph
from bnfuse.graph.signature import signature_of
from bnfuse.opset.spec import parse
from bnfuse.passes import rewrite
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.tails import tail_name
from bnfuse.runtime.kernels.cuda.coefficients import coefficients
from bnfuse.runtime.kernels.cuda.conv_backward import conv_backward
from bnfuse.runtime.kernels.cuda.conv_forward import conv_forward
from bnfuse.runtime.kernels.cuda.pointwise import pointwise_backward, pointwise_forward
from bnfuse.runtime.kernels.cuda.weights import BACKWARD, FORWARD
from bnfuse.runtime.lowering.graph import Lowered, lower

FINALIZE = ("finalize", (24, 1e-5, 0.9, 98.0))
TERMS, GRADIENT = ("grad_terms", (24,)), ("grad_finalize", (24, 24, 98))
CASES = {
    "conv": (conv_forward, CudaCase("ConvStatistics", 2, 7, 7, 16, 24), (FINALIZE,)),
    "depthwise": (
        conv_forward,
        CudaCase("ConvStatistics", 2, 7, 7, 24, 24, (3, 3), pads=(1, 1, 1, 1), group=24),
        (FINALIZE,),
    ),
    "sweep": (pointwise_forward, CudaCase("PointwiseStatistics", 2, 7, 7, 24, 24), (FINALIZE,)),
    "conv-gradient": (
        conv_backward,
        CudaCase("NormalizeReluConvGradReluGradReduce", 2, 7, 7, 24, 16),
        (TERMS, GRADIENT),
    ),
    "depthwise-gradient": (
        conv_backward,
        CudaCase("ConvGradReduce", 2, 7, 7, 24, 24, (3, 3), pads=(1, 1, 1, 1), group=24),
        (TERMS, GRADIENT),
    ),
    "sweep-gradient": (pointwise_backward, CudaCase("PointwiseGradReduce", 2, 7, 7, 24, 24), (TERMS, GRADIENT)),
}


@pytest.mark.parametrize(("generator", "case", "tail"), CASES.values(), ids=list(CASES))
def test_results_are_those_of_launches_one_by_one(generator, case, tail):
    problem = case.problem()
    if "Pointwise" in case.op:
        problem = dataclasses.replace(problem, attributes=(), weight=())
    rng = np.random.default_rng(1)
    given, alone = operands(case), {}
    found = run_kernel(generator(problem, gpu()), given, offsets=dict.fromkeys(("x", "y", "dx", "dy"), case.slots))
    known = {name: found[name] for name in ("mean", "variance", "dbeta", "dgamma") if name in found}
    shared = {name: np.full_like(value, np.nan) for name, value in known.items() if name in parse(case.op).results}
    for number, member in enumerate(tail):
        kernel = coefficients((member,), gpu())
        for param in kernel.params:
            if param.access == "in" and param.name not in known:
                known[param.name] = rng.uniform(0.5, 2, 24).astype(np.float32)
        made = run_kernel(kernel, {param.name: known[param.name] for param in kernel.params if param.access == "in"})
        for param in kernel.params:
            name = tail_name(number, param.name)
            if param.access == "in":
                shared.setdefault(param.name, known[param.name])
                given[name] = shared[param.name]
            else:
                alone[name] = known[param.name] = made[param.name]
                given[name] = shared[param.name] = np.full(24, np.nan, np.float32)
    given |= {name: shared[name] for name in parse(case.op).results if name in shared}
    kernel = generator(dataclasses.replace(problem, tail=tail), gpu())
    together = run_kernel(kernel, given, offsets=dict.fromkeys(("x", "y", "dx", "dy"), case.slots))
    assert alone
    for name, value in alone.items():
        np.testing.assert_array_equal(together[name], value, err_msg=name)


def operands(case: CudaCase) -> dict[str, np.ndarray]:
    """Arrays of the kernel's operands by name; maps in their slots."""
    made = {}
    for name, value in case.operands().items():
        if case.is_map(name):
            made[name] = in_slot(case, name, value)
        elif name == "weight" and case.group == 1:
            form = BACKWARD if "Grad" in case.op else FORWARD
            made[name] = packed_raw(value.astype(np.float32), case.group, form, "fp32")
        elif name != "weight" or "Pointwise" not in case.op:
            made[name] = value.astype(np.float32)
    return made


NETWORK = """<ir_version: 8, opset_import: ["": 17]> g (float[2,3,6,6] image) => (float[2,5] logits) {
    c1 = Conv(image, w1)
    n1, m1n, v1n = BatchNormalization<training_mode = 1>(c1, g1, b1, m1, v1)
    r1 = Relu(n1)
    c2 = Conv(r1, w2)
    k = Concat<axis = 1>(c1, c2)
    n2, m2n, v2n = BatchNormalization<training_mode = 1>(k, g2, b2, m2, v2)
    r2 = Relu(n2)
    c3 = Conv(r2, w3)
    e = GlobalAveragePool(c3)
    f = Flatten(e)
    logits = Gemm<transB = 1>(f, w4, b4)
}"""
SHAPES = {"w1": (8, 3, 1, 1), "w2": (8, 8, 1, 1), "w3": (12, 16, 1, 1), "w4": (5, 12), "b4": (5,)}


def lowered(level: str) -> Lowered:
    rng, model = np.random.default_rng(0), onnx.parser.parse_model(NETWORK)
    arrays = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    for index, c in ((1, 8), (2, 16)):
        arrays |= {f"g{index}": np.ones(c), f"b{index}": np.zeros(c), f"m{index}": np.zeros(c), f"v{index}": np.ones(c)}
    floats = {name: array.astype(np.float32) for name, array in arrays.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in floats.items())
    made = rewrite(ir.from_proto(build_training_graph(model, train=["*"])), level=level).model
    return lower(made.graph, signature_of(made), gpu(), opset=17)


def test_what_is_of_one_operator_s_channels_is_done_behind_it_and_what_is_of_more_is_not():
    made = lowered("icf")
    tails, alone = {}, []
    for launch in made.program.launches:
        request = made.requests[launch.kernel]
        if request.kind == registry.COEFFICIENTS:
            alone += [name for name, _ in request.arguments[0]]
        elif tail := getattr(request.arguments[0], "tail", ()):
            tails[launch.node] = [name for name, _ in tail]
    first, *_ = tails.values()
    assert first == ["finalize"]  # of the first convolution; that of the Concat has channels of both
    assert alone.count("finalize") == 1
    assert sum(names.count("grad_terms") + names.count("grad_terms_accumulate") for names in tails.values()) >= 1


def test_at_no_level_of_fusion_there_is_none():
    """Statistics are sweeps of their own then, which have no tail."""
    made = lowered("none")
    assert not any(getattr(request.arguments[0], "tail", ()) for request in made.requests)
