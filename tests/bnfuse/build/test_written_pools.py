"""Adaptive poolings that exporters write out: read as products with matrices, and fused as Resamples."""

import numpy as np
import onnx
import pytest
from hand_made import Network, check
from onnx import helper, numpy_helper

from bnfuse.build import build

SIZE = 8


class Pooled(Network):
    """A network with a pooling in the middle, as torch's exporters write it."""

    def gathered(self, x: str, out: tuple[int, int]) -> tuple[str, list[np.ndarray]]:
        """Write the windows of `out` rows and columns, [N, C, OH, KH, OW, KW]; gives which elements are theirs too."""
        places, inside = zip(*(windows(SIZE, count) for count in out), strict=True)
        index = np.stack(np.broadcast_arrays(places[0][:, :, None, None], places[1][None, None]), -1)
        turned = self.put("Transpose", x, perm=[2, 3, 0, 1])
        taken = self.put("GatherND", turned, self.value(index, np.int64))
        return self.put("Transpose", taken, perm=[4, 5, 0, 1, 2, 3]), list(inside)

    def mean(self, x: str, out: tuple[int, int]) -> str:
        """Write a pooling whose windows are all of one size."""
        taken, _ = self.gathered(x, out)
        return self.put("ReduceMean", taken, self.value([3, 5], np.int64), keepdims=0, width=self.width[x])

    def masked(self, x: str, out: tuple[int, int]) -> str:
        """Write one whose windows differ in size: masked, added up element by element, and divided."""
        taken, (rows, columns) = self.gathered(x, out)
        zero = self.value(0.0)
        taken = self.put("Where", self.value(~rows[:, :, None, None], bool), zero, taken, width=self.width[x])
        taken = self.put("Where", self.value(~columns, bool), zero, taken, width=self.width[x])
        parts = []
        for i in range(rows.shape[1]):
            for j in range(columns.shape[1]):
                part = self.put("Gather", taken, self.value(i, np.int64), axis=3)
                parts.append(self.put("Gather", part, self.value(j, np.int64), axis=4))
        total = parts[0]
        for part in parts[1:]:
            total = self.put("Add", total, part)
        counts = np.outer(rows.sum(1), columns.sum(1)).astype(np.float32)
        self.nodes.append(helper.make_node("Constant", [], ["counts"], value=numpy_helper.from_array(counts)))
        return self.put("Div", total, "counts")


def windows(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the elements of each window, [out, longest], and which of them belong to it."""
    begin = np.arange(out) * size // out
    length = -(-(np.arange(1, out + 1) * size) // out) - begin
    steps = np.arange(length.max())
    return np.minimum(begin[:, None] + steps, size - 1), steps < length[:, None]


def network(kind: str, out: tuple[int, int]) -> onnx.ModelProto:
    net = Pooled()
    y = net.block("x", 4)
    return net.classified(net.block(getattr(net, kind)(y, out), 4))


CASES = [("mean", (7, 7)), ("masked", (3, 3)), ("masked", (5, 3)), ("masked", (6, 7))]


@pytest.mark.parametrize(("kind", "out"), CASES)
def test_a_written_pooling_is_fused_as_a_resample(kind, out):
    result = check(network(kind, out))
    assert result.report.unfused == ()
    ops = [node.op_type for node in result.model.graph]
    assert "NormalizeReluResample" in ops
    assert any(op.startswith("NormalizeResampleGrad") for op in ops)
    assert not {"GatherND", "ScatterND", "Where", "MatMul"} & {*ops}


@pytest.mark.parametrize(("kind", "out"), CASES)
def test_its_matrices_are_those_of_torch(kind, out):
    torch = pytest.importorskip("torch")
    built = build(network(kind, out))
    assert any("1 adaptive poolings" in note for note in built.notes)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.model.graph.initializer}
    along_rows, along_columns = [node for node in built.model.graph.node if node.op_type == "MatMul"][:2]
    for matrix, count in zip((arrays[along_rows.input[0]], arrays[along_columns.input[1]].T), out, strict=True):
        expected = torch.nn.functional.adaptive_avg_pool1d(torch.eye(SIZE)[None], count)[0].T
        np.testing.assert_allclose(matrix, expected.numpy(), atol=1e-7)
    assert len(built.trainable) == len(build(network("mean", (7, 7))).trainable)


def test_what_weighs_its_windows_stays():
    net = Pooled()
    taken, _ = net.gathered(net.block("x", 4), (7, 7))
    weighed = net.put("Mul", taken, net.value(net.rng.uniform(1, 2, (7, 1))))
    pooled = net.put("ReduceMean", weighed, net.value([3, 5], np.int64), keepdims=0, width=4)
    built = build(net.classified(net.block(pooled, 4)))
    assert not any("adaptive" in note for note in built.notes)
    assert "GatherND" in {node.op_type for node in built.model.graph.node}
