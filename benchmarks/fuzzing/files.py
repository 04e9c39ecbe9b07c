"""Mutations of what is no ONNX model: compiled steps, checkpoints, run folders, data sets. All work on bytes.

The object code of a step is native code that its user trusts, as a program is: it stays as it is.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from PIL import Image

from . import graphs
from .values import NAMES, disturb_bytes, disturb_json, disturb_text, pick

Members = dict[str, bytes]


def read_zip(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_zip(members: Members) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return stream.getvalue()


def lie_about_sizes(data: bytes, rng: random.Random) -> bytes:
    """A size in one entry of the archive's directory is another."""
    places = [at for at in range(len(data) - 46) if data[at : at + 4] == b"PK\x01\x02"]
    if not places:
        return data
    field = rng.choice(places) + rng.choice((16, 20, 24, 42))  # checksum, packed size, size, where it begins
    return data[:field] + struct.pack("<I", rng.choice((0, 1, 77, 2**31, 2**32 - 2))) + data[field + 4 :]


def mutate_step(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    kind = rng.choice((*["manifest"] * 6, "member", "state", "state", "initial", "model", "sizes", "file", "foreign"))
    if kind == "sizes":
        return lie_about_sizes(data, rng), kind
    if kind == "file":
        return data[: rng.randrange(len(data))], kind  # flipped bits could fall into the code
    members = read_zip(data)
    if kind == "manifest":
        members["manifest.json"] = disturb_manifest(members["manifest.json"], rng)
    elif kind == "member":
        del members[rng.choice(list(members))]
    elif kind == "foreign":
        members[rng.choice(("../out", "/tmp/out", "code/none.o", "manifest.json/x", *NAMES[1:]))] = b"x"
    elif kind == "model":
        members["model.onnx"], _ = mutate_model(members["model.onnx"], rng)
    else:
        name = f"{kind}.safetensors"
        members[name] = mutate_safetensors(members[name], rng)[0]
    return write_zip(members), kind


def disturb_manifest(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        return disturb_text(data.decode(), rng).encode()
    manifest = json.loads(data)
    if rng.random() < 0.5:
        return json.dumps(disturb_json(manifest, rng)).encode()
    programs = manifest["programs"]  # that is where offsets, shapes and launches are
    part = rng.choice(list(programs))
    programs[part] = disturb_json(programs[part], rng)
    return json.dumps(manifest).encode()


def mutate_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The header is a length and JSON: tensors by name with dtype, shape and offsets, and __metadata__."""
    kind = rng.choice(
        ("header", "header", "metadata", "metadata", "metadata", "length", "bytes", "drop", "rename", "nan")
    )
    (length,) = struct.unpack("<Q", data[:8])
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    if kind == "bytes":
        return disturb_bytes(data, rng), kind
    if kind == "length":
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))) + data[8:], kind
    if kind == "nan":
        return data[: 8 + length] + b"\xff" * len(values), kind
    if kind == "header":
        header = disturb_json(header, rng)
    elif kind == "metadata":
        metadata = header.setdefault("__metadata__", {"format": "bnfuse"})
        key = rng.choice(sorted(metadata))  # their order in the file is by chance
        metadata[key] = disturb_text(metadata[key], rng)
    elif names and kind == "drop":
        del header[rng.choice(names)]
    elif names:
        header[rng.choice(NAMES)] = header.pop(rng.choice(names))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values, kind


def mutate_model(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A model that says something else, or one in ten times bytes that are none."""
    if rng.random() < 0.1:
        return disturb_bytes(data, rng), "bytes"
    model = onnx.load_from_string(data)
    names = graphs.mutate(model, rng)
    return model.SerializeToString(), " ".join(names)


def mutate_run(folder: Path, rng: random.Random) -> str:
    """A run's folder: its checkpoints, its metrics, and what else may lie there."""
    kind = rng.choice(("last", "last", "last", "best", "metrics", "metrics", "gone", "folder", "odd"))
    if kind in ("last", "best"):
        path = folder / f"{kind}.safetensors"
        changed, what = mutate_safetensors(path.read_bytes(), rng)
        path.write_bytes(changed)
        return f"{kind} {what}"
    if kind == "metrics":
        path = folder / "run.jsonl"
        lines = path.read_text().splitlines()
        if rng.random() < 0.5:
            path.write_bytes(disturb_bytes(path.read_bytes(), rng))
        else:
            index = rng.randrange(len(lines))
            lines[index] = disturb_text(lines[index], rng)
            path.write_text("\n".join(lines) + "\n")
    elif kind == "gone":
        (folder / rng.choice(("last.safetensors", "best.safetensors", "run.jsonl"))).unlink()
    elif kind == "folder":
        path = folder / rng.choice(("last.safetensors", "best.safetensors", "run.jsonl", ".lock"))
        path.unlink(missing_ok=True)
        path.mkdir()
    else:
        (folder / ".last.safetensors.abcdefgh").write_bytes(b"left over")
        (folder / "a\nb").write_bytes(b"")
    return kind


class Payload:
    """What pickles of it do when they are read: they make a folder."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, ("unpickled",)


def mutate_npz(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    kinds = ("array", "array", "array", "array", "objects", "pickle", "member", "header", "sizes", "bytes", "foreign")
    kind = rng.choice(kinds)
    if kind == "bytes":
        return disturb_bytes(data, rng), kind
    if kind == "sizes":
        return lie_about_sizes(data, rng), kind
    members = read_zip(data)
    name = rng.choice(list(members))
    if kind == "member":
        del members[name]
    elif kind == "header":
        members[name] = disturb_npy_header(members[name], rng)
    elif kind == "foreign":
        members[rng.choice(("x", "x.npy", "z.npy", "../x.npy"))] = disturb_bytes(members[name], rng)
    else:
        array = np.load(io.BytesIO(members[name]))
        stream = io.BytesIO()
        if kind == "pickle":
            np.save(stream, np.array([Payload()] * len(array), object), allow_pickle=True)
        elif kind == "objects":
            np.save(stream, array.astype(object), allow_pickle=True)
        else:
            np.save(stream, odd_array(array, rng))
        members[name] = stream.getvalue()
    return write_zip(members), kind


def odd_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Other types, shapes or values."""
    kind = rng.choice(("type", "type", "shape", "empty", "values", "rows"))
    if kind == "type":
        dtypes = (
            "bool",
            "int8",
            "int64",
            "uint64",
            "float16",
            "float64",
            "complex64",
            "S3",
            "U3",
            "M8[s]",
            ">f4",
            "V4",
        )
        dtype = rng.choice(dtypes)
        return np.zeros(array.shape, dtype) if dtype in ("M8[s]", "V4") else array.astype(dtype)
    if kind == "shape":
        return array.reshape(rng.choice(((-1,), (1, *array.shape), (*array.shape, 1), array.shape[::-1])))
    if kind == "empty":
        return array[:0]
    if kind == "rows":
        return array[: rng.randrange(len(array))]
    if array.dtype.kind in "iu":
        changed = array.astype("int64")
        changed.ravel()[rng.randrange(array.size)] = rng.choice((-1, 10, 255, 2**40))
        return changed
    changed = array.astype("float32")
    changed.ravel()[rng.randrange(array.size)] = rng.choice((np.nan, np.inf, 1e38, -1e30))
    return changed


def disturb_npy_header(data: bytes, rng: random.Random) -> bytes:
    """`.npy`: a magic, a version, a length, and a Python literal with the type and the shape."""
    (length,) = struct.unpack("<H", data[8:10])
    shapes = (b"(-1,)", b"(2305843009213693952, 64)", b"()", b"None", b"(1e9,)", b"__import__('os')", b"(" * 300)
    header = b"{'descr': %s, 'fortran_order': %s, 'shape': %s, }\n" % (
        rng.choice((b"'|u1'", b"'|O'", b"'<f99'", b"[('a', '<i4')]", b"'x'", b"7")),
        rng.choice((b"False", b"True", b"3")),
        rng.choice(shapes),
    )
    return data[:8] + struct.pack("<H", len(header)) + header + data[10 + length :]


def mutate_images(folder: Path, rng: random.Random) -> str:
    """A folder with a folder of images for each class."""
    kind = rng.choice(("bytes", "bytes", "bytes", "mode", "size", "odd file", "class", "empty", "link", "none", "huge"))
    pictures = sorted(folder.rglob("*.png"))
    path = rng.choice(pictures)
    if kind == "bytes":
        path.write_bytes(disturb_bytes(path.read_bytes(), rng))
    elif kind == "mode":
        mode = rng.choice(("1", "P", "LA", "RGBA", "I;16", "I", "F", "CMYK"))
        suffix = ".tif" if mode in ("I", "F", "CMYK") else ".png"
        Image.new(mode, (8, 8)).save(path.with_suffix(suffix))
    elif kind == "size":
        Image.new("L", rng.choice(((1, 1), (9, 8), (1, 4000)))).save(path)
    elif kind == "huge":  # a header that claims what no memory holds
        data = bytearray(path.read_bytes())
        data[16:24] = struct.pack(">II", *rng.choice(((2**31 - 1, 2**31 - 1), (0, 8), (100_000, 100_000))))
        path.write_bytes(bytes(data))
    elif kind == "odd file":
        name = rng.choice(("notes.txt", ".hidden.png", "a\nb.png", "x.jpg", "\x1b[31m.png", "._a.png"))
        (path.parent / name).write_bytes(rng.choice((b"", b"not an image", path.read_bytes())))
    elif kind == "class":
        new = folder / rng.choice(("zzz", "__MACOSX", "a\nb", "\x1b[31mred", ".hidden"))
        new.mkdir()
        if rng.random() < 0.5:
            (new / "a.png").write_bytes(path.read_bytes())
    elif kind == "link":
        path.unlink()
        path.symlink_to(pick(rng, ("nowhere.png", "/dev/null", "/dev/zero", "..", path.name)) or "")
    elif kind == "empty":
        for other in path.parent.iterdir():
            other.unlink()
    else:
        for other in pictures:
            other.unlink()
    return kind
