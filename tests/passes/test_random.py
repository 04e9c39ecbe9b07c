"""Random networks: every level is exact, valid and a fixed point, also where Concat, Add and BN meet in odd ways."""

import fnmatch
import random

import numpy as np
import onnx_ir as ir
import pytest
from levels import by_turns

from bnfuse.graph.sampling import sampling_of
from bnfuse.passes import rewrite

pytestmark = pytest.mark.torch


def random_body(seed: int) -> str:
    """Four to ten nodes of one size, of which each reads any before it; what nothing reads is concatenated."""
    rng = random.Random(seed)
    lines = [f"v{i} = conv(x, 2)" for i in range(3)]
    channels = {f"v{i}": 2 for i in range(3)}
    unread = [*channels]

    def put(call: str, count: int, *operands: str) -> str:
        name = f"v{len(lines)}"
        lines.append(f"{name} = {call}")
        channels[name] = count
        unread[:] = [value for value in unread if value not in operands] + [name]
        return name

    while len(lines) < 7 + seed % 7:
        kind = rng.choice(["conv", "bn", "relu", "relu6", "add", "cat", "cat", "cat", "layer", "layer", "layer"])
        x, y = rng.choices([*channels], k=2)
        if kind == "conv":
            put(f"conv({x}, {rng.choice([2, 3])}, k={rng.choice([1, 3])}, bias={rng.choice([0, 1])})", 2, x)
            channels[f"v{len(lines) - 1}"] = int(lines[-1].split(",")[1])
        elif kind in ("bn", "relu", "relu6"):
            put(f"{kind}({x})", channels[x], x)
        elif kind == "add" and channels[x] == channels[y]:
            put(f"add({x}, {y})", channels[x], x, y)
        elif kind == "cat" and channels[x] + channels[y] <= 16:
            put(f"cat({x}, {y})", channels[x] + channels[y], x, y)
        elif kind == "layer":
            n = put(f"bn({x})", channels[x], x)
            r = put(f"relu({n})", channels[x], n)
            put(f"conv({r}, 2, k=3)", 2, r)
    return "\n".join([*lines, f"all = cat({', '.join(unread)})", "out = conv(all, 4)"])


@pytest.mark.parametrize("seed", range(120))
def test_levels_of_a_random_network(seed, training, oracle):
    model = training(random_body(seed))
    source = ir.to_proto(model)
    rng = np.random.default_rng(seed)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)), "labels": rng.integers(0, 5, 2)}
    expected = oracle.evaluate(source, feeds)
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    for level in by_turns(seed)[1:]:
        result = rewrite(model, level=level)
        assert ir.to_proto(model) == source
        found = oracle.evaluate(ir.to_proto(result.model), feeds)
        assert [*found] == [*expected]
        for name, value in expected.items():
            error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + floor)
            assert error < 1e-9, f"{level}: {name} is off by {error:.1e}"


SPECS = ("fs:1/4", "bs:1", "frs:1/8", "ns:1", "fs:1/4,*1=bn,*5=rbn,*2=l1bn", "bn,*[02468]=fs:1/8", "bn+vdn:1,*3=fs:1/4")


@pytest.mark.parametrize("seed", [seed for seed in range(20) if "bn(" in random_body(seed + 1000)][:14])
def test_levels_of_a_random_sampled_network(seed, training, oracle):
    spec = SPECS[seed % len(SPECS)]
    model = training(random_body(seed + 1000))
    names = [node.name for node in model.graph if node.op_type == "BatchNorm"]
    spec = ",".join(part for part in spec.split(",") if "=" not in part or fnmatch.filter(names, part.split("=")[0]))
    rng = np.random.default_rng(seed)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)), "labels": rng.integers(0, 5, 2)}
    feeds["virtual"] = rng.standard_normal((1, 3, 8, 8))
    expected = None
    for level in by_turns(seed):
        result = rewrite(model, level=level, sample=spec)
        drawn = sampling_of(result.model)
        used = {k: v for k, v in feeds.items() if k != "virtual" or drawn.virtual}
        found = oracle.evaluate(ir.to_proto(result.model), {**used, **drawn.offsets(seed=seed, epoch=0)})
        expected = expected or found
        floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
        for name, value in expected.items():
            error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + floor)
            assert error < 1e-9, f"{level}: {name} is off by {error:.1e}"


def random_branches(seed: int) -> str:
    """Ten to twenty nodes of one size: layers, mostly of one activation, that Splits and Concats cut and join."""
    rng = random.Random(seed)
    lines = ["v0 = conv(x, 6)", "v1 = bn(v0)"]
    channels = {"v0": 6, "v1": 6}
    unread = ["v1"]
    usual = rng.choice(["relu", "relu", "silu", "relu6"])

    def put(call: str, counts: list[int], *operands: str) -> list[str]:
        names = [f"v{len(channels) + index}" for index in range(len(counts))]
        lines.append(f"{', '.join(names)} = {call}")
        channels.update(zip(names, counts, strict=True))
        unread[:] = [value for value in unread if value not in operands] + names
        return names

    def layer(x: str) -> None:
        count = rng.choice([2, 3, 4])
        (c,) = put(f"conv({x}, {count}, k={rng.choice([1, 3])})", [count], x)
        (n,) = put(f"bn({c})", [count], c)
        if rng.random() < 0.8:
            put(f"{usual if rng.random() < 0.9 else 'silu'}({n})", [count], n)

    while len(lines) < 10 + seed % 11:
        kind = rng.choice(["layer"] * 4 + ["cat"] * 3 + ["cut", "cut", "part", "maxpool", "avgpool", "add", "act"])
        x, y, z = (rng.choice(unread if rng.random() < 0.6 else [*channels]) for _ in range(3))
        count = channels[x]
        if kind == "layer":
            layer(x)
        elif kind == "cat" and count + channels[y] + channels[z] <= 20:
            parts = [x, y, z][: rng.choice([2, 3])]
            put(f"cat({', '.join(parts)})", [sum(channels[part] for part in parts)], *parts)
        elif kind == "cut" and count > 3:
            first = rng.randint(1, count - 2)
            counts = [first, count - first] if rng.random() < 0.7 else [1, first, count - first - 1]
            put(f"cut({x}, {', '.join(map(str, counts))})", counts, x)
        elif kind == "part" and count > 2:
            put(f"part({x}, 1, {count})", [count - 1], x)
        elif kind in ("maxpool", "avgpool"):
            put(f"{kind}({x}, k=3, s=1{', p=1' if kind == 'avgpool' else ''})", [count], x)
        elif kind == "add" and (same := [other for other in channels if channels[other] == count and other != x]):
            put(f"add({x}, {(other := rng.choice(same))})", [count], x, other)
        elif kind == "act":
            put(f"{usual}({x})", [count], x)
    return "\n".join([*lines, f"all = cat({', '.join(unread)})", "out = conv(all, 4)"])


@pytest.mark.parametrize("seed", [*range(60), 1231, 2000, 2017, 2110])
def test_a_random_network_of_splits_and_concats(seed, training, oracle):
    model = training(random_branches(seed))
    source = ir.to_proto(model)
    rng = np.random.default_rng(seed)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)), "labels": rng.integers(0, 5, 2)}
    expected = oracle.evaluate(source, feeds)
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    result = rewrite(model)
    found = oracle.evaluate(ir.to_proto(result.model), feeds)
    assert [*found] == [*expected]
    for name, value in expected.items():
        error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + floor)
        assert error < 1e-9, f"{name} is off by {error:.1e}"
    again = rewrite(result.model)
    assert [entry.name for entry in again.report.passes if entry.changed] == []


@pytest.mark.parametrize("seed", range(len(SPECS)))
def test_a_random_sampled_network_of_splits_and_concats(seed, training, oracle):
    model = training(random_branches(seed))
    names = [node.name for node in model.graph if node.op_type == "BatchNorm"]
    parts = SPECS[seed].split(",")
    spec = ",".join(part for part in parts if "=" not in part or fnmatch.filter(names, part.split("=")[0]))
    rng = np.random.default_rng(seed)
    feeds = {"x": rng.standard_normal((2, 3, 8, 8)), "labels": rng.integers(0, 5, 2)}
    feeds["virtual"] = rng.standard_normal((1, 3, 8, 8))
    found = []
    for level in ("none", "icf"):
        result = rewrite(model, level=level, sample=spec)
        drawn = sampling_of(result.model)
        used = {k: v for k, v in feeds.items() if k != "virtual" or drawn.virtual}
        found.append(oracle.evaluate(ir.to_proto(result.model), {**used, **drawn.offsets(seed=seed, epoch=0)}))
    expected, fused = found
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    for name, value in expected.items():
        error = np.linalg.norm(fused[name] - value) / (np.linalg.norm(value) + floor)
        assert error < 1e-9, f"{name} is off by {error:.1e}"
