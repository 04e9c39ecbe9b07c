"""The zoo: published sizes, valid graphs, refusals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bnfuse.core.errors import BnfuseError
from bnfuse.models import MODELS, build_forward, build_graph, count, count_forward

# trained parameters at the default sizes: 1000 classes, or 10 for the CIFAR forms
PUBLISHED = {
    "densenet121": 7_978_856,
    "densenet40": 1_019_722,
    "googlenet-plain": 6_998_552,  # bvlc_googlenet without its auxiliary heads
    "mobilenetv2": 3_504_872,
    "nin": 7_595_176,
    "resnet18": 11_689_512,
    "resnet20": 272_474,
    "resnet50": 25_557_032,
    "resnet56": 855_770,
    "squeezenet-plain": 1_248_424,  # [Iandola16], table 5.1
    "vgg11": 132_868_840,
    "vgg11-plain": 132_863_336,
    "vgg16": 138_365_992,
    "vgg16-plain": 138_357_544,
    "vgg19": 143_678_248,
    "vgg19-plain": 143_667_240,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    assert count_forward(name, batch=1).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [
        ("googlenet", {"kernel5": 3}, 6_624_904),  # torchvision's googlenet without auxiliary heads
        ("alexnet", {"groups": 2}, 60_965_224),  # bvlc_alexnet
        ("alexnet", {}, 62_378_344),
        ("densenet121", {"concat": "nested"}, 7_978_856),
        ("squeezenet-plain", {"bypass": "simple"}, 1_248_424),  # [Iandola16], table 5.3: 4.8 MB as without
        ("squeezenet-plain", {"bypass": "complex"}, 1_248_424 + 97 * 128 + 129 * 256 + 257 * 384 + 385 * 512),
    ],
)
def test_parameters_with_metaparameters(name, settings, parameters):
    assert count_forward(name, batch=1, **settings).parameters == parameters


@pytest.mark.parametrize(
    ("name", "gigaflops"),
    [("resnet18", 3.63), ("resnet50", 8.18), ("vgg16-plain", 30.94), ("densenet121", 5.67), ("mobilenetv2", 0.60)],
)
def test_flops_are_twice_the_published_multiplications(name, gigaflops):
    assert count_forward(name, batch=1).flops / 1e9 == pytest.approx(gigaflops, rel=0.005)


def test_flops_of_network_in_network_are_those_of_papers_003_table_4_2():
    assert count_forward("nin", batch=1024).flops / 1e12 == pytest.approx(2.27, rel=0.005)


def test_every_name_of_the_issue_is_there():
    assert len(MODELS) == 19 and set(PUBLISHED) < set(MODELS)


def small_sizes(name: str) -> dict[str, int]:
    sizes = {"batch": 2, "image": 64 if MODELS[name].image > 64 else 32, "classes": 7, "channels": 1}
    return sizes | ({"hidden": 32} if "hidden" in MODELS[name].metaparameters else {})


@pytest.mark.parametrize("name", MODELS)
def test_graph_is_valid_and_its_shapes_are_right(name):
    model = build_forward(name, **small_sizes(name))
    onnx.checker.check_model(model)
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, check_type=True)
    found = {value.name: value.type.tensor_type for value in inferred.graph.value_info}
    assert [(v.name, v.type.tensor_type) for v in model.graph.value_info if found[v.name] != v.type.tensor_type] == []
    assert [d.dim_value for d in inferred.graph.output[0].type.tensor_type.shape.dim] == [2, 7]
    assert model.ir_version <= 10 and model.opset_import[0].version == 18
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names) and all(names)


@pytest.mark.parametrize("name", MODELS)
def test_smallest_images_either_build_or_say_so(name):
    for image in (1, 8, 16, 32):
        try:
            build_graph(name, image=image)
        except BnfuseError as error:
            assert str(error).startswith(f"{name}: node ") and "larger --image" in str(error)


def test_32_pixels_suffice_for_every_network():
    for name in MODELS:
        assert build_graph(name, image=32).outputs[0].shape[0] == 16


def test_batch_norms_are_in_training_mode_with_running_statistics():
    model = build_forward("resnet20", batch=2)
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    assert len(norms) == 21
    for node in norms:
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        assert attrs == {"training_mode": 1, "epsilon": pytest.approx(1e-5), "momentum": pytest.approx(0.9)}
        assert len(node.output) == 3


@pytest.mark.parametrize(("name", "norms"), [("vgg16", 13), ("vgg16-plain", 0), ("densenet121", 121), ("resnet50", 53)])
def test_number_of_batch_norms(name, norms):
    assert sum(node.op == "BatchNormalization" for node in build_graph(name).nodes) == norms


def test_values_are_kaiming_and_depend_on_the_seed_and_the_name_alone():
    a, b, c = (values_of(build_forward("resnet20", seed=seed)) for seed in (0, 0, 1))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    weight = "stage3/block3/conv2/weight"
    assert not np.array_equal(a[weight], c[weight])
    assert a[weight].std() == pytest.approx(np.sqrt(2 / (64 * 9)), rel=0.02)
    assert np.array_equal(a[weight], values_of(build_forward("resnet20", image=16))[weight])
    assert (a["stem/norm/scale"] == 1).all() and not a["stem/norm/bias"].any()
    assert (a["stem/norm/running_var"] == 1).all() and not a["stem/norm/running_mean"].any()


def values_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def concats(graph) -> dict[str, list[int]]:
    return {n.name: [x.shape[1] for x in n.inputs] for n in graph.nodes if n.op == "Concat"}


def test_densenet_concatenates_the_flat_list_of_all_earlier_outputs():
    found = concats(build_graph("densenet40", depth=2))
    assert found["block1/layer1/concat"] == [16]
    assert found["block1/layer2/concat"] == [16, 12]
    assert found["block1/concat"] == [16, 12, 12]


def test_densenet_concatenates_nested_pairs_on_request():
    found = concats(build_graph("densenet40", depth=2, concat="nested"))
    assert found["block1/layer1/concat"] == [16, 12]
    assert found["block1/layer2/concat"] == [28, 12]


@pytest.mark.parametrize(("bypass", "adds"), [("none", 0), ("simple", 4), ("complex", 8)])
def test_squeezenet_bypasses(bypass, adds):
    for name in ("squeezenet", "squeezenet-plain"):
        assert sum(node.op == "Add" for node in build_graph(name, bypass=bypass).nodes) == adds


def test_metaparameters_may_be_strings():
    model = build_forward("densenet40", growth="4", depth="1", image=8, concat="nested")
    assert count(model).parameters == count_forward("densenet40", growth=4, depth=1, image=8).parameters


def test_count_of_a_file_equals_count_of_the_graph():
    model = build_forward("squeezenet", batch=2, image=64)
    assert count(model) == count_forward("squeezenet", batch=2, image=64)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet19", {}, "no network named 'resnet19' in the zoo"),
        ("resnet18", {"batch": 0}, "resnet18: batch=0 is out of range"),
        ("resnet18", {"image": 1 << 20}, "resnet18: image=1048576 is out of range"),
        ("resnet18", {"seed": -1}, "resnet18: seed=-1 is out of range"),
        ("resnet18", {"growth": 3}, "resnet18 has no metaparameter 'growth': it has stem=large"),
        ("vgg16", {"depth": 11}, "vgg16 has no metaparameter 'depth'"),
        ("densenet40", {"growth": "many"}, "densenet40: growth=many must be of type int"),
        ("densenet40", {"concat": "deep"}, "densenet40: concat=deep is unknown"),
        ("resnet18", {"batch": "4"}, "resnet18: batch=4 is no whole number"),
        ("resnet18", {"batch": 2.5}, "resnet18: batch=2.5 is no whole number"),
        ("resnet18", {"image": "32"}, "resnet18: image=32 is no whole number"),
        ("resnet18", {"seed": "3"}, "resnet18: seed=3 is out of range: it must be a whole number"),
        ("resnet18", {"name": "x"}, "resnet18 has no metaparameter 'name'"),
        ("densenet40", {"depth": 16384}, "densenet40: depth=16384 is out of range"),
        ("densenet40", {"growth": -4}, "densenet40: growth=-4 is out of range"),
        ("squeezenet", {"bypass": "some"}, "squeezenet: bypass=some is unknown"),
        ("vgg16", {"dropout": "1.5"}, "vgg16: dropout=1.5 is not a ratio"),
        ("vgg16", {"image": 16}, "vgg16: node 'stage5/pool' (MaxPool) has a 2x2 window, but its input is 1x1"),
        ("alexnet", {"groups": 5}, "alexnet: node 'conv2/conv' (Conv) has 96 input and 256 output channels"),
    ],
)
def test_bad_requests_are_one_line(name, settings, message):
    with pytest.raises(BnfuseError) as caught:
        build_forward(name, **settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_an_image_need_not_be_a_square():
    graph = build_graph("resnet20", batch=2, image=(20, 36), classes=7)
    assert graph.inputs[0].shape == [2, 3, 20, 36] and graph.outputs[0].shape == [2, 7]
    assert build_graph("nin", image=(32, 300)).outputs[0].shape == [16, 1000]  # the short side decides on the form
    with pytest.raises(BnfuseError, match="image=0 is out of range"):
        build_graph("resnet20", image=(20, 0))
