"""Network in Network: the variants of [Iandola16], and that they are of the large form alone."""

import onnx
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.models import build_forward, build_graph


def shapes(**settings):
    graph = build_graph("nin", batch=1, **settings)
    return {node.name: tuple(node.outputs[0].shape[1:]) for node in graph.nodes}


def test_filters8_widens_conv8_and_what_conv9_reads():
    graph = build_graph("nin", batch=1, filters8=1536)
    weights = {node.name: tuple(node.inputs[1].shape) for node in graph.nodes if node.op == "Conv"}
    assert (weights["conv8/conv"], weights["conv9/conv"]) == ((1536, 384, 1, 1), (384, 1536, 1, 1))
    assert shapes(filters8=1536)["pool9"] == shapes()["pool9"]


def test_kernel7_and_pad7_are_those_of_conv7_and_poolings_round_up():
    found = shapes(kernel7=6, pad7=2)
    assert (found["conv7/conv"], found["conv9/relu"], found["pool9"]) == ((384, 12, 12), (384, 12, 12), (384, 6, 6))


def test_without_pool3_the_maps_below_are_larger():
    found = shapes(pool3="false")
    assert "pool3" not in found and found["conv4/conv"] == (256, 55, 55) and found["pool9"] == (384, 13, 13)


def test_maps_of_images_twice_as_large():
    found = shapes(image=454)
    assert [found[x][1] for x in ("conv1/conv", "pool3", "pool6", "pool9")] == [111, 55, 27, 13]


@pytest.mark.parametrize("change", [{"filters8": 8}, {"kernel7": 5}, {"pad7": 0}, {"pool3": False}])
def test_changes_of_the_small_form_are_refused(change):
    with pytest.raises(BnfuseError, match="nin: filters8, kernel7, pad7 and pool3 are of the large form"):
        build_graph("nin", image=32, **change)


@pytest.mark.parametrize("change", [{"filters8": 8}, {"kernel7": 4, "pad7": 2}, {"pool3": False}])
def test_changed_networks_are_valid_and_their_shapes_right(change):
    model = build_forward("nin", batch=1, image=67, classes=3, **change)
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, check_type=True)
    found = {value.name: value.type.tensor_type for value in inferred.graph.value_info}
    assert [v.name for v in model.graph.value_info if found[v.name] != v.type.tensor_type] == []


def test_without_filters_conv8_says_so():
    with pytest.raises(BnfuseError, match=r"nin: node 'conv8/conv' .* has 0 output channels"):
        build_graph("nin", filters8=0)
