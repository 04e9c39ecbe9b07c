"""Poolings of every window: equal to torch in float64 everywhere, or refused at build in one line."""

from __future__ import annotations

import collections
import dataclasses
import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pooling_cases import Case, by_onnxruntime, draw, judge, pooled

from bnfuse.api import compile as compile_step
from bnfuse.api import load
from bnfuse.build import build
from bnfuse.core.errors import BnfuseError

PLAIN = Case("MaxPool", (2, 2, 7, 7), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), ceil=True, include=False, auto_pad=None)
REASONS = re.compile(
    "do not fit|wholly in the padding|no padding as large|window with dilations|onnxruntime computes it wrongly|"
    "would start in the padding"
)


@pytest.mark.torch
def test_sixty_poolings_equal_torch_or_are_refused():
    rng = np.random.default_rng(60)
    found = [judge(draw(rng), seed) for seed in range(60)]
    kinds = collections.Counter(outcome.partition(":")[0] for outcome in found)
    assert set(kinds) == {"equal", "refused"}, [outcome for outcome in found if "WRONG" in outcome]
    assert kinds["equal"] >= 40
    assert all(REASONS.search(outcome) and "\n" not in outcome for outcome in found if outcome != "equal"), found


# the last window starts in the padding behind the map, on one axis while another hangs over, or on both
MISCOUNTED = [
    dataclasses.replace(PLAIN, kernel=(2, 3), strides=(3, 2), shape=(2, 2, 7, 8), pads=(1, 0, 1, 0)),
    dataclasses.replace(PLAIN, op="AveragePool", kernel=(3, 3), strides=(4, 3), shape=(2, 2, 6, 6), pads=(1, 1, 1, 1)),
]


@pytest.mark.torch
@pytest.mark.parametrize("case", MISCOUNTED, ids=lambda case: case.op)
def test_a_window_that_starts_in_the_padding_is_none(case):
    assert judge(case, 0, compiled=True) == "equal"
    built = build(case.model(), loss="mse")
    assert len(built.notes) == 1 and "set ceil_mode to 0" in built.notes[0]


@pytest.mark.torch
def test_what_follows_such_a_pooling_sees_the_right_size():
    """onnx's shape inference gives a row too many: the product behind it would not fit."""
    import torch

    case = MISCOUNTED[0]
    y = pooled(case, torch.zeros(case.shape))
    model = case.model()
    columns = y[0].numel()
    model.graph.node.append(helper.make_node("Flatten", ["y"], ["f"], "flat"))
    model.graph.node.append(helper.make_node("Gemm", ["f", "m"], ["z"], "gemm"))
    weight = np.repeat(np.arange(1, columns + 1, dtype=np.float32)[:, None], 3, axis=1)  # the same for each class
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "m"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    built = build(model).model
    feeds = {"x": np.ones(case.shape, np.float32), "labels": np.array([0, 1])}
    feeds |= {t.name: onnx.numpy_helper.to_array(t) for t in built.graph.initializer if t.name in ("w", "m")}
    loss, _ = by_onnxruntime(built, feeds)
    assert loss == pytest.approx(np.log(3), rel=1e-6)


REFUSED = {
    "do not fit": dataclasses.replace(PLAIN, kernel=(8, 2)),
    "onnxruntime computes it wrongly": dataclasses.replace(
        PLAIN, op="AveragePool", kernel=(3, 3), shape=(2, 2, 8, 8), pads=(1, 1, 1, 1), include=True
    ),
    "takes no padding as large as the kernel": dataclasses.replace(PLAIN, pads=(1, 1, 2, 2), shape=(2, 2, 8, 8)),
    "lies wholly in the padding": dataclasses.replace(
        PLAIN, shape=(2, 2, 1, 1), kernel=(2, 2), pads=(1, 1, 1, 1), dilations=(2, 2)
    ),
    "averages a window with dilations": dataclasses.replace(PLAIN, op="AveragePool", dilations=(2, 1)),
    "would start in the padding behind the map": dataclasses.replace(
        PLAIN, shape=(2, 2, 4, 4), kernel=(4, 1), strides=(2, 4), pads=(3, 0, 3, 0), dilations=(2, 3)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_kernel_computes_is_refused(reason):
    with pytest.raises(BnfuseError, match=rf"node 'p' \({REFUSED[reason].op}\) .*{reason}"):
        build(REFUSED[reason].model(), loss="mse")


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_training_graph_that_counts_such_a_window_is_refused_when_read(op, tmp_path):
    """Another tool's graph, whose shapes follow onnxruntime."""
    case = dataclasses.replace(
        PLAIN, op=op, kernel=(2, 2), strides=(3, 3), shape=(2, 2, 4, 4), pads=(1, 1, 1, 1), ceil=False
    )
    model = build(case.model(), loss="mse").model
    for node in model.graph.node:
        if node.op_type.startswith(op):
            given = {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1}
            kept = [attribute for attribute in node.attribute if attribute.name not in given]
            del node.attribute[:]
            node.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in given.items())])
    with pytest.raises(BnfuseError, match=rf"node 'p' \({op}\) has ceil_mode=1 and a last window"):
        load(model)
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(BnfuseError, match=rf"foreign.onnx: node 'p' \({op}\) has ceil_mode=1 and a last window"):
        compile_step(str(tmp_path / "foreign.onnx"))


def test_column_major_indices_that_nobody_reads_are_those_by_rows():
    model = dataclasses.replace(PLAIN, ceil=False).model()
    model.graph.node[1].attribute.append(helper.make_attribute("storage_order", 1))
    pool = next(node for node in build(model, loss="mse").model.graph.node if node.op_type == "MaxPool")
    assert not any(attribute.name == "storage_order" and attribute.i for attribute in pool.attribute)
