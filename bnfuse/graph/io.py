"""Models in and out: paths, ModelProto, gs.Graph and onnx_ir.Model, checked before anything is believed.

    model = load("train.onnx")            # onnx_ir.Model
    save(model, "fused.onnx")             # atomically: a reader never sees half a file

A file is input from outside: it may be truncated, lie about sizes, or name external data anywhere on the disk. What is
checked here raises a BnfuseError that names the file.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import TensorProto

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.core.files import write_atomically
from bnfuse.graph.contradictions import check_agreement
from bnfuse.graph.microsoft import convert, is_foreign
from bnfuse.graph.signature import METADATA_KEY, signature_of
from bnfuse.graph.wellformed import check_wiring

FILE_KEY = "bnfuse.file"
MAX_ELEMENTS = 1 << 33  # of one tensor; beyond it the file is damaged or hostile
MAX_BYTES = 1 << 34  # of the file itself
RUNNING_OPERANDS = {"BatchNorm": (3, 5), "BatchNormInternal": (3, 5), "BatchNormFinalize": (4, 6)}
COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
PACKED = {"UINT4": 2, "INT4": 2, "FLOAT4E2M1": 2, "UINT2": 4, "INT2": 4}  # kinds with several elements a byte
ZIP = b"PK\x03\x04"
FOR_BUILD = (".pt2", ".pt", ".pth", ".ckpt")
CONTROL = re.compile(r"[\x00-\x1f]")
DOMAINS = ("", "ai.onnx", "ai.bnfuse", "com.microsoft", "ai.onnx.ml", "ai.onnx.training")


def read_proto(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read the model of a file with its external data. Raises BnfuseError where it is none."""
    path = Path(path)
    file = str(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BnfuseError(f"{file}: is larger than {MAX_BYTES >> 30} GiB: that is no ONNX model")
        data = path.read_bytes()
    except IsADirectoryError:
        raise BnfuseError(f"{file}: cannot be read: it is a folder. Name a file in it.") from None
    except OSError as error:
        raise BnfuseError(f"{file}: cannot be read: {error.strerror or error}") from None
    if path.suffix.lower() in FOR_BUILD and data.startswith(ZIP):
        raise BnfuseError(
            f"{file}: is of torch, and no ONNX model: `bnfuse build` makes a training graph of a .pt2, and takes "
            "others by --weights"
        )
    model = parse(data, file)
    check_sizes(model, file)
    check_wiring(model, file)
    load_external_data(model, path)
    return model


def parse(data: bytes, file: str | None) -> onnx.ModelProto:
    """Read a model from bytes. Raises BnfuseError, with what the bytes are instead, where they are no model."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        raise _named(file, f"is not an ONNX model, or is cut short: {what_instead(data)}") from None
    if not model.HasField("graph") or not model.graph.node:
        raise _named(file, f"is not an ONNX model: it {'has no graph' if data else 'is empty'}. Export it anew.")
    if any(not isinstance(name, str) or CONTROL.search(name) for name in _names(model)):
        raise _named(file, "is damaged: it has a name that is no text")
    return model


def what_instead(data: bytes) -> str:
    """Tell what bytes are that protobuf cannot read, and the remedy."""
    if data.startswith(ZIP):
        return "it is an archive, as .npz and .bnf files are. Name an .onnx file; compiled steps are for `bnfuse run`."
    return "protobuf cannot read it. Name an .onnx file, or export it anew."


def _names(model: onnx.ModelProto) -> Iterator[Any]:
    """Every name and metadata key; protobuf gives bytes for one that is no UTF-8."""
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attr.name for attr in node.attribute)
    graph = model.graph
    yield from (item.name for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
    yield from (opset.domain for opset in model.opset_import)
    yield from (entry.key for entry in model.metadata_props)


def check_sizes(model: onnx.ModelProto, file: str | None = None) -> None:
    """Check that dimensions are sane and initializers hold what their dimensions say, before memory is set aside for
    either."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        _check_dims(value.name, dims, file)
    for tensor in _tensors(model):
        _check_dims(tensor.name, tensor.dims, file)
        _check_contents(tensor, file)


def _tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    yield from model.graph.initializer
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.TENSOR:
                yield attr.t


def _check_dims(name: str, dims: Any, file: str | None) -> None:
    if any(dim < 0 for dim in dims) or math.prod(dim for dim in dims if dim) > MAX_ELEMENTS:
        raise _named(file, f"tensor '{name}' claims the shape {list(dims)[:8]}: no tensor is that large")


def _check_contents(tensor: TensorProto, file: str | None) -> None:
    """As many values, or bytes, as the shape says: a tensor without any is damaged too."""
    if tensor.data_type in (TensorProto.STRING, TensorProto.UNDEFINED):
        kind = TensorProto.DataType.Name(tensor.data_type)
        raise _named(file, f"tensor '{tensor.name}' is of type {kind}: it must hold numbers. Export it anew.")
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    except KeyError:
        raise _named(file, f"tensor '{tensor.name}' has the unknown element type {tensor.data_type}") from None
    raw = tensor.HasField("raw_data")
    shared = PACKED.get(TensorProto.DataType.Name(tensor.data_type), 1)
    stored = -(-math.prod(tensor.dims) // shared)
    expected = stored * (width if raw else 2 if tensor.data_type in COMPLEX else 1)
    held = len(tensor.raw_data if raw else getattr(tensor, field))
    if held != expected:
        unit = "bytes" if raw else "values"
        raise _named(
            file,
            f"tensor '{tensor.name}' holds {held} {unit} where its shape needs {expected}: the file is damaged or cut "
            "short. Export it anew.",
        )


def load_external_data(model: onnx.ModelProto, path: Path) -> None:
    """Read external data into the model; only from files in the model's own folder or below."""
    folder = path.resolve().parent
    for tensor in _tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        fields = {entry.key: entry.value for entry in tensor.external_data}
        where = external_file(fields.get("location", ""), folder, str(path), tensor.name)
        _read_external(tensor, fields, where, str(path))


def external_file(location: str, folder: Path, file: str, tensor: str) -> Path:
    """Give the file that `location` names, if it is inside `folder` (links followed)."""
    if not location or "\x00" in location:
        raise BnfuseError(f"{file}: tensor '{tensor}' has external data without a location")
    where = (folder / location).resolve()
    if Path(location).is_absolute() or not where.is_relative_to(folder):
        raise BnfuseError(
            f"{file}: tensor '{tensor}' has its data in '{location}', outside the model's folder: move it there"
        )
    if not where.is_file():
        raise BnfuseError(f"{file}: tensor '{tensor}' has its data in '{location}', which is not there")
    return where


def _read_external(tensor: TensorProto, fields: dict[str, str], where: Path, file: str) -> None:
    try:
        width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        offset, length = int(fields.get("offset", 0)), int(fields.get("length", -1))
    except (KeyError, ValueError):
        raise BnfuseError(f"{file}: tensor '{tensor.name}' has a damaged external data entry") from None
    expected = math.prod(tensor.dims) * width
    if length not in (-1, expected) or offset < 0 or offset + expected > where.stat().st_size:
        raise BnfuseError(f"{file}: tensor '{tensor.name}' needs {expected} bytes of '{where.name}': it is cut short")
    with where.open("rb") as stream:
        stream.seek(offset)
        tensor.raw_data = stream.read(expected)
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _named(file: str | None, what: str) -> BnfuseError:
    return BnfuseError(f"{file}: {what}" if file else what)


def load(
    source: Any,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    data_input: str | Iterable[str] | None = None,
    labels_input: str | Iterable[str] | None = None,
) -> ir.Model:
    """Load the model of a path, a ModelProto, a gs.Graph or an onnx_ir.Model (that itself, unless an option changes
    it). What onnxruntime-training made is converted to our dialect.

    `checkpoint` is a checkpoint of onnxruntime-training: its values become initializers of the graph's inputs.
    `data_input` and `labels_input` overrule what the file says, or what is inferred, about these inputs.
    """
    changed = checkpoint is not None or data_input is not None or labels_input is not None
    if isinstance(source, ir.Model):
        model = convert(source, file_of(source) if FILE_KEY in source.meta else None)
        model = source.clone() if changed and model is source else model
    elif isinstance(source, onnx.ModelProto):
        check_sizes(source)
        check_wiring(source)
        model = _from_proto(source, None)
    elif isinstance(source, str | os.PathLike):
        model = _from_proto(read_proto(source), str(os.fspath(source)))
        model.meta[FILE_KEY] = str(os.fspath(source))
    else:
        model = _from_graphsurgeon(source)
    if checkpoint is not None:
        from bnfuse.graph.artifacts import fill_from_checkpoint  # needs onnxruntime

        fill_from_checkpoint(model, checkpoint)
    if data_input is not None or labels_input is not None:
        signature = signature_of(model, data_input=data_input, labels_input=labels_input)
        model.metadata_props[METADATA_KEY] = signature.to_json()
    return model


def _from_proto(proto: onnx.ModelProto, file: str | None) -> ir.Model:
    if any(node.op_type == "InPlaceAccumulatorV2" for node in proto.graph.node):
        from bnfuse.graph.artifacts import expose_results  # needs onnxruntime

        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        expose_results(copy, file)
        proto = copy
    model = _deserialized(proto, file)
    if is_foreign(model):
        model = convert(model, file)
        proto = ir.to_proto(model)
    shapes = check_agreement(proto, file)
    for value in model.graph.outputs:
        if value.shape is None and value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
    check_domains(model, file)
    return model


def _deserialized(proto: onnx.ModelProto, file: str | None) -> ir.Model:
    try:
        return ir.from_proto(proto)
    except Exception as error:
        raise _named(file, f"is no valid ONNX model: {' '.join(str(error).split())[:200]}") from None


def _from_graphsurgeon(source: Any) -> ir.Model:
    import onnx_graphsurgeon as gs

    if not isinstance(source, gs.Graph):
        raise BnfuseError(f"cannot load a {type(source).__name__}: {instead_of(source)}")
    proto = gs.export_onnx(source, do_type_check=False)
    restore_inputs(proto)
    check_wiring(proto)
    return _from_proto(proto, None)


def instead_of(source: Any) -> str:
    """Tell what to give in the place of something that is no model."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.nn.Module | torch.export.ExportedProgram):
        return "bnfuse.build_training_graph(module, example=images) makes a training graph of a torch module"
    return "give a path, a ModelProto, a gs.Graph or an onnx_ir.Model"


def restore_inputs(proto: onnx.ModelProto) -> None:
    """Make variables of a training graph inputs again: importing into a gs.Graph leaves inputs that have a value as
    constants alone. They are told by their gradients among the outputs, and by the BNs whose statistics they are."""
    graph = proto.graph
    running = {name for node in graph.node for name in node.input[slice(*RUNNING_OPERANDS.get(node.op_type, (0, 0)))]}
    gradients = {value.name.removesuffix("_grad") for value in graph.output if value.name.endswith("_grad")}
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if tensor.name in running | gradients and tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def check_domains(model: ir.Model, file: str | None) -> None:
    """Check that every node is of a domain that is known, or is a function of the model."""
    local = {(function.domain, function.name) for function in model.functions.values()}
    for node in model.graph:
        if node.domain not in DOMAINS and (node.domain, node.op_type) not in local:
            raise at_node(
                node.name or "",
                f"{node.domain}::{node.op_type}",
                f"is of an unknown domain. Known: {', '.join(filter(None, DOMAINS))}, and functions of the model.",
                file=file,
            )


def file_of(model: ir.Model) -> str:
    """Give the path that the model came from, or its graph's name: what messages call it."""
    return str(model.meta.get(FILE_KEY) or model.graph.name or "model")


def save(model: ir.Model | onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write the model to a temporary file beside `path` and move it there."""
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    try:
        data = proto.SerializeToString()
    except Exception:
        raise BnfuseError(
            f"{os.fspath(path)}: the model is larger than 2 GiB, the most that one ONNX file holds"
        ) from None
    write_atomically(Path(path), data)
