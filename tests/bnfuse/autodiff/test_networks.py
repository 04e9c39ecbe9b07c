"""Gradients of parts of networks, in which several rules meet, against autograd."""

from __future__ import annotations

import numpy as np
import pytest
from differentiated import check, floats, ints, node
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.opset.spec import DOMAIN

pytestmark = pytest.mark.torch


def test_attention():
    """Two heads of width 3, over 4 tokens."""
    nodes = [
        node("MatMul", "x w", "qkv", name="project"),
        node("Reshape", "qkv heads", "r", name="heads"),
        node("Transpose", "r", "t", name="turn", perm=[2, 0, 3, 1, 4]),
        node("Split", "t", "q3 k3 v3", name="part", axis=0, num_outputs=3),
        *(node("Squeeze", f"{name}3 first", name, name=f"squeeze_{name}") for name in "qkv"),
        node("Transpose", "k", "kt", name="turn_k", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "s", name="score"),
        node("Mul", "s scale", "scaled", name="scale"),
        node("Where", "allowed scaled never", "masked", name="mask"),
        node("Softmax", "masked", "p", name="softmax"),
        node("MatMul", "p v", "o", name="mix"),
        node("Transpose", "o", "ot", name="back", perm=[0, 2, 1, 3]),
        node("Reshape", "ot whole", "y", name="join"),
    ]
    constants = {"heads": ints(2, 4, 3, 2, 3), "first": ints(0), "scale": np.array(3**-0.5), "whole": ints(2, 4, 6)}
    constants |= {"allowed": np.tri(4, dtype=bool), "never": np.array(-1e9)}
    feeds = {"x": floats(2, 4, 5), "w": floats(5, 18, seed=1)}

    def function(torch, x, w):
        q, k, v = (x @ w).reshape(2, 4, 3, 2, 3).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, 4, 6)

    check(nodes, feeds, function, constants=constants)


def test_a_layer_norm_that_is_written_out():
    nodes = [
        node("ReduceMean", "x last", "mean", name="mean"),
        node("Sub", "x mean", "centred", name="centre"),
        node("Pow", "centred two", "squares", name="square"),
        node("ReduceMean", "squares last", "variance", name="variance"),
        node("Add", "variance epsilon", "shifted", name="shift"),
        node("Sqrt", "shifted", "deviation", name="root"),
        node("Div", "centred deviation", "normalised", name="divide"),
        node("Mul", "normalised scale", "scaled", name="scale"),
        node("Add", "scaled bias", "y", name="bias"),
    ]
    constants = {"last": ints(-1), "two": np.array(2.0), "epsilon": np.array(1e-3)}
    feeds = {"x": floats(2, 3, 5), "scale": floats(5, seed=1), "bias": floats(5, seed=2)}

    def function(torch, x, scale, bias):
        return torch.nn.functional.layer_norm(x, (5,), scale, bias, 1e-3)

    check(nodes, feeds, function, constants=constants)


def test_a_residual_block_with_batch_norms_and_a_loss():
    def batch_norm(x, i):
        operands = f"{x} scale{i} bias{i} mean variance"
        results = f"n{i} nm{i} nv{i} m{i} s{i}"
        return node("BatchNorm", operands, results, name=f"bn{i}", domain=DOMAIN, epsilon=0.125, momentum=0.5)

    nodes = [
        node("Conv", "x w0", "c0", name="conv0", pads=[1, 1, 1, 1]),
        batch_norm("c0", 0),
        node("Relu", "n0", "r0", name="relu0"),
        node("Conv", "r0 w1", "c1", name="conv1", pads=[1, 1, 1, 1]),
        batch_norm("c1", 1),
        node("Add", "n1 x", "a", name="skip"),
        node("Relu", "a", "r1", name="relu1"),
        node("MaxPool", "r1", "p", name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", "p", "g", name="gap"),
        node("Flatten", "g", "f", name="flat"),
        node("Gemm", "f w2 b2", "z", name="fc", transB=1),
        node("SoftmaxCrossEntropyLoss", "z labels", "y", name="loss"),
    ]
    feeds = {"x": floats(3, 4, 5, 6), "w0": floats(4, 4, 3, 3, seed=1), "w1": floats(4, 4, 3, 3, seed=2)}
    feeds |= {f"{name}{i}": floats(4, seed=3 + i, low=0.5) for i in range(2) for name in ("scale", "bias")}
    feeds |= {"w2": floats(7, 4, seed=5), "b2": floats(7, seed=6), "labels": ints(0, 6, 2)}

    def function(torch, x, w0, w1, scale0, bias0, scale1, bias1, w2, b2, labels):
        f = torch.nn.functional
        r = f.batch_norm(f.conv2d(x, w0, padding=1), None, None, scale0, bias0, True, 0.5, 0.125).relu()
        r = f.batch_norm(f.conv2d(r, w1, padding=1), None, None, scale1, bias1, True, 0.5, 0.125)
        pooled = f.max_pool2d((r + x).relu(), 2).mean((2, 3))
        return f.cross_entropy(f.linear(pooled, w2, b2), labels)

    constants = {"mean": np.zeros(4), "variance": np.ones(4)}
    check(nodes, feeds, function, constants=constants, tolerance=1e-9)


def test_halves_of_channels_that_are_shuffled():
    nodes = [
        node("Split", "x halves", "a b", name="split", axis=1),
        node("Mul", "b w", "c", name="branch"),
        node("Concat", "a c", "d", name="join", axis=1),
        node("Reshape", "d groups", "e", name="groups"),
        node("Transpose", "e", "f", name="shuffle", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "f whole", "y", name="whole"),
    ]
    constants = {"halves": ints(2, 2), "groups": ints(2, 2, 2, 3, 3), "whole": ints(2, 4, 3, 3)}

    def function(torch, x, w):
        a, b = x.chunk(2, 1)
        return torch.cat([a, b * w], 1).reshape(2, 2, 2, 3, 3).transpose(1, 2).reshape(2, 4, 3, 3)

    check(nodes, {"x": floats(2, 4, 3, 3), "w": floats(2, 1, 1, seed=1)}, function, constants=constants)


def test_channels_that_are_weighed_by_their_means():
    nodes = [
        node("GlobalAveragePool", "x", "g", name="squeeze"),
        node("Conv", "g w b", "h", name="excite"),
        node("Relu", "h", "s", name="gate"),
        node("Mul", "x s", "y", name="weigh"),
    ]
    feeds = {"x": floats(2, 3, 4, 4), "w": floats(3, 3, 1, 1, seed=1), "b": floats(3, seed=2)}

    def function(torch, x, w, b):
        return x * torch.nn.functional.conv2d(x.mean((2, 3), True), w, b).relu()

    check(nodes, feeds, function)


UNARY = ["Exp", "Sin", "Neg", "Atan", "Asinh"]
BINARY = ["Add", "Sub", "Mul"]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_graph_of_elementwise_operators(data):
    """Each node reads what came before it, several times or never; the last ones are outputs, and one between."""
    nodes, names = [], ["x", "z"]
    for place in range(data.draw(st.integers(1, 8))):
        op = data.draw(st.sampled_from(UNARY + BINARY))
        read = [data.draw(st.sampled_from(names)) for _ in range(1 if op in UNARY else 2)]
        nodes.append(node(op, " ".join(read), f"v{place}", name=f"n{place}"))
        names.append(f"v{place}")
    outputs = list(dict.fromkeys([names[-1], data.draw(st.sampled_from(names[2:]))]))

    def function(torch, x, z):
        values = {"x": x, "z": z}
        for each in nodes:
            operator = getattr(torch, each.op_type.lower())
            values[each.output[0]] = operator(*(values[name] for name in each.input))
        return tuple(values[name] for name in outputs)

    feeds = {"x": floats(2, 3, low=-0.9, high=0.9), "z": floats(3, seed=1, low=-0.9, high=0.9)}
    check(nodes, feeds, function, outputs=outputs, forward=False, tolerance=1e-8)
