"""Forward graphs as training iterations: table 3.1 of [Tsai21], layer by layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.layerwise import Passes, forward_workload
from bnfuse.estimating.workload import Layer, Workload
from bnfuse.models import MODELS, build_graph, count_forward
from bnfuse.models.layers import Network, add, finish, start

MAP = 2 * 4 * 8 * 8 * 4  # bytes of a map of the block: float32 [2, 4, 8, 8]


COPIES = Passes(sums="consumer", step_sums=False, adds_copy=True)  # one backward layer for every forward layer


def block(passes: Passes = COPIES, **how) -> Workload:
    """stem -> conv, BN, ReLU -> + stem -> classifier."""
    graph, x = start("block", 2, 3, 8, None)
    x = graph.conv_layer(x, 4, 3, name="stem")
    y = graph.conv_layer(x, 4, 3, name="conv")
    y = graph.relu_layer(graph.batch_norm_layer(y, name="norm"), name="relu")
    y = graph.add_layer(y, x, name="add")
    y = graph.flatten_layer(y, name="flat")
    return forward_workload(finish(graph, graph.linear_layer(y, 5, name="classifier")), passes=passes, **how)


def layer_of(work: Workload, name: str) -> Layer:
    return next(layer for layer in work.layers if layer.name == name)


def maps(work: Workload, accesses) -> list[str]:
    """Names of the tensors that are no vectors."""
    return [work.tensors[a.tensor].name for a in accesses if work.tensors[a.tensor].kind != "vector"]


def backward(work: Workload, name: str) -> tuple[list[str], list[str]]:
    layer = layer_of(work, f"{name}/backward")
    return maps(work, layer.reads), maps(work, layer.writes)


def test_layers_run_forward_and_then_backward_in_reverse():
    assert [layer.name for layer in block().layers] == [
        *("stem", "conv", "norm", "relu", "add", "classifier", "loss", "loss/backward", "classifier/backward"),
        *("add/backward", "relu/backward", "norm/backward", "conv/backward", "stem/backward"),
    ]
    assert [layer.part for layer in block().layers][-2:] == ["conv", "stem"]
    phases = [layer.phase for layer in block().layers]
    assert phases == ["forward"] * 7 + ["backward"] * 7


def test_a_convolution_reads_x_w_and_dy_and_gives_dx_and_dw():
    reads, writes = backward(block(), "conv")
    assert reads == ["conv/gradient", "stem", "conv/weight", "stem/gradient"]  # the last: the sum so far
    assert writes == ["stem/gradient", "conv/weight/gradient"]


def test_the_first_layer_gives_no_dx():
    reads, writes = backward(block(), "stem")
    assert (reads, writes) == (["stem/gradient", "data", "stem/weight"], ["stem/weight/gradient"])
    work = block()
    assert layer_of(work, "stem/backward").flops == layer_of(work, "stem").flops
    assert layer_of(work, "conv/backward").flops == 2 * layer_of(work, "conv").flops


def test_bn_reads_its_input_and_relu_its_output():
    work = block()
    assert backward(work, "norm") == (["norm/gradient", "conv"], ["conv/gradient"])
    assert backward(work, "relu") == (["relu/gradient", "relu"], ["norm/gradient"])
    names = [work.tensors[a.tensor].name for a in layer_of(work, "norm/backward").accesses]
    assert {"norm/statistics", "norm/scale/gradient", "norm/bias/gradient"} <= {*names}


def test_an_add_copies_its_gradient_or_hands_it_on():
    assert backward(block(), "add") == (["add/gradient"], ["relu/gradient", "stem/gradient"])
    handed = block(passes=dataclasses.replace(COPIES, adds_copy=False))
    assert not any(layer.name == "add/backward" for layer in handed.layers)
    assert backward(handed, "relu")[0] == ["add/gradient", "relu"]
    reads, writes = backward(handed, "conv")
    assert "add/gradient" in reads and writes[0] == "stem/gradient/conv"  # not over what others may still read


def test_gradients_of_a_value_with_two_readers_are_added_by_a_layer_of_its_own_if_asked():
    work = block(passes=dataclasses.replace(COPIES, sums="layer"))
    total = layer_of(work, "conv/sum/stem")
    assert (total.type, total.phase, total.part) == ("Add", "backward", "conv")
    assert maps(work, total.reads) == ["stem/gradient", "stem/gradient/conv"]
    assert maps(work, total.writes) == ["stem/gradient"]
    assert total.flops == MAP // 4
    assert backward(work, "conv")[1] == ["stem/gradient/conv", "conv/weight/gradient"]


def test_in_place_a_relu_has_no_map_of_its_own():
    work = block(passes=dataclasses.replace(COPIES, in_place=True))
    relu = layer_of(work, "relu")
    assert maps(work, relu.reads) == maps(work, relu.writes) == ["norm"]
    assert backward(work, "relu") == (["norm/gradient", "norm"], ["norm/gradient"])


def test_bn_may_pass_over_its_maps_twice():
    def sweeps(work: Workload, name: str) -> dict[str, int]:
        return {work.tensors[a.tensor].name: a.sweeps for a in layer_of(work, name).accesses}

    twice = block(passes=dataclasses.replace(COPIES, norm_sweeps=2))
    assert sweeps(twice, "norm")["conv"] == 2 and sweeps(twice, "norm")["norm"] == 1
    assert sweeps(twice, "norm/backward")["conv"] == sweeps(twice, "norm/backward")["norm/gradient"] == 2
    assert set(sweeps(block(), "norm").values()) == {1}


def test_a_flatten_is_no_layer():
    work = block()
    assert "add" in maps(work, layer_of(work, "classifier").reads)
    assert backward(work, "classifier")[1] == ["add/gradient", "classifier/weight/gradient"]


def test_what_memory_holds_before_and_after():
    work = block()
    given = {tensor.name for tensor in work.tensors if tensor.given}
    assert {"data", "labels", "stem/weight", "norm/scale", "norm/running_mean", "classifier/bias"} <= given
    kept = {tensor.name for tensor in work.tensors if tensor.kept}
    assert kept == {
        *("loss", "norm/new_running_mean", "norm/new_running_var", "norm/scale/gradient", "norm/bias/gradient"),
        *(f"{name}/weight/gradient" for name in ("stem", "conv", "classifier")),
        "classifier/bias/gradient",
    }


def test_types_and_operations():
    work = block()
    assert layer_of(work, "norm").type == "BatchNorm" and layer_of(work, "classifier").type == "Dense"
    assert layer_of(work, "conv").flops == 2 * (MAP // 4) * 4 * 9
    assert layer_of(work, "norm").flops == 6 * MAP // 4
    depthwise = forward_workload(build_graph("mobilenetv2", batch=1, image=32))
    assert layer_of(depthwise, "stage1/block1/depthwise/conv/backward").type == "DepthwiseConv2D"


def test_poolings_and_masks():
    graph, x = start("pools", 2, 3, 8, None)
    x = graph.conv_layer(x, 4, 3, name="conv")
    x = graph.max_pool_layer(x, 2, name="max")
    x = graph.average_pool_layer(x, 2, name="average")
    x = graph.dropout_layer(x, 0.5, name="dropout")
    work = forward_workload(finish(graph, graph.global_pool_layer(x, name="pool")))
    assert backward(work, "pool") == (["pool/gradient"], ["dropout/gradient"])
    assert backward(work, "dropout") == (["dropout/gradient", "dropout/mask"], ["average/gradient"])
    assert backward(work, "average") == (["average/gradient"], ["max/gradient"])
    assert backward(work, "max") == (["max/gradient", "conv", "max"], ["conv/gradient"])
    mask = next(tensor for tensor in work.tensors if tensor.name == "dropout/mask")
    assert mask.bytes == 2 * 4 * 2 * 2  # a byte each


def test_a_concat_gives_every_operand_its_part():
    graph, x = start("concat", 2, 3, 8, None)
    branches = [graph.conv_layer(x, n, 1, name=f"branch{n}") for n in (2, 3)]
    y = graph.concat_layer(branches, name="concat")
    work = forward_workload(finish(graph, graph.global_pool_layer(y, name="pool")))
    assert backward(work, "concat") == (["concat/gradient"], ["branch2/gradient", "branch3/gradient"])
    sizes = [access.bytes for access in layer_of(work, "concat/backward").writes]
    assert sizes == [2 * n * 64 * 4 for n in (2, 3)]


def shared_weights(passes: Passes = COPIES) -> Workload:
    graph = Network("shared", None)
    x = gs.Variable("data", np.float32, [2, 4])
    graph.inputs = [x]
    weight = gs.Constant("weight", np.zeros((4, 4), np.float32))
    for index in (1, 2, 3):
        x = add(graph, "Gemm", [x, weight], f"step{index}", [2, 4], {"transB": 1})
    return forward_workload(finish(graph, x), passes=passes)


def test_the_gradient_of_a_shared_weight_is_added_up_in_place():
    work = shared_weights()
    assert backward(work, "step3") == (["logits/gradient", "step2", "weight"], ["step2/gradient", "weight/gradient"])
    assert backward(work, "step1")[0] == ["step1/gradient", "data", "weight", "weight/gradient"]
    assert backward(work, "step1")[1] == ["weight/gradient"]


def test_the_gradient_of_a_shared_weight_is_added_up_by_layers_of_their_own_if_asked():
    work = shared_weights(Passes())
    assert backward(work, "step2")[1] == ["step1/gradient", "weight/gradient/step2"]
    total = layer_of(work, "step2/sum/weight")
    assert maps(work, total.reads) == ["weight/gradient", "weight/gradient/step2"]
    assert maps(work, total.writes) == ["weight/gradient"]
    kept = [tensor.name for tensor in work.tensors if tensor.kept]
    assert "weight/gradient" in kept and "weight/gradient/step2" not in kept


def test_by_default_gradients_pass_through_an_add_and_layers_sum_them():
    names = [layer.name for layer in block(Passes()).layers]
    assert names[-5:] == ["relu/backward", "norm/backward", "conv/backward", "conv/sum/stem", "stem/backward"]


def test_a_parameter_that_is_added_has_a_gradient_of_its_own():
    graph = Network("places", None)
    x = gs.Variable("data", np.float32, [2, 4])
    graph.inputs = [x]
    x = add(graph, "Gemm", [x, gs.Constant("weight", np.zeros((4, 4), np.float32))], "dense", [2, 4], {"transB": 1})
    x = add(graph, "Add", [x, gs.Constant("places", np.zeros((2, 4), np.float32))], "add", [2, 4])
    work = forward_workload(finish(graph, x))
    assert backward(work, "add") == (["logits/gradient"], ["places/gradient"])
    assert backward(work, "dense")[0] == ["logits/gradient", "data", "weight"]
    assert {"places/gradient", "weight/gradient"} <= {tensor.name for tensor in work.tensors if tensor.kept}


def test_an_embedding_touches_as_much_of_its_table_as_there_are_words():
    graph = Network("words", None)
    words = gs.Variable("words", np.int64, [2, 3])
    graph.inputs = [words]
    table = gs.Constant("table", np.zeros((100, 4), np.float32))
    x = add(graph, "Gather", [table, words], "embedding", [2, 3, 4], {"axis": 0})
    work = forward_workload(finish(graph, x))
    rows = 2 * 3 * 4 * 4
    forward = layer_of(work, "embedding")
    assert [access.bytes for access in forward.reads] == [rows, 2 * 3 * 8]
    back = layer_of(work, "embedding/backward")
    assert maps(work, back.reads) == ["logits/gradient", "words"]
    assert [access.bytes for access in back.writes] == [rows]


def test_a_graph_with_a_loss_gets_no_other():
    graph, x = start("loss", 2, 3, 8, None)
    x = graph.global_pool_layer(graph.conv_layer(x, 5, 3, name="conv"), name="pool")
    labels = gs.Variable("labels", np.int64, [2])
    graph.inputs.append(labels)
    log = gs.Variable("log", np.float32, [2, 5])
    work = forward_workload(finish(graph, add(graph, "SoftmaxCrossEntropyLoss", [x, labels], "ce", [], {}, [log])))
    assert [layer.name for layer in work.layers if layer.type == "Loss"] == ["ce", "ce/backward"]
    assert backward(work, "ce") == (["labels", "log"], ["pool/gradient"])
    assert [tensor.name for tensor in work.tensors if tensor.kept] == ["logits", "conv/weight/gradient"]


def test_a_value_of_unknown_shape_is_refused_by_name():
    graph, x = start("unknown", 2, 3, 8, None)
    y = graph.relu_layer(x, name="relu")
    x.shape = ["N", 3, 8, 8]
    with pytest.raises(BnfuseError, match=r"node 'relu' \(Relu\) has 'data' of unknown shape.*fixed batch"):
        forward_workload(finish(graph, y))


def test_depth_first_runs_the_longer_branch_before_the_shortcut():
    graph = build_graph("resnet18", batch=1, image=32)
    names = [layer.name for layer in forward_workload(graph, order="dfs").layers]
    at = names.index("stage2/block1/shortcut/conv")
    assert names.index("stage2/block1/norm2") < at < names.index("stage2/block1/add")
    assert sorted(names) == sorted(layer.name for layer in forward_workload(graph).layers)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("how", [Passes(), dataclasses.replace(COPIES, in_place=True)], ids=["default", "copies"])
def test_every_network_of_the_zoo_reads_only_what_there_is(name, how):
    image = 64 if MODELS[name].image > 100 else 32
    work = forward_workload(build_graph(name, batch=2, image=image), passes=how)
    there = {index for index, tensor in enumerate(work.tensors) if tensor.given}
    for layer in work.layers:
        assert {access.tensor for access in layer.reads} <= there, layer.name
        there.update(access.tensor for access in layer.writes)
    assert there == set(range(len(work.tensors)))
    names = [tensor.name for tensor in work.tensors]
    assert len({*names}) == len(names)
    assert len({layer.name for layer in work.layers}) == len(work.layers)


@pytest.mark.parametrize("name", ["resnet18", "densenet40", "vgg11", "googlenet"])
def test_every_parameter_has_a_gradient_of_its_size(name):
    work = forward_workload(build_graph(name, batch=2, image=64))
    bytes_by_name = {tensor.name: tensor.bytes for tensor in work.tensors}
    trained = [n for n in bytes_by_name if f"{n}/gradient" in bytes_by_name and n.endswith(("weight", "scale", "bias"))]
    assert all(bytes_by_name[n] == bytes_by_name[f"{n}/gradient"] for n in trained)
    assert sum(bytes_by_name[n] for n in trained) == 4 * count_forward(name, batch=2, image=64).parameters


def test_the_forward_pass_counts_what_the_zoo_counts():
    work = forward_workload(build_graph("resnet50", batch=2, image=64))
    counted = sum(
        layer.flops for layer in work.layers if layer.phase == "forward" and (layer.is_dense or layer.type == "Pool")
    )
    assert counted == count_forward("resnet50", batch=2, image=64).flops
