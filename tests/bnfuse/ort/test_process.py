"""onnxruntime in a process of its own: what ends it is one line, and the next graph gets another."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import onnx
import onnx.helper as h
import onnx_ir as ir
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.ort.frames import read_frame, write_frame
from bnfuse.ort.oracle import OrtGraph
from bnfuse.ort.process import OrtError, borrowed

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
OPTIONS = {"threads": 1, "optimize": False, "config": {}}
X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)


def graph(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",), **constants: np.ndarray) -> OrtGraph:
    """A graph of x [2, 3, 4, 4], in onnxruntime."""
    x = h.make_tensor_value_info("x", FLOAT, X.shape)
    y = [h.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    values = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    made = h.make_graph(nodes, "graph", [x], y, values)
    imports = [h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)]
    model = h.make_model(made, opset_imports=imports, ir_version=8)
    return OrtGraph(ir.from_proto(model), name="g.onnx")


def conv_grad(**attributes: object) -> onnx.NodeProto:
    given = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1], **attributes}
    return h.make_node("ConvGrad", ["r", "r", "w"], ["dx", "y"], name="grad", domain="com.microsoft", **given)


def crashing() -> OrtGraph:
    """A ConvGrad that reads before the map's beginning."""
    weight = np.zeros((3, 3, 3, 3), np.float32)
    relu, after = h.make_node("Relu", ["x"], ["r"], name="relu"), h.make_node("Relu", ["y"], ["z"], name="after")
    return graph(relu, conv_grad(pads=[1 << 20, 1 << 20, 1, 1]), after, outputs=("z",), w=weight)


def relu() -> OrtGraph:
    return graph(h.make_node("Relu", ["x"], ["y"], name="relu"))


def test_a_graph_runs_again_and_again_and_gives_back_its_process():
    first = relu()
    for scale in (1, -1):
        np.testing.assert_array_equal(first.run({"x": scale * X}, ["y"])["y"], np.maximum(scale * X, 0))
    process = first.process
    del first
    assert relu().process is process
    one, other = relu(), relu()
    assert one.process is not other.process
    np.testing.assert_array_equal(one.run({"x": X}, ["y"])["y"], other.run({"x": X}, ["y"])["y"])


@pytest.mark.ort_training  # which believes what a ConvGrad says of its pads
def test_a_crash_names_the_node_and_leaves_the_next_graph_alone():
    with pytest.raises(BnfuseError) as caught:
        crashing().run({"x": X}, ["z"])
    text = str(caught.value)
    assert text.startswith("g.onnx: node 'grad' (ConvGrad) cannot be computed: onnxruntime crashed (SIG")
    assert "\n" not in text
    assert (relu().run({"x": X}, ["y"])["y"] == X).all()


def test_a_refusal_is_onnxruntime_s_own_word():
    with pytest.raises(BnfuseError, match=r"^g.onnx: onnxruntime does not load it: .*") as caught:
        graph(h.make_node("Relu", ["x", "x"], ["y"], name="relu"))
    assert "\n" not in str(caught.value)


def test_more_memory_than_there_is_is_one_line():
    many = np.array([1 << 16] * 4, np.int64)
    tiled = graph(h.make_node("Tile", ["x", "many"], ["y"], name="tile"), many=many)
    with pytest.raises(BnfuseError, match=r"^g.onnx: (onnxruntime does not run it|node 'tile' \(Tile\))") as caught:
        tiled.run({"x": X}, ["y"])
    assert "\n" not in str(caught.value)
    step = [np.array(value, np.float32) for value in (0, 3e12, 1)]
    ranged = graph(h.make_node("Range", ["a", "b", "c"], ["y"], name="range"), a=step[0], b=step[1], c=step[2])
    with pytest.raises(BnfuseError, match=r"^g.onnx: (onnxruntime does not run it|node 'range' \(Range\))"):
        ranged.run({"x": X}, ["y"])


def test_a_killed_process_is_one_line():
    one = relu()
    one.process.child.send_signal(signal.SIGKILL)
    with pytest.raises(BnfuseError, match=r"^g.onnx: cannot be run: onnxruntime crashed \(SIGKILL"):
        one.run({"x": X}, ["y"])


def test_threads_wait_for_each_other():
    one, wrong = relu(), []

    def work(scale: float) -> None:
        for _ in range(20):
            if not (one.run({"x": scale * X}, ["y"])["y"] == scale * X).all():
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_has_one_of_its_own():
    relu()  # its process is idle now, and the child of this one must not take it
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if (relu().run({"x": X}, ["y"])["y"] == X).all() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (relu().run({"x": X}, ["y"])["y"] == X).all()


def test_it_ends_with_the_process_that_started_it():
    code = "from bnfuse.ort.process import OrtProcess; p = OrtProcess(); print(p.child.pid, flush=True); input()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert runs(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(child)


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_frames_keep_types_shapes_and_empty_arrays():
    arrays = {
        "scalar": np.float32(3).reshape(()),
        "none": np.zeros((0, 3), np.int64),
        "strided": X[:, ::2, 1:],
        "flags": np.array([True, False]),
        "half": np.arange(3, dtype=np.float16),
    }
    stream = io.BytesIO()
    write_frame(stream, {"a": [1, None]}, arrays)
    stream.seek(0)
    fields, found = read_frame(stream)
    assert fields == {"a": [1, None]}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.writeable
    with pytest.raises(TypeError, match="'s' holds strings"):
        write_frame(io.BytesIO(), {}, {"s": np.array(["a"], object)})
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(stream.getvalue()[:-1]))


def test_a_request_that_fails_leaves_the_process_at_work():
    with borrowed() as process:
        with pytest.raises(OrtError, match="holds strings"):
            process.ask("open", {}, {"model": np.array(["a"], object)})
        with pytest.raises(OrtError):
            process.ask("open", OPTIONS, {"model": np.frombuffer(b"no model", np.uint8)})
        assert process.usable
        process.ask("close")
