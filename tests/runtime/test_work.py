"""FLOPs and bytes of launches, counted by hand on small cases."""

import numpy as np
import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph
from bnfuse.models import build_forward
from bnfuse.runtime import SGD, compile_step, load_step
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.common.dense import GemmProblem
from bnfuse.runtime.kernels.common.optim import sgd_problem
from bnfuse.runtime.kernels.cpu.conv_backward import conv_backward
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward
from bnfuse.runtime.kernels.cpu.dense import gemm
from bnfuse.runtime.kernels.cpu.layout import copy_map
from bnfuse.runtime.kernels.cpu.optim import update
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.lowering.work import work_of
from bnfuse.runtime.program import program as p

TARGET = resolve("cpu", 1)
ATTRIBUTES = (("dilations", (1, 1)), ("group", 1), ("kernel_shape", (3, 3)), ("pads", (1,) * 4), ("strides", (1, 1)))


def test_a_convolution_counts_its_slot_and_not_the_buffer_around_it():
    x, y = MapType(2, 5, 4, 6, 32), MapType(2, 5, 4, 8, 64)
    work = work_of(conv_forward(Problem("ReluConvStatistics", (("x", x), ("y", y)), ATTRIBUTES, (8, 6, 3, 3)), TARGET))
    assert (work.kind, work.op, work.shape) == ("Conv 3x3", "ReluConvStatistics", "2x5x4x6 -> 8")
    assert work.flops == 2 * 40 * (8 * 6 * 9)
    assert work.bytes == 4 * (40 * 6 + 40 * 8 + 8 * 6 * 9 + 8 + 8)  # x, y, weight, mean, variance


def test_both_gradients_are_twice_the_work_and_an_accumulator_is_read_and_written():
    x, dy, dx = MapType(2, 5, 4, 6, 6), MapType(2, 5, 4, 8, 8), MapType(2, 5, 4, 6, 32)
    maps = (("dy", dy), ("x", x), ("dx", dx))
    work = work_of(conv_backward(Problem("ConvGradAccumulate", maps, ATTRIBUTES, (8, 6, 3, 3)), TARGET))
    assert work.kind == "ConvGrad 3x3"
    assert work.flops == 2 * 2 * 40 * (8 * 6 * 9)
    assert work.bytes == 4 * (40 * 8 + 40 * 6 + 2 * 40 * 6 + 2 * 8 * 6 * 9 + 6)  # dy, x, dx twice, weights, acc_p
    only = work_of(conv_backward(Problem("ConvGradWeight", maps[:2], ATTRIBUTES, (8, 6, 3, 3)), TARGET))
    assert only.flops == 2 * 40 * (8 * 6 * 9)


def test_a_transposed_convolution_works_on_the_pixels_that_it_reads():
    x, y = MapType(2, 5, 4, 8, 8), MapType(2, 10, 8, 6, 6)
    window = (*ATTRIBUTES[:2], ("kernel_shape", (4, 4)), ATTRIBUTES[3], ("strides", (2, 2)), ("output_padding", (0, 0)))
    work = work_of(conv_backward(Problem("ConvTransposeBias", (("x", x), ("y", y)), window, (8, 6, 4, 4)), TARGET))
    assert (work.kind, work.shape) == ("ConvTranspose 4x4", "2x5x4x8 -> 6, stride 2")
    assert work.flops == 2 * 40 * (8 * 6 * 16)
    assert work.bytes == 4 * (40 * 8 + 160 * 6 + 8 * 6 * 16 + 6)  # x, y, weight, bias


def test_groups_strides_and_products_show_in_kind_and_shape():
    x, y = MapType(1, 8, 8, 16, 16), MapType(1, 4, 4, 16, 16)
    attributes = (*ATTRIBUTES[:1], ("group", 16), *ATTRIBUTES[2:4], ("strides", (2, 2)))
    work = work_of(conv_forward(Problem("Conv", (("x", x), ("y", y)), attributes, (16, 1, 3, 3)), TARGET))
    assert (work.kind, work.shape) == ("Conv depthwise 3x3", "1x8x8x16 -> 16, stride 2")
    assert work.flops == 2 * 16 * 16 * 9
    product = work_of(gemm(GemmProblem(3, 5, 7, bias=(5,)), TARGET))
    assert (product.flops, product.bytes) == (2 * 3 * 5 * 7, 4 * (21 + 35 + 5 + 15))


def test_copies_and_updates_move_bytes_and_compute_nothing():
    moved = work_of(copy_map(MapType(1, 2, 2, 3, 8), MapType(1, 2, 2, 3, 16), TARGET))
    assert (moved.kind, moved.flops, moved.bytes) == ("copy", 0, 2 * 4 * 12)
    swept = work_of(update(sgd_problem(64, 0.9, False), TARGET))
    assert (swept.kind, swept.flops, swept.bytes) == ("update", 0, 4 * (2 * 64 + 64 + 4 + 2 * 64))


@pytest.fixture(scope="module")
def step():
    forward = build_forward("densenet40", batch=2, image=8, channels=1, growth=4, depth=1)
    return compile_step(ir.from_proto(build_training_graph(forward)), optimizer=SGD(lr=0.1, momentum=0.9), threads=1)


def test_a_profile_is_a_whole_step_and_every_launch_of_it(step):
    images, labels = np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64)
    before = step.steps
    profile = step.profile(images, labels)
    assert step.steps == before + 1
    assert [t.phase for t in profile] == [launch.phase for launch in step.program.launches]
    assert {t.phase for t in profile} == {*p.PHASES}
    assert all(t.work is not None and t.work.bytes > 0 for t in profile)
    with pytest.raises(Exception, match="update needs a backward"):
        step.update()


def test_the_work_is_in_a_compiled_file(step, tmp_path):
    step.export(tmp_path / "step.bnf")
    assert load_step(tmp_path / "step.bnf").program.works == step.program.works
