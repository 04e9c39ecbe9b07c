"""Lowering for a GPU: how maps are stored, what is packed, what is copied, and which launches there are."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from bnfuse import passes
from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.microsoft import convert
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_forward
from bnfuse.runtime import SGD, AdamW
from bnfuse.runtime.backends.cuda import backend
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.codegen import build, cache
from bnfuse.runtime.codegen.build import objects
from bnfuse.runtime.compile import lower_graph
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.cuda.weights import BACKWARD, FORWARD, Member
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Problem
from bnfuse.runtime.kernels.registry import Kind
from bnfuse.runtime.lowering.graph import Lowered, lower
from bnfuse.runtime.lowering.layout import MapRef, map_type
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.optim import Optimizer
from bnfuse.runtime.targets.target import CudaTarget

STORED = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MOMENTUM = SGD(lr=0.1, momentum=0.9)
CONV = "Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"


def gpu(precision: str = "bf16") -> CudaTarget:
    return resolve("cuda:sm_90", precision=precision)


def lowered(
    signature: str, body: str, precision: str = "bf16", parameters: tuple[str, ...] = (), types: str = ""
) -> Lowered:
    """The program of a graph in ONNX's text form; inputs that are no parameters are data. `types` of values inside."""
    text = f"""<ir_version: 8, opset_import: ["": 17, "ai.bnfuse": 1, "com.microsoft": 1]>
        g {signature} {f"<{types}>" if types else ""} {{ {body} }}"""
    model = convert(ir.from_proto(onnx.parser.parse_model(text)))
    names = tuple(v.name or "" for v in model.graph.inputs if v.name not in parameters)
    signature = GraphSignature(
        data=names, labels=(), trainable=parameters, frozen=(), running={}, gradients={}, loss=""
    )
    return lower(model.graph, signature, gpu(precision), opset=17)


@functools.cache
def training_graph(name: str, level: str, image: int) -> onnx.ModelProto:
    forward = build_forward(name, batch=2, image=image)
    return ir.to_proto(passes.rewrite(ir.from_proto(build_training_graph(forward)), level=level).model)


def network(
    name: str, level: str, target: CudaTarget, image: int, optimizer: Optimizer = MOMENTUM
) -> tuple[Lowered, Lowered]:
    """The programs of training and of evaluation of a network of the zoo."""
    return lower_graph(open_graph(training_graph(name, level, image)), target, optimizer)


def problems(made: Lowered) -> list[Problem]:
    """Of the operators that work on maps, launch by launch."""
    found = [made.requests[launch.kernel].arguments[0] for launch in made.program.launches]
    return [problem for problem in found if isinstance(problem, Problem)]


def only(made: Lowered, op: str) -> Problem:
    (found,) = (problem for problem in problems(made) if problem.op == op)
    return found


def generators(made: Lowered) -> collections.Counter[Kind]:
    return collections.Counter(made.requests[launch.kernel].kind for launch in made.program.launches)


def packs(made: Lowered) -> list[tuple[int, tuple[Member, ...], p.Launch]]:
    """Index, members and launch of each packing."""
    requests = [(i, made.requests[launch.kernel], launch) for i, launch in enumerate(made.program.launches)]
    return [(i, r.arguments[0], launch) for i, r, launch in requests if r.kind == registry.PACK_WEIGHTS]


# -- maps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", STORED)
def test_maps_have_the_type_of_the_precision_and_everything_else_is_float32(precision):
    training, evaluation = network("densenet40", "icf", gpu(precision), 32)
    for made in (training, evaluation):
        kinds = {kind for problem in problems(made) for name, kind in problem.maps if name != "indices"}
        assert {kind.dtype for kind in kinds if kind.h * kind.w > 1} == {STORED[precision]}
        assert {kind.dtype for kind in kinds if kind.h * kind.w == 1} == {"float32"}
    program = training.program
    tensors = {**program.parameters, **program.gradients, **program.running, **program.outputs, **program.inputs}
    types = {
        program.storages[t.storage].dtype for name, t in tensors.items() if name not in program.signature["labels"]
    }
    assert types == {"float32"}


def test_a_16_bit_map_takes_half_the_memory():
    full, half = (network("resnet50", "icf", gpu(x), 64)[0].program.report for x in ("fp32", "bf16"))
    assert half.stashed_bytes < 0.6 * full.stashed_bytes
    assert half.feature_map_bytes < 0.6 * full.feature_map_bytes


def test_an_input_of_one_channel_is_converted_where_types_differ():
    signature, body = "(float[2,1,4,4] x) => (float[2,1,4,4] y)", "y = Relu(x)"
    assert generators(lowered(signature, body, "fp32")) == {registry.POINTWISE_FORWARD: 1}
    assert generators(lowered(signature, body)) == {
        registry.NCHW_TO_NHWC: 1,
        registry.POINTWISE_FORWARD: 1,
        registry.NHWC_TO_NCHW: 1,
    }


def test_one_pixel_maps_are_dense_float32_and_need_no_copy():
    made = lowered("(float[2,8,1,1] x) => (float[2,8] y)", "r = Relu(x) y = Flatten(r)")
    assert generators(made) == {registry.POINTWISE_FORWARD: 1}
    assert {kind.dtype for _, kind in only(made, "ReluPointwise").maps} == {"float32"}


def test_constants_that_are_maps_lie_in_the_stored_type():
    made = lowered(
        "(float[1,2,2,2] x) => (float[1,2,2,2] y)",
        "c = Constant<value = float[1,2,2,2] {1, 2, 3, 4, 5, 6, 7, 8}>() y = Add(x, c)",
    )
    (index,) = (i for i, s in enumerate(made.program.storages) if s.region == p.CONSTANTS)
    assert made.program.storages[index].dtype == made.program.initial[index].dtype.name == "bfloat16"
    np.testing.assert_array_equal(made.program.initial[index].astype(np.float32), [1, 5, 2, 6, 3, 7, 4, 8])


def test_indices_of_a_max_pool_are_bytes_beside_a_16_bit_map():
    body = "y, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)"
    made = lowered("(float[1,8,4,4] x) => (float[1,8,2,2] y)", body)
    assert only(made, "MaxPool").map("indices") == MapType(1, 2, 2, 8, 8, "uint8", 8)
    assert only(made, "MaxPool").map("y") == MapType(1, 2, 2, 8, 8, "bfloat16", 8)


# -- slots ---------------------------------------------------------------------------------------------------------


def test_leaves_of_a_concatenation_share_a_16_bit_buffer_and_know_their_alignment():
    made = lowered(
        "(float[1,16,4,4] x, float[12,16,3,3] v, float[6,16,3,3] w) => (float[1,18,4,4] y)",
        f"a = {CONV}(x, v) b = {CONV}(x, w) c = Concat<axis = 1>(a, b) y = Relu(c)",
        types="float[1,12,4,4] a, float[1,6,4,4] b, float[1,18,4,4] c",
    )
    maps = [problem.map("y") for problem in problems(made) if problem.op == "Conv"]
    assert [(kind.c, kind.stride, kind.align) for kind in maps] == [(12, 18, 2), (6, 18, 2)]
    assert {kind.dtype for kind in maps} == {"bfloat16"}
    assert not any("channels" in copy for copy in made.program.report.copies)


@pytest.mark.parametrize(
    ("channels", "start", "stop", "align"), [(64, 0, 32, 8), (64, 16, 28, 4), (64, 6, 16, 2), (64, 8, 15, 1)]
)
def test_alignment_follows_offset_stride_and_channels(channels, start, stop, align):
    whole = MapRef(0, 0, map_type((1, channels, 2, 2), "float32", gpu()))
    assert whole.type.align == 8
    assert whole.channels(start, stop).type.align == align


def test_kinds_of_a_cpu_know_neither_types_nor_alignment():
    kind = map_type((1, 64, 2, 2), "uint8", resolve("cpu", 1))
    assert kind == MapType(1, 2, 2, 64, 64)
    assert MapRef(0, 0, kind).channels(8, 16).type == MapType(1, 2, 2, 8, 64)


# -- weights -------------------------------------------------------------------------------------------------------


def test_one_launch_packs_what_both_phases_read_and_evaluation_packs_the_forward_forms():
    training, evaluation = network("resnet50", "icf", gpu(), 32)
    ((index, members, launch),) = packs(training)
    assert (index, launch.phase) == (0, "forward")
    counts = collections.Counter(member.form for member in members)
    assert counts == {FORWARD: 53, BACKWARD: 52}  # the gradient of the images is not wanted
    ((index, members, _),) = packs(evaluation)
    assert (index, {member.form for member in members}, len(members)) == (0, {FORWARD}, 53)


def test_every_convolution_reads_its_own_part_of_the_packed_storage():
    made, _ = network("resnet50", "icf", gpu(), 32)
    ((_, members, pack),) = packs(made)
    storages = made.program.storages
    sources = {t.storage: t for t in made.program.parameters.values()}
    (packed,) = (storages[b.storage] for b in pack.buffers if b.access == "out")
    places = {(m.form, packed.offset + 2 * m.target): m for m in members}
    seen = set()
    for launch in made.program.launches:
        request = made.requests[launch.kernel]
        problem = request.arguments[0]
        if not isinstance(problem, Problem) or not problem.weight or "ConvGradWeight" in problem.op:
            continue
        names = [param.name for param in request.kernel().params]
        weight = storages[launch.buffers[names.index("weight")].storage]
        form = BACKWARD if problem.spec.is_gradient else FORWARD
        member = places[form, weight.offset]
        assert (member.weight, member.group) == (problem.weight, problem.attribute("group"))
        assert weight.elements == member.vectors * 8
        assert weight.offset + weight.bytes <= packed.offset + packed.bytes
        assert any(storages[s].offset == 4 * member.source and t.shape == member.weight for s, t in sources.items())
        seen.add((form, weight.offset))
    assert seen == places.keys()


def test_the_gradient_of_a_weight_alone_reads_no_weight():
    made = lowered(
        "(float[1,16,4,4] g, float[1,16,4,4] x, float[16,16,1,1] w) => (float[16,16,1,1] d)",
        "d = ai.bnfuse.ConvGradWeight<kernel_shape = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0], "
        "dilations = [1, 1], group = 1>(g, x, w)",
        parameters=("w",),
    )
    assert packs(made) == []
    assert only(made, "ConvGradWeight").weight == (16, 16, 1, 1)


def test_depthwise_convolutions_read_the_file_s_weights():
    made, _ = network("mobilenetv2", "icf", gpu(), 32)
    ((_, members, _),) = packs(made)
    assert all(member.weight[1] > 1 for member in members)
    assert any(problem.weight[1:2] == (1,) for problem in problems(made))


def test_a_weight_that_is_no_parameter_is_packed_where_it_is_read_and_once():
    made = lowered(
        "(float[1,16,4,4] x, float[16,16,3,3] v, float[16,16,3,3] w) => (float[1,16,4,4] y)",
        f"a = {CONV}(x, v) u = Neg(w) b = {CONV}(a, u) y = {CONV}(b, u)",
        parameters=("v",),
    )
    (first, computed) = packs(made)
    assert (first[0], len(first[1]), len(computed[1])) == (0, 1, 1)
    names = [made.requests[launch.kernel].kind for launch in made.program.launches]
    assert names[computed[0] - 1] == registry.GENERIC
    assert computed[1][0].source == 0


# -- copies and launches -------------------------------------------------------------------------------------------


def test_a_generic_operator_works_on_16_bit_maps_by_way_of_the_file_s_layout():
    signature = "(float[1,8,4,4] x) => (float[1,8,3,3] y)"
    body = "a = Relu(x) b = Exp(a) y = MaxPool<kernel_shape = [2, 2]>(b)"
    half, full = lowered(signature, body), lowered(signature, body, "fp32")
    assert collections.Counter(copy.partition(": ")[2] for copy in half.program.report.copies) == {
        "NCHW to NHWC": 2,
        "NHWC to NCHW": 2,
    }
    assert collections.Counter(copy.partition(": ")[2] for copy in full.program.report.copies) == {
        "NCHW to NHWC": 1,
        "NHWC to NCHW": 1,
    }


@pytest.mark.parametrize("level", ["none", "icf"])
def test_a_gpu_has_the_launches_of_a_cpu_and_one_for_weights(level):
    made, _ = network("densenet121", level, gpu("fp32"), 64)
    on_cpu, _ = network("densenet121", level, resolve("cpu", 2), 64)
    ours, theirs = operators(made), operators(on_cpu)
    assert ours.pop("pack_weights") == 1
    assert ours == theirs
    assert made.program.report.copies == [*on_cpu.program.report.copies, "weights: 239 packed weights"]


def operators(made: Lowered) -> collections.Counter[str]:
    """Count the launches of a program by what they do, wherever what is per channel is done."""
    found: collections.Counter[str] = collections.Counter()
    for launch in made.program.launches:
        request = made.requests[launch.kernel]
        if request.kind == registry.COEFFICIENTS:
            found.update(name for name, _ in request.arguments[0])
        else:
            found[request.kind.function] += 1
            found.update(name for name, _ in getattr(request.arguments[0], "tail", ()))
    return found


def test_16_bit_maps_cost_densenet_no_copy_but_the_images_and_weights():
    report = network("densenet121", "icf", gpu(), 64)[0].program.report
    assert [copy.partition(": ")[2] for copy in report.copies] == ["NCHW to NHWC", "239 packed weights"]


def test_what_is_read_was_written_before():
    program = network("googlenet", "icf", gpu(), 64)[0].program
    written: set[tuple[int, int]] = set()
    for launch in program.launches:
        results = {buffer.storage for buffer in launch.buffers if buffer.access != "in"}
        for buffer in launch.buffers:
            s = program.storages[buffer.storage]
            span = s.offset, s.offset + s.bytes
            if buffer.access == "in" and buffer.storage in results:
                continue  # of an operand that is there for its shape alone the result takes the place
            if s.region == p.ARENA and buffer.access == "in":
                assert any(first < span[1] and span[0] < last for first, last in written), launch.node
            elif s.region == p.ARENA:
                written.add(span)


# -- loss scaling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [MOMENTUM, AdamW(lr=0.1)])
def test_fp16_scales_from_the_loss_to_the_update(optimizer):
    program = network("densenet40", "icf", gpu("fp16"), 32, optimizer)[0].program
    scaled = [launch for launch in program.launches if p.Scalar("divisor") in launch.arguments]
    assert [launch.phase for launch in scaled] == ["update"]
    assert all(launch.arguments[-1] == p.Scalar("divisor") for launch in scaled)
    assert program.finite in {b.storage for b in scaled[0].buffers}
    begun = [launch for launch in program.launches if program.seed in {b.storage for b in launch.buffers}]
    assert begun and {launch.phase for launch in begun} == {"backward"}
    again = p.from_json(p.to_json(program), program.initial)
    assert (again.finite, again.seed, again.storages) == (program.finite, program.seed, program.storages)
    plain = network("densenet40", "icf", gpu(), 32, optimizer)[0].program
    assert plain.finite is None and plain.seed is None
    assert not any(p.Scalar("divisor") in launch.arguments for launch in plain.launches)


def test_fp16_refuses_gradients_that_no_loss_scales():
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,4,2,2] x) => (float[1,4,2,2] y) { y = Relu(x) }"""
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    signature = GraphSignature(
        data=("x",), labels=(), trainable=(), frozen=(), running={}, gradients={"x": "y"}, loss="loss"
    )
    with pytest.raises(BnfuseError, match="no initializer 'loss_grad' of 1: build the graph anew"):
        lower(graph, signature, gpu("fp16"), opset=17)


# -- the cache -----------------------------------------------------------------------------------------------------


def test_the_key_of_a_cubin_knows_target_and_compiler(monkeypatch):
    made = lowered("(float[1,16,4,4] x, float[16,16,1,1] w) => (float[1,16,4,4] y)", "y = Conv(x, w)")
    (request,) = (r for r in made.requests if r.kind == registry.PACK_WEIGHTS)

    def key_of(kernel: Kernel) -> str:
        return cache.content_key(kernel, request.kind)

    key = key_of(request.kernel())
    assert key == key_of(request.kernel())
    other = dataclasses.replace(request.kernel(), target=gpu("fp16"))
    assert key != key_of(other)
    monkeypatch.setattr(backend, "compiler", lambda: "nvrtc 1.0")
    assert key != key_of(request.kernel())


def test_cubins_are_compiled_once_and_cached(tmp_path, monkeypatch):
    made = lowered("(float[1,16,4,4] x, float[16,16,1,1] w) => (float[1,16,4,4] y)", "y = Conv(x, w)")
    requests = [r for r in made.requests if r.kind == registry.PACK_WEIGHTS]
    (code,) = objects(requests, cache.Cache(tmp_path))
    header = json.loads(code.split(b"\n", 1)[0])
    assert (header["arch"], [name for name, _ in header["parameters"]]) == ("sm_90", ["parameters", "table", "packed"])
    monkeypatch.setattr(build, "compile_kernel", lambda kernel: pytest.fail("compiled again"))
    assert objects(requests, cache.Cache(tmp_path)) == [code]


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    made = lowered("(float[1,16,4,4] x, float[16,16,1,1] w) => (float[1,16,4,4] y)", "y = Conv(x, w)")
    (request,) = (r for r in made.requests if r.kind == registry.PACK_WEIGHTS)
    broken = dataclasses.replace(request.kernel(), target=dataclasses.replace(gpu(), architecture="sm_1"))
    with pytest.raises(BnfuseError, match=f"kernel {broken.name} does not compile"):
        build.compile_kernel(broken)
