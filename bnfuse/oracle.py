"""A training graph run by onnxruntime: the independent implementation that results are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.build.ort import onnxruntime
from bnfuse.errors import BnfuseError, first_line

Arrays = dict[str, np.ndarray]

SILENT = 4  # onnxruntime's log level at which only fatal errors are printed; failures are raised anyway


class OrtGraph:
    """One file in onnxruntime, unoptimised unless asked. State is fed with every run and never kept."""

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
        ort = onnxruntime()
        self.name = name
        options = ort.SessionOptions()
        options.log_severity_level = SILENT
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        if threads:
            options.intra_op_num_threads = threads
        for key, value in (config or {}).items():
            options.add_session_config_entry(key, value)
        try:
            self.session = ort.InferenceSession(
                serialized(without_state(ir.to_proto(model)), name), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime has a class per status and no common one of its own
            raise BnfuseError(f"{name}: onnxruntime does not load it: {first_line(error)}") from None

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Iterable[str]) -> Arrays:
        """The named outputs. The feeds are copied: onnxruntime updates running statistics in its caller's buffers."""
        wanted = list(outputs)
        try:
            values = self.session.run(wanted, {key: np.array(value) for key, value in feeds.items()})
        except Exception as error:
            raise BnfuseError(f"{self.name}: onnxruntime does not run it: {first_line(error)}") from None
        return dict(zip(wanted, values, strict=True))


def without_state(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself, rid of the initial values of its inputs: they are fed, and they can be large."""
    inputs = {value.name for value in model.graph.input}
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in inputs]
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
    return model


def serialized(model: onnx.ModelProto, name: str) -> bytes:
    try:
        return model.SerializeToString()
    except Exception:  # protobuf's error class depends on its version
        raise BnfuseError(f"{name}: larger than the 2 GiB that onnxruntime takes in one piece") from None
