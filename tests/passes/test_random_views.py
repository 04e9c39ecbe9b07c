"""Random networks of what moves, repeats and mixes elements between BatchNorms: every level is exact, valid and a fixed
point."""

import random

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import bnfuse
from bnfuse.passes import rewrite
from bnfuse.verifying import interpreter


def random_views(seed: int) -> str:
    """Eight to sixteen nodes: layers, shuffles, Resizes and reflected borders, that Splits, Concats and sums join."""
    rng = random.Random(seed)
    lines = ["v0 = conv(x, 6)", "v1 = bn(v0)"]
    shapes = {"v0": (6, 8, 8), "v1": (6, 8, 8)}  # channels, height, width
    unread = ["v1"]
    usual = rng.choice(["relu", "relu", "silu", "relu6"])

    def put(call: str, *made: tuple[int, int, int], of: tuple[str, ...]) -> list[str]:
        names = [f"v{len(shapes) + index}" for index in range(len(made))]
        lines.append(f"{', '.join(names)} = {call}")
        shapes.update(zip(names, made, strict=True))
        unread[:] = [value for value in unread if value not in of] + names
        return names

    while len(lines) < 8 + seed % 9:
        kind = rng.choice(
            ["layer"] * 5 + ["shuffle"] * 3 + ["resize"] * 3 + ["reflect", "cut", "cut", "cat", "cat", "add"]
        )
        x = rng.choice(unread if rng.random() < 0.6 else [*shapes])
        c, h, w = shapes[x]
        like = [other for other in shapes if shapes[other][1:] == (h, w) and other != x]
        if kind == "layer":
            count, k = rng.choice([2, 4, 6]), rng.choice([1, 3])
            (made,) = put(f"conv({x}, {count}, k={k})", (count, h, w), of=(x,))
            (made,) = put(f"bn({made})", (count, h, w), of=(made,))
            if rng.random() < 0.8:
                put(f"{usual}({made})", (count, h, w), of=(made,))
        elif kind == "shuffle" and c % 2 == 0 and c > 2:
            put(f"shuffle({x}, g={rng.choice([g for g in (2, 3, 4) if c % g == 0])}, w={w})", (c, h, w), of=(x,))
        elif kind == "resize" and h * w <= 128:
            up, across = rng.choice([(2, 2), (1, 2), (2, 1)])
            put(f"resize({x}, h={up}, w={across}, mode={rng.choice([0, 0, 1, 2])})", (c, h * up, w * across), of=(x,))
        elif kind == "reflect" and h * w <= 128:
            put(f"reflect({x})", (c, h + 2, w + 2), of=(x,))
        elif kind == "cut" and c % 2 == 0:
            put(f"cut({x}, {c // 2}, {c // 2})", (c // 2, h, w), (c // 2, h, w), of=(x,))
        elif kind == "cat" and like and c + shapes[y := rng.choice(like)][0] <= 16:
            put(f"cat({x}, {y})", (c + shapes[y][0], h, w), of=(x, y))
        elif kind == "add" and (same := [other for other in like if shapes[other] == shapes[x]]):
            put(f"add({x}, {(y := rng.choice(same))})", (c, h, w), of=(x, y))
    ends = [f"e{index} = mean({value})" for index, value in enumerate(unread)]
    return "\n".join(
        [*lines, *ends, f"all = cat({', '.join(f'e{i}' for i in range(len(ends)))})", "out = conv(all, 4)"]
    )


def in_float64(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's outputs by name."""
    names = [value.name for value in model.graph.output]
    return interpreter.run(interpreter.widened(model), interpreter.wide(feeds), names)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_network_of_views(seed, training):
    model = training(random_views(seed))
    source = ir.to_proto(model)
    rng = np.random.default_rng(seed)
    feeds = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in source.graph.initializer}
    feeds = {value.name: feeds[value.name] for value in source.graph.input if value.name in feeds}
    feeds |= {"x": rng.standard_normal((2, 3, 8, 8)), "labels": rng.integers(0, 5, 2)}
    expected = in_float64(source, feeds)
    floor = 1e-3 * max(float(np.linalg.norm(value)) for name, value in expected.items() if name.endswith("_grad"))
    for level in ("rcf", "bnff", "icf"):
        result = rewrite(model, level=level)
        found = in_float64(ir.to_proto(result.model), feeds)
        assert [*found] == [*expected]
        for name, value in expected.items():
            error = np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + floor)
            assert error < 1e-9, f"{level}: {name} is off by {error:.1e}"
        again = rewrite(result.model, level=level)
        assert [entry.name for entry in again.report.passes if entry.changed] == []


@pytest.mark.parametrize("seed", range(8))
def test_what_is_exported_of_it_is_what_is_exported_of_the_file(seed, training, tmp_path):
    proto = ir.to_proto(training(random_views(seed + 30)))
    images, logits = np.random.default_rng(seed).standard_normal((2, 3, 8, 8)).astype(np.float32), []
    for model in (proto, bnfuse.rewrite(proto).model):
        bnfuse.export_inference(model, tmp_path / "exported.onnx")
        exported = onnx.load(tmp_path / "exported.onnx")
        assert not any(node.domain for node in exported.graph.node)
        session = ort.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
        logits.append(session.run(None, {session.get_inputs()[0].name: images})[0])
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-5)
