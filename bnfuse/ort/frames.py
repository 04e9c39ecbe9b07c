"""What two processes say to each other: a header in JSON, and arrays as their bytes. Nothing is unpickled.

length of the header (8 bytes) | {"fields": ..., "arrays": [[name, dtype, shape], ...]} | the arrays' bytes
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

Arrays = dict[str, np.ndarray]
LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise TypeError for an array of objects (onnxruntime's strings)."""
    plain = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    for name, array in plain.items():
        if array.dtype.hasobject:
            raise TypeError(f"'{name}' holds strings or objects, not numbers")
    about = [[name, array.dtype.str, array.shape] for name, array in plain.items()]
    header = json.dumps({"fields": fields, "arrays": about}).encode()
    stream.write(LENGTH.pack(len(header)))
    stream.write(header)
    for array in plain.values():
        stream.write(array.reshape(-1).view(np.uint8).data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], Arrays]:
    """Raise EOFError where the other end is gone."""
    (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
    header = json.loads(bytes(_exactly(stream, length)))
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        kind = np.dtype(dtype)
        data = _exactly(stream, math.prod(shape) * kind.itemsize)
        arrays[name] = np.frombuffer(data, kind).reshape(shape)
    return header["fields"], arrays


def _exactly(stream: IO[bytes], count: int) -> bytearray:
    """So many bytes, in memory that may be written to: onnxruntime updates some of its operands in place."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = stream.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise EOFError
        view = view[got:]
    return data
