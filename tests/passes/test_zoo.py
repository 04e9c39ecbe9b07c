"""Match counts on the zoo: a pattern that silently stops matching is the costliest bug of a fusing compiler."""

import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph
from bnfuse.models import build_forward
from bnfuse.passes import LEVELS, rewrite

SWEEPS = {"BatchNorm", "BatchNormGrad", "Relu", "PointwiseGradReluGrad", "Split", "Sum"}


@pytest.mark.parametrize(
    ("name", "image", "batch_norms", "unfused"),
    [
        ("densenet121", 32, 121, 0),
        ("densenet40", 32, 39, 0),
        ("resnet18", 32, 20, 0),
        ("resnet50", 32, 53, 0),
        ("resnet20", 32, 21, 0),
        ("mobilenetv2", 32, 52, 0),
        ("vgg16", 32, 13, 0),
        ("googlenet", 64, 57, 0),
        ("squeezenet", 64, 26, 4),  # a Dropout sits between the last Concat and its reader
    ],
)
def test_every_batch_norm_is_found_and_fused(name, image, batch_norms, unfused):
    model = ir.from_proto(build_training_graph(build_forward(name, batch=2, image=image, classes=10)))
    report = rewrite(model).report
    assert (report.batch_norms, len(report.unfused)) == (batch_norms, unfused), report.unfused


@pytest.mark.parametrize("concat", ["flat", "nested"])
def test_no_sweep_is_left_on_the_maps_of_dense_blocks(concat):
    forward = build_forward("densenet121", batch=2, image=32, classes=10, concat=concat)
    result = rewrite(ir.from_proto(build_training_graph(forward)))
    kinds = [node.op_type for node in result.model.graph]
    assert not SWEEPS & {*kinds}
    assert kinds.count("BatchNormGradNormalizeReluConvGradReluGradReduceAccumulate") == 58
    assert kinds.count("SliceBatchNormGradNormalizeReluConvGradReluGradReduce") == 58
    assert kinds.count("NormalizeReluConvStatistics") == 116


def test_what_each_level_leaves_of_resnet18():
    model = ir.from_proto(build_training_graph(build_forward("resnet18", batch=2, image=32, classes=10)))
    left = {level: {entry.node for entry in rewrite(model, level=level).report.unfused} for level in LEVELS}
    assert {level: len(nodes) for level, nodes in left.items()} == {
        "none": 20,
        "rcf": 20,
        "mvf": 20,
        "bnff": 0,
        "icf": 0,
    }
