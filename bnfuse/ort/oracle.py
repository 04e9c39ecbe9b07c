"""A training graph run by onnxruntime: the independent implementation that results are compared with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node, first_line
from bnfuse.core.processors import bounded_threads
from bnfuse.ort.frames import Arrays
from bnfuse.ort.process import OrtCrash, OrtError, OrtProcess, borrowed, give_back, take

__all__ = ["Arrays", "OrtGraph"]


class OrtGraph:
    """One file in onnxruntime, unoptimised unless asked. State is fed with every run and never kept.

    Raises BnfuseError where onnxruntime refuses the file, or crashes on it: then with the node that did it, if it can
    be found.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        name: str,
        threads: int | None = None,
        optimize: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """`config` has onnxruntime's own session settings, by their keys."""
        self.name, self.model = name, without_state(ir.to_proto(model))
        self.settings = {"threads": bounded_threads(threads), "optimize": optimize, "config": dict(config or {})}
        self.process = take()
        weakref.finalize(self, _leave, self.process)
        try:
            self.process.ask("open", self.settings, {"model": serialized(self.model, name)})
        except OrtError as error:
            raise self._failed("load", error, {}) from None

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Iterable[str]) -> Arrays:
        """Give the named outputs."""
        wanted = list(outputs)
        try:
            return self.process.ask("run", {"outputs": wanted}, feeds)[1]
        except OrtError as error:
            raise self._failed("run", error, feeds) from None

    def _failed(self, what: str, error: OrtError, feeds: Mapping[str, np.ndarray]) -> BnfuseError:
        if not isinstance(error, OrtCrash):
            return BnfuseError(f"{self.name}: onnxruntime does not {what} it: {first_line(error)}")
        node = crashing_node(self.model, feeds, self.settings)
        if node is None:
            return BnfuseError(f"{self.name}: cannot be {'run' if what == 'run' else 'loaded'}: {error}")
        return at_node(node.name, node.op_type, f"cannot be computed: {error}", file=self.name)


def _leave(process: OrtProcess) -> None:
    """Give back what the session held, and keep the process for the next."""
    if process.usable:
        try:
            process.ask("close")
        except OrtError:
            return
    give_back(process)


def crashing_node(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], settings: Mapping[str, object]
) -> onnx.NodeProto | None:
    """Give the node with which the beginning of the graph starts to crash onnxruntime, by bisection; None if it does
    not."""

    def crashes(count: int) -> bool:
        part = beginning(model, count)
        names = {value.name for value in part.graph.input}
        with borrowed() as process:
            try:
                process.ask("open", settings, {"model": np.frombuffer(part.SerializeToString(), np.uint8)})
                if feeds:
                    outputs = [value.name for value in part.graph.output]
                    process.ask("run", {"outputs": outputs}, {k: v for k, v in feeds.items() if k in names})
                process.ask("close")
            except OrtCrash:
                return True
            except OrtError:
                return False
        return False

    good, bad = 0, len(model.graph.node)
    if not crashes(bad):
        return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if crashes(middle) else (middle, bad)
    return model.graph.node[bad - 1]


def beginning(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """Give the first `count` nodes, with everything as an output that none of them reads."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    graph = part.graph
    types = {value.name: value.type for value in (*graph.value_info, *graph.output)}
    del graph.node[count:], graph.output[:]
    read = {name for node in graph.node for name in node.input}
    for name in (name for node in graph.node for name in node.output if name and name not in read):
        value = graph.output.add(name=name)
        if name in types:
            value.type.CopyFrom(types[name])
    return part


def without_state(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the model itself, rid of the initial values of its inputs: they are fed, and they can be large."""
    inputs = {value.name for value in model.graph.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in inputs]
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
    return model


def serialized(model: onnx.ModelProto, name: str) -> np.ndarray:
    """Give the model's bytes."""
    try:
        return np.frombuffer(model.SerializeToString(), np.uint8)
    except Exception:  # protobuf's error class depends on its version
        raise BnfuseError(f"{name}: larger than the 2 GiB that onnxruntime takes in one piece") from None
