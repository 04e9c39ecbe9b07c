"""Programs that torch.export.save wrote (.pt2): data, and a file that is more than data is refused.

torch unpickles parts of such a file without asking what they are. So each of these parts is unpickled as tensors alone
first (torch.load, weights_only=True), and only a file that has nothing else in it is given to torch.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line, one_line

from .export import require_torch, root_of

OBJECTS = ("custom_obj_", "opaque_obj_")  # constants that are no tensors
PICKLES = (b"PK", b"\x80")  # what a file of torch.save, and a plain pickle, begin with


def is_program(text: str) -> bool:
    """Tell whether a source is meant as a file that torch.export.save wrote."""
    return Path(text).suffix.lower() == ".pt2"


def program_of(path: str) -> Any:
    """Read what torch.export.save wrote, an ExportedProgram. Raises BnfuseError where it is something else, or holds
    more than tensors and a graph."""
    torch = require_torch()
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be read: {error.strerror or error}") from None
    refuse_code(torch, data, path)
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:
        raise BnfuseError(f"{path}: torch {torch.__version__} cannot read it: {root_of(error)}") from None


def refuse_code(torch: Any, data: bytes, path: str) -> None:
    """Raise unless every pickle of an archive holds tensors alone, and nothing in it is compiled."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if len({name.lower() for name in names}) < len(names):
                raise BnfuseError(f"{path}: has two members of one name: save it anew by torch.export.save")
            if not any(name.endswith("archive_format") for name in names):
                raise BnfuseError(f"{path}: was not written by torch.export.save of a torch from 2.8 on: save it anew")
            plain = plain_members(archive, names, path)
            for name in names:
                what = Path(name).name
                if "aotinductor" in name or what.endswith((".so", ".o")):
                    raise BnfuseError(f"{path}: holds compiled code ('{name}'): save it by torch.export.save")
                if what.startswith(OBJECTS):
                    raise BnfuseError(f"{path}: holds an object that is no tensor ('{name}'): its pickle may run code")
                if name not in plain and (content := archive.read(name)).startswith(PICKLES):
                    require_tensors(torch, content, name, path)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise BnfuseError(f"{path}: was not written by torch.export.save ({first_line(error)})") from None


def plain_members(archive: zipfile.ZipFile, names: list[str], path: str) -> set[str]:
    """List the members that torch reads as numbers, by the lists beside them."""
    found = set()
    for listing in (name for name in names if name.endswith("_config.json")):
        try:
            entries = json.loads(archive.read(listing))["config"].values()
            members = {f"{listing.rpartition('/')[0]}/{e['path_name']}" for e in entries if e["use_pickle"] is False}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BnfuseError(f"{path}: is damaged: '{listing}' does not list tensors") from None
        found |= members
    return found


def require_tensors(torch: Any, content: bytes, name: str, path: str) -> None:
    """Raise where a pickle holds something else than tensors and plain containers of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle's protocol: one that does not read is refused
            torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        raise BnfuseError(
            f"{path}: '{name}' is not tensors alone, and its pickle may run code: {one_line(first_line(error))[:200]}"
        ) from None
