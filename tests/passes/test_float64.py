"""Every rewrite is exact: in float64 the rewritten graph and its source differ by rounding alone."""

import numpy as np
import onnx_ir as ir
import pytest

from bnfuse.build import build_training_graph
from bnfuse.graph.training_graph import without_dropout
from bnfuse.models import build_forward
from bnfuse.passes import rewrite

pytestmark = pytest.mark.torch

DENSE = """
    c0 = conv(x, 4)
    n1 = bn(c0)
    r1 = relu(n1)
    y1 = conv(r1, 3, k=3)
    t2 = cat(c0, y1)
    n2 = bn(t2, eps=2, zero={zero})
    r2 = relu(n2)
    y2 = conv(r2, 2, k=3)
    t3 = cat(t2, y2)
    n3 = bn(t3, eps=3)
    r3 = relu(n3)
    z = conv(r3, 6)
    plain = conv(t2, 6, k=3)
    s = add(z, plain)
    out = avgpool(s)
"""
RESIDUAL = """
    a = conv(x, 4)
    n = bn(a)
    r = relu6(n)
    p = maxpool(r, k=3)
    b = conv(p, 4, k=3)
    m = bn(b)
    s = add(m, p)
    u = silu(s)
    c = conv(u, 4, k=3, g=2)
    d = bn(c)
    e = conv(p, 4)
    f = bn(e)
    g = add(d, f)
    out = relu(g)
"""
UNET = """
    a = conv(x, 4, k=3)
    n = bn(a)
    r = relu(n)
    p = maxpool(r, k=2)
    b = conv(p, 6, k=3)
    m = bn(b)
    s = relu(m)
    u = up(s, 4, bias=1)
    v = bn(u)
    w = relu(v)
    t = cat(w, r)
    c = conv(t, 5, k=3)
    d = bn(c)
    e = silu(d)
    f = up(e, 4, k=4, p=1)
    g = bn(f)
    h = relu(g)
    out = up(h, 3, k=3, s=3, bias=1)
"""


def worst(expected, found):
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    return max(
        float(np.linalg.norm(found[name] - value)) / (float(np.linalg.norm(value)) + floor)
        for name, value in expected.items()
    )


def feeds(proto, seed=3, shift=0.0):
    rng = np.random.default_rng(seed)
    x, labels = (next(v for v in proto.graph.input if v.name == name) for name in (proto.graph.input[0].name, "labels"))
    shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
    return {x.name: rng.standard_normal(shape) + shift, labels.name: rng.integers(0, 5, shape[0])}


@pytest.mark.parametrize("level", ["rcf", "mvf", "bnff", "icf"])
@pytest.mark.parametrize(
    "body",
    [DENSE.format(zero=0), DENSE.format(zero=1), RESIDUAL, UNET],
    ids=["dense", "dense, γ = 0", "residual", "u-net"],
)
def test_a_rewrite_computes_the_same_in_float64(body, level, training, oracle):
    model = training(body)
    source = ir.to_proto(model)
    after = ir.to_proto(rewrite(model, level=level).model)
    data = feeds(source)
    assert worst(oracle.evaluate(source, data), oracle.evaluate(after, data)) < 1e-11


def test_with_a_mean_a_thousand_times_the_deviation(training, oracle):
    model = training(DENSE.format(zero=0))
    source = ir.to_proto(model)
    data = feeds(source, shift=1e3)
    after = ir.to_proto(rewrite(model).model)
    assert worst(oracle.evaluate(source, data), oracle.evaluate(after, data)) < 1e-7


def test_with_constant_channels(training, oracle):
    model = training(DENSE.format(zero=0))
    source = ir.to_proto(model)
    data = feeds(source)
    data["x"] = np.zeros_like(data["x"])
    after = ir.to_proto(rewrite(model).model)
    assert worst(oracle.evaluate(source, data), oracle.evaluate(after, data)) < 1e-11


@pytest.mark.parametrize("name", ["densenet40", "resnet20", "mobilenetv2", "googlenet", "squeezenet"])
def test_the_zoo_in_float64(name, oracle):
    image = 64 if name in ("googlenet", "squeezenet") else 32
    model = without_dropout(ir.from_proto(build_training_graph(build_forward(name, batch=2, image=image, classes=5))))
    source, after = ir.to_proto(model), ir.to_proto(rewrite(model).model)
    data = feeds(source)
    assert worst(oracle.evaluate(source, data), oracle.evaluate(after, data)) < 1e-6
