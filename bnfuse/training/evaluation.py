"""How well a network does on a data set: a training graph or its compiled step, or a model for inference.

    evaluate_source("fused.onnx", "digits", state="run/best.safetensors")
    evaluate_source("model.onnx", "digits")                                 # what `--export` wrote

Each image counts once, whatever the batch: what fills the last one up is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Progress, quiet
from bnfuse.data import Dataset, load_data
from bnfuse.data.loaders import dataset_of, loaders_in
from bnfuse.data.targets import Target
from bnfuse.exporting import MEAN_KEY, SCALE_KEY, SHARE_KEY, STD_KEY, read_state
from bnfuse.fromtorch.weights import is_pickle
from bnfuse.graph.io import read_proto
from bnfuse.graph.signature import METADATA_KEY
from bnfuse.graph.training_graph import open_graph
from bnfuse.ort.oracle import OrtGraph
from bnfuse.training.feeding import data_for, evaluate_data, slices, with_loaders
from bnfuse.training.nonfinite import require_finite_state
from bnfuse.training.run import Compiling
from bnfuse.training.scoring import Evaluation, evaluate_batches

ROWS = 64  # of a model that takes any number
CLASS = Target("y", (), np.dtype(np.int64))


def evaluate_source(
    source: Any,
    data: Any,
    *,
    part: str | None = None,
    state: str | os.PathLike[str] | None = None,
    ema: bool = False,
    compiling: Compiling | None = None,
    reading: Mapping[str, Any] | None = None,
    progress: Progress = quiet,
) -> Evaluation:
    """Evaluate a Step, a step.bnf, a training graph or a model for inference on a part of the data.

    `part` is train, val or test, by default what training holds out. `state` is a checkpoint for a step or a training
    graph; with `ema` its average of the weights counts, or the step's. `reading` has options of `load_data`. Raises
    BnfuseError for what does not fit, DivergedError for logits that are not finite.
    """
    if is_inference(source):
        if state is not None:
            raise BnfuseError(f"{source}: is a model for inference, with its own values: leave the state out")
        if ema:
            raise BnfuseError(f"{source}: is a model for inference, with one set of values: leave ema out")
        threads = compiling.threads if compiling is not None else None
        return Exported(source, threads).evaluate(data, part, reading or {}, progress)
    step = opened(source, compiling or Compiling(), progress)
    if state is not None:
        if ema or is_pickle(state):
            step.load_state_dict(read_state(state, ema=ema))
        else:
            step.load(state)
        require_finite_state(step, where=f"loading {state}", lr=step.lr)
    loaded = with_loaders(step, data, held_out=True)
    if loaded is not data and part is not None and not isinstance(data, Mapping | tuple | list):
        raise BnfuseError(f"a single DataLoader has no parts: leave part={part} out")
    found = data_for(step, loaded, **(reading or {}))
    tell(found, progress)
    return evaluate_data(step, found, part_of(found, part), ema=ema and state is None)


def opened(source: Any, compiling: Compiling, progress: Progress) -> Any:
    """Open or compile the step behind a source."""
    from bnfuse.runtime import Step, load_step

    if isinstance(source, Step):
        return source
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".bnf":
        return load_step(Path(source), threads=compiling.threads)
    return compiling.step(open_graph(source), progress)


def is_inference(source: Any) -> bool:
    """Tell whether a source is a file, or a model, without gradients."""
    if isinstance(source, str | os.PathLike):
        if Path(source).suffix == ".bnf":
            return False
        source = read_proto(source)
    if not isinstance(source, onnx.ModelProto):
        return False
    roles = any(entry.key == METADATA_KEY for entry in source.metadata_props)
    return not roles and not any(output.name.endswith("_grad") for output in source.graph.output)


def part_of(data: Dataset, part: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Give images and labels of a part by its name; by default those held out."""
    if part is None:
        return data.held_out
    if part not in data.parts:
        raise BnfuseError(f"{data.name}: has no part '{part}': there are {', '.join(data.parts)}")
    return data.parts[part]


def tell(data: Dataset, progress: Progress) -> None:
    """Say what the data are."""
    for line in data.about:
        progress(line)


@dataclasses.dataclass
class Exported:
    """A model for inference in onnxruntime: images [N, C, H, W] in, logits [N, classes] out, N fixed or not."""

    source: Any
    threads: int | None = None

    def __post_init__(self) -> None:
        proto = self.source if isinstance(self.source, onnx.ModelProto) else read_proto(self.source)
        self.name = str(self.source) if isinstance(self.source, str | os.PathLike) else proto.graph.name or "model"
        values = {tensor.name for tensor in proto.graph.initializer}
        inputs = [value for value in proto.graph.input if value.name not in values]
        dims = [[dim.dim_value or None for dim in value.type.tensor_type.shape.dim] for value in inputs]
        if len(inputs) != 1 or len(dims[0]) != 4 or None in dims[0][1:] or len(proto.graph.output) != 1:
            shapes = ", ".join(f"'{value.name}' {shape}" for value, shape in zip(inputs, dims, strict=True))
            raise BnfuseError(f"{self.name}: takes {shapes}: it must take images [N, C, H, W] and give logits alone")
        self.input, self.output, self.shape = inputs[0].name, proto.graph.output[0].name, dims[0]
        self.about: Mapping[str, Any] = {
            entry.key: json.loads(entry.value)
            for entry in proto.metadata_props
            if entry.key in (MEAN_KEY, STD_KEY, SCALE_KEY, SHARE_KEY)
        }
        scores = [dim.dim_value for dim in proto.graph.output[0].type.tensor_type.shape.dim]
        pixels = tuple(scores[2:])
        self.targets = [Target("y", pixels, np.dtype(np.int64), scores[1])] if len(pixels) == 2 and all(pixels) else []
        self.graph = OrtGraph(ir.from_proto(proto), name=self.name, threads=self.threads, optimize=True)

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Compute the logits of any number of images; a fixed batch is filled up by the last of them."""
        batch = self.shape[0]
        if batch is None or not len(images):
            return self.graph.run({self.input: images}, [self.output])[self.output]
        found = []
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            whole = np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)])
            found.append(self.graph.run({self.input: whole}, [self.output])[self.output][: len(part)])
        return np.concatenate(found)

    def evaluate(self, data: Any, part: str | None, reading: Mapping[str, Any], progress: Progress) -> Evaluation:
        """Evaluate on a part of the data, normalised as the file says; a Dataset is taken as it is."""
        _, channels, height, width = self.shape
        if (loaders := loaders_in(data)) is not None:
            data = dataset_of(loaders, self.shape, self.targets or [CLASS], held_out=True)
        found = data
        if not isinstance(data, Dataset):
            if height != width:
                raise BnfuseError(f"{self.name}: takes images of {height}x{width}: give it a Dataset of that size")
            share = reading.get("crop_share") or self.about.get(SHARE_KEY)
            asked = {**reading, "crop_share": share}
            found = load_data(data, image=height, channels=channels, targets=self.targets, **asked)
            tell(found, progress)
        images, labels = part_of(found, part)
        if images.shape[1:] != tuple(self.shape[1:]):
            raise BnfuseError(f"{found.name}: has images of {list(images.shape[1:])}, not {list(self.shape[1:])}")
        batch = self.shape[0] or ROWS
        made = ((self.normalised(x, found) if found is not data else x, y) for x, y in slices(images, labels, batch))
        return evaluate_batches(self.logits, made, names=found.class_names)

    def normalised(self, images: np.ndarray, data: Dataset) -> np.ndarray:
        """Bring images, which were divided by the scale of their source, to what the file takes."""
        scale = float(data.scale or 1) / float(self.about.get(SCALE_KEY) or data.scale or 1)
        mean = np.array(self.about.get(MEAN_KEY, 0.0), np.float32).reshape(1, -1, 1, 1)
        std = np.array(self.about.get(STD_KEY, 1.0), np.float32).reshape(1, -1, 1, 1)
        found: np.ndarray = (images * np.float32(scale) - mean) / std
        return found
