"""Coefficients of several BatchNorms in one launch."""

import onnx_ir as ir
import pytest

from bnfuse import passes
from bnfuse.build import build_training_graph
from bnfuse.graph.signature import signature_of
from bnfuse.models import build_forward
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.registry import COEFFICIENTS
from bnfuse.runtime.lowering.graph import lower
from bnfuse.runtime.lowering.grouping import MOST
from bnfuse.runtime.program import program as p


@pytest.fixture
def lowered():
    def make(name: str, level: str = "icf", **options: int):
        forward = build_forward(name, batch=2, **options)
        model = passes.rewrite(ir.from_proto(build_training_graph(forward)), level=level).model
        return lower(model.graph, signature_of(model), resolve("cpu", 2), opset=17)

    return make


def groups(made) -> list[int]:
    """How many operators each launch of coefficients stands for, in order."""
    requests = [made.requests[launch.kernel] for launch in made.program.launches]
    return [len(request.arguments[0]) for request in requests if request.kind == COEFFICIENTS]


def test_a_batch_norm_takes_one_launch_forward_and_one_backward(lowered):
    made = lowered("densenet40", image=32)
    assert groups(made) == [1] * 39 + [2] * 39  # 39 BNs: finalize; terms and the gradient's finalize


def test_branches_of_an_inception_module_share_launches(lowered):
    sizes = groups(lowered("googlenet", image=64))
    assert sum(sizes) == 3 * 57
    assert len(sizes) < 2 * 57
    assert max(sizes) <= MOST


def test_no_kernel_is_left_that_nothing_launches(lowered):
    made = lowered("googlenet", image=64)
    assert {launch.kernel for launch in made.program.launches} == {*range(len(made.requests))}
    assert len(made.program.kernels) == len(made.requests) == len(made.program.works)


def test_what_is_read_was_written_before(lowered):
    """Grouping reorders launches: every storage in the arena is still written before it is read."""
    program = lowered("googlenet", image=64).program
    written: set[tuple[int, int]] = set()

    def covered(storage: p.Storage) -> bool:
        first, last = storage.offset, storage.offset + storage.bytes
        return any(start < last and first < stop for start, stop in written)

    for launch in program.launches:
        for buffer in launch.buffers:  # a group's members one after the other, operands before results
            storage = program.storages[buffer.storage]
            if storage.region == p.ARENA and buffer.access == "in":
                assert covered(storage), f"{launch.node} reads what nothing wrote"
            elif storage.region == p.ARENA:
                written.add((storage.offset, storage.offset + storage.bytes))
