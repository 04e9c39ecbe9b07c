"""Kernels for 64-bit Arm, linked into a program of their own (serve.c) that runs under qemu.

What is needed (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user) is told by `missing_tools`.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
PREFIX = "aarch64-linux-gnu-"
EMULATOR = "qemu-aarch64"
TOOLS = (f"{PREFIX}gcc", f"{PREFIX}objcopy", EMULATOR)
SYMBOL = "__tvm_ffi_"
INT, FLOAT, TENSOR = 1, 3, 7
TYPE_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


class Emulator:
    """A process that runs kernels, given by symbol and object code, for the CPU model that qemu is told."""

    def __init__(self, names: Sequence[str], codes: Sequence[bytes], model: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bnfuse-emulation-")
        program = link(pathlib.Path(self._folder.name), names, codes)
        self._process = subprocess.Popen(
            [EMULATOR, "-cpu", model, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.calls = 0

    def function(self, index: int) -> Callable[..., None]:
        return lambda *arguments: self.call(index, arguments)

    def call(self, index: int, arguments: Sequence[Any]) -> None:
        """Run one kernel. Tensors are numpy arrays or speak DLPack, and are changed in place."""
        assert self._process.stdin and self._process.stdout
        self.calls += 1
        given = [np.from_dlpack(a) if hasattr(a, "__dlpack__") else a for a in arguments]
        blocks = blocks_of([a for a in given if isinstance(a, np.ndarray)])
        request = [struct.pack("<iiii", len(blocks), index, len(given), 0)]
        request += [struct.pack("<q", block.nbytes) + block.tobytes() for block in blocks]
        request += [encoded(argument, blocks) for argument in given]
        self._process.stdin.write(b"".join(request))
        self._process.stdin.flush()
        (status,) = struct.unpack("<i", self._read(4))
        assert status == 0, f"kernel {index} returned {status}"
        for block in blocks:
            block[...] = np.frombuffer(self._read(block.nbytes), np.uint8)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout
        data = self._process.stdout.read(size)
        assert len(data) == size, f"the emulated program ended with status {self._process.wait()}"
        return data

    def close(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=20)
        self._folder.cleanup()


def blocks_of(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The memory of the arrays as bytes, each byte once: kernels get channels of one buffer as several arguments."""
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays)
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return [np.ctypeslib.as_array((ctypes.c_uint8 * (stop - start)).from_address(start)) for start, stop in merged]


def encoded(argument: Any, blocks: Sequence[np.ndarray]) -> bytes:
    if isinstance(argument, np.ndarray):
        start = argument.ctypes.data
        index = next(i for i, b in enumerate(blocks) if b.ctypes.data <= start < b.ctypes.data + max(b.nbytes, 1))
        code, bits = TYPE_CODES[argument.dtype.kind], argument.dtype.itemsize * 8
        return struct.pack("<6q", TENSOR, index, start - blocks[index].ctypes.data, argument.size, code, bits)
    if isinstance(argument, float):
        return struct.pack("<qd", FLOAT, argument)
    return struct.pack("<qq", INT, int(argument))


def link(folder: pathlib.Path, names: Sequence[str], codes: Sequence[bytes]) -> pathlib.Path:
    """One static program of all kernels; each gets a symbol of its own, for several may share a name."""
    objects = []
    for index, (name, code) in enumerate(zip(names, codes, strict=True)):
        path = folder / f"kernel{index}.o"
        path.write_bytes(code)
        run(f"{PREFIX}objcopy", "--redefine-sym", f"{SYMBOL}{name}=kernel{index}", str(path))
        objects.append(str(path))
    table = folder / "table.c"
    declared = "".join(f"int kernel{i}();\n" for i in range(len(objects)))
    listed = ", ".join(f"kernel{i}" for i in range(len(objects)))
    table.write_text(f"{declared}int (*const KERNELS[])() = {{{listed}}};\n")
    program = folder / "kernels"
    run(f"{PREFIX}gcc", "-O1", "-static", "-o", str(program), str(HERE / "serve.c"), str(table), *objects, "-lm")
    return program


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]}: {done.stderr.strip()}"
