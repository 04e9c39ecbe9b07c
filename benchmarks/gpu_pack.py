"""Small files for a GPU machine: large parameters are not in them, but how to draw them.

    redraw(model)            every large parameter drawn anew from its name, shape and spread; how is in the model
    pack_model, pack_step    files without those parameters
    unpack(file, folder)     the whole file again, bit for bit what was packed

A DenseNet-121 has 32 MB of parameters.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors import numpy as safetensors

LARGE = 2048  # elements
KEY = "bnfuse.drawn"  # in the metadata of a model: {parameter: [spread, crc32 of the values]}
RECIPES = "drawn.json"  # in a packed step: the same, and the shapes

Recipes = dict[str, Any]


def redraw(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replaces the values of large float32 initializers by others of the same spread, in place."""
    recipes: Recipes = {}
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) >= LARGE:
            spread = float(numpy_helper.to_array(tensor).std())
            values = drawn(tensor.name, tensor.dims, spread)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
            recipes[tensor.name] = [spread, zlib.crc32(values.tobytes())]
    note(model, recipes)
    return model


def drawn(name: str, shape: Any, spread: float, crc: int | None = None) -> np.ndarray:
    """Normal float32 values; raises where numpy draws others than the packing machine's did."""
    stream = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    values = stream.standard_normal(tuple(shape), dtype=np.float32) * np.float32(spread)
    if crc is not None and zlib.crc32(values.tobytes()) != crc:
        raise SystemExit(f"numpy {np.__version__} draws other values for '{name}': build the files with this version")
    return values


def note(model: onnx.ModelProto, recipes: Recipes) -> None:
    entry = next((prop for prop in model.metadata_props if prop.key == KEY), None) or model.metadata_props.add(key=KEY)
    entry.value = json.dumps(recipes)


def recipes_of(model: onnx.ModelProto) -> Recipes:
    return next((json.loads(prop.value) for prop in model.metadata_props if prop.key == KEY), {})


def hollow(model: onnx.ModelProto, recipes: Recipes) -> onnx.ModelProto:
    """A copy without the values of drawn parameters."""
    found = onnx.ModelProto.FromString(model.SerializeToString())
    for tensor in found.graph.initializer:
        if tensor.name in recipes:
            tensor.ClearField("raw_data")
    note(found, recipes)
    return found


def fill(model: onnx.ModelProto) -> onnx.ModelProto:
    """The inverse, in place."""
    recipes = recipes_of(model)
    for tensor in model.graph.initializer:
        if tensor.name in recipes:
            tensor.raw_data = drawn(tensor.name, tensor.dims, *recipes[tensor.name]).tobytes()
    return model


def pack_model(model: onnx.ModelProto, path: Path) -> None:
    data = hollow(model, recipes_of(model)).SerializeToString()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("train.onnx", data)


def pack_step(step: Path, recipes: Recipes, path: Path) -> None:
    """`step` is what `Step.export` wrote, `recipes` those of the model that it was made of."""
    with zipfile.ZipFile(step) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "state.safetensors":
                state = safetensors.load(data)
                known = {key: (list(state[key].shape), *recipes[key]) for key in state.keys() & recipes.keys()}
                for key, (shape, *recipe) in known.items():
                    assert np.array_equal(drawn(key, shape, *recipe), state[key]), f"'{key}' was changed"
                target.writestr(RECIPES, json.dumps(known))
                data = safetensors.save({key: value for key, value in state.items() if key not in known})
            target.writestr(name, data)


def unpack(packed: Path, folder: Path) -> Path:
    """The whole training graph (`.onnx`) or step (`.bnf`) in the folder; one that is there stays."""
    with zipfile.ZipFile(packed) as source:
        if "train.onnx" in source.namelist():
            path = folder / f"{packed.stem}.onnx"
            if not path.exists():
                path.write_bytes(fill(onnx.ModelProto.FromString(source.read("train.onnx"))).SerializeToString())
            return path
        path = folder / f"{packed.stem}.bnf"
        if not path.exists():
            with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
                for name in source.namelist():
                    if name != RECIPES:
                        target.writestr(name, whole(source, name))
        return path


def whole(source: zipfile.ZipFile, name: str) -> bytes:
    """A part of a step as it was before packing."""
    data = source.read(name)
    if name == "state.safetensors":
        known = json.loads(source.read(RECIPES))
        values = {key: drawn(key, shape, *recipe) for key, (shape, *recipe) in known.items()}
        return safetensors.save({**safetensors.load(data), **values})
    return data
