"""The code of a kernel: packed, unpacked, and what is refused."""

from __future__ import annotations

import json

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels.cuda.container import Code, Stage, pack, unpack
from bnfuse.runtime.targets import arch

CODE = Code(
    (Stage("partial", (4, 2, 1), 256, 65536, ("x", "x_offset", "work")), Stage("final", (1, 1, 1), 32, 0, ("work",))),
    (("x", "buffer"), ("work", "buffer"), ("x_offset", "int32"), ("lr", "float32")),
    "sm_90",
    b"\x7fELF\n\x00{}\n",
    {"x": (32, 256)},
    {"partial": {"registers": 96}},
    True,
)


def test_what_is_packed_comes_back():
    assert unpack(pack(CODE), "k") == CODE


def test_the_first_line_is_json_and_the_rest_is_the_cubin():
    header, _, cubin = pack(CODE).partition(b"\n")
    assert json.loads(header)["parameters"][2] == ["x_offset", "int32"]
    assert cubin == CODE.cubin


@pytest.mark.parametrize(
    "change",
    [
        {"stages": []},
        {"stages": [{"symbol": "s", "grid": [0, 1, 1], "threads": 32, "shared": 0, "arguments": []}]},
        {"stages": [{"symbol": "s", "grid": [1, 1], "threads": 32, "shared": 0, "arguments": []}]},
        {"stages": [{"symbol": "s", "grid": [1, 1, 1], "threads": 32, "shared": 0, "arguments": ["nobody"]}]},
        {"parameters": [["x", "complex"]]},
        {"parameters": [["x", "buffer"], ["x", "buffer"]]},
        {"arch": None, "stages": None},
    ],
)
def test_a_header_that_does_not_hold_together_is_one_line(change):
    header = {**json.loads(pack(CODE).partition(b"\n")[0]), **change}
    with pytest.raises(BnfuseError, match="kernel 'k' is no code for a GPU") as caught:
        unpack(json.dumps(header).encode() + b"\n", "k")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"[1]\n", b"{}\n"])
def test_foreign_bytes_are_one_line(data):
    with pytest.raises(BnfuseError, match="compile the model again"):
        unpack(data, "k")


def test_code_runs_on_its_major_version_from_its_minor_version_on():
    assert arch.runs_on("sm_80", "sm_86") and arch.runs_on("sm_90", "sm_90") and arch.runs_on("sm_100", "sm_103")
    assert not arch.runs_on("sm_86", "sm_80") and not arch.runs_on("sm_90", "sm_80")
    assert not arch.runs_on("sm_90", "sm_100")


def test_a_device_gets_the_newest_code_that_it_runs():
    assert [arch.best_for(d) for d in ("sm_80", "sm_87", "sm_89", "sm_90")] == ["sm_80", "sm_86", "sm_89", "sm_90"]
    with pytest.raises(BnfuseError, match="the GPU is sm_75"):
        arch.best_for("sm_75")
