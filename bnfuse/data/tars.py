"""WebDataset's tars: `0001.jpg` and `0001.cls` beside each other are one sample, in as many tars as there are.

    tar_shards("shards/train-{000..009}.tar", reading)       # braces as a shell has them, and * ? [ ]

Nothing is extracted. The tars are gone through once, header by header, and of each image its range of bytes is held, of
which a batch reads those that it needs. So any order can be had, a run goes on where it stood, and what a batch holds
does not depend on who reads it; a tar that is packed has no such ranges, and is refused.

A label is the whole number in `.cls`, or in `.json` as `label`, `cls` or `class`.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from bnfuse.core.errors import BnfuseError

from .dataset import Part, Raw
from .folders import IMAGE_SUFFIXES, PART_NAMES
from .items import Shards, stamp_of
from .reading import Reading, looked_at
from .tally import Tally

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LABELS = ("label", "cls", "class")  # keys in .json
MAX_SHARDS = 1 << 16
MAX_LABEL_BYTES = 1 << 20  # of a .cls or .json
RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_tars(name: str) -> bool:
    """Tell whether data of this name are tars."""
    return name.endswith((".tar", *PACKED)) or (".tar" in name and "{" in name)


def holds_tars(folder: Path) -> bool:
    """Tell whether a folder holds tars and no folders."""
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir()) for entry in found if not entry.name.startswith(".")]
    return any(name.endswith(".tar") for name, _ in entries) and not any(is_dir for _, is_dir in entries)


def tar_shards(name: str, reading: Reading) -> Raw:
    """Find the samples of tars, in parts by the names of their files where these tell them apart. Raises BnfuseError
    for what is no such tar, in one line that names the file."""
    reading.require_streaming(name)
    paths = shards_of(name)
    tally, remarks = Tally(paths[0].parent), Tally(paths[0].parent)
    stamps = {path: stamp_of(path.stat()) for path in paths}  # before they are looked through
    parts = {}
    for part, members in by_part(paths, name).items():
        samples = [sample for path in members for sample in samples_of(path, members.index(path), tally)]
        if not samples:
            raise BnfuseError(f"{members[0]}: has no sample: an image, and beside it a .cls or .json of the same name")
        places = np.array([(sample.tar, sample.start, sample.size) for sample in samples], np.int64)
        items = Shards(
            tuple(members), tuple(sample.name for sample in samples), places, tuple(stamps[path] for path in members)
        )
        labels = np.array([sample.label for sample in samples], np.int64)
        kept = looked_at(items, reading, remarks, tally)
        if not kept.any():
            raise BnfuseError(f"{members[0]}: none of its {len(kept)} images can be read (first: {samples[0].name})")
        chosen = np.flatnonzero(kept)
        parts[part] = Part(reading.images(items.take(chosen)), labels[chosen], f"{members[0].name} and its like")
    left = [f"{name}: left out: {', '.join(tally.parts())}"] if tally.counts else []
    return Raw(parts, notes=(*left, *remarks.lines()), fitted=True)


def shards_of(name: str) -> list[Path]:
    """List the files of a pattern, or the tars of a folder; a name that is there is no pattern, whatever is in it.
    Raises BnfuseError where one is not there, or is packed."""
    found: list[str] = []
    folder = Path(name).is_dir() and not name.endswith(".tar")
    for spelt in [f"{name}/*.tar"] if folder else [name] if Path(name).is_file() else expanded(name):
        before, _, base = spelt.rpartition("/")
        if any(sign in spelt for sign in "*?[") and not Path(spelt).is_file():
            own = f"{glob.escape(before)}/{base}" if Path(before).is_dir() and "/" in spelt else spelt
            found += sorted(glob.glob(own))  # noqa: PTH207 (patterns may be absolute)
        else:
            found.append(spelt)
        if len(found) > MAX_SHARDS:
            raise BnfuseError(f"{name}: are more than {MAX_SHARDS:,} tars, the most that are read")
    if not found:
        raise BnfuseError(f"{name}: there is no such tar")
    found = list(dict.fromkeys(map(os.path.normpath, found)))  # patterns may overlap: each tar is read once
    for path in found:
        if path.endswith(PACKED):
            raise BnfuseError(f"{path}: is packed, so that no image in it can be read by itself: unpack it to .tar")
        if not Path(path).is_file():
            raise BnfuseError(f"{path}: is not there, or is no file")
    return [Path(path) for path in found]


def expanded(name: str) -> list[str]:
    """Write out braces as a shell does: `{000..009}` with its zeros, and `{train,val}`, within each other too. Raises
    BnfuseError where they are more than `MAX_SHARDS`."""
    start = name.find("{")
    end = closing(name, start) if start >= 0 else -1
    if end < 0:
        return [name]
    inside, span = name[start + 1 : end], RANGE.fullmatch(name[start + 1 : end])
    if span is None:
        pieces = top_level(inside)
        ones = [whole for piece in pieces for whole in expanded(piece)]
        if len(pieces) == 1:  # nothing to choose from: a shell leaves the braces
            ones = [f"{{{one}}}" for one in ones]
    else:
        first, last = int(span[1]), int(span[2])
        if abs(last - first) >= MAX_SHARDS:
            raise BnfuseError(f"{name}: are more than {MAX_SHARDS:,} tars, the most that are read")
        width = len(span[1]) if span[1].startswith("0") else 0
        order = range(first, last + 1) if first <= last else range(first, last - 1, -1)
        ones = [f"{number:0{width}}" for number in order]
    rest = expanded(name[end + 1 :])
    if len(ones) * len(rest) > MAX_SHARDS:
        raise BnfuseError(f"{name}: are more than {MAX_SHARDS:,} tars, the most that are read")
    return [name[:start] + one + other for one in ones for other in rest]


def closing(text: str, start: int) -> int:
    """Find the brace that closes the one at `start`; -1 where none does."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    return -1


def top_level(text: str) -> list[str]:
    """Divide by the commas that are in no braces."""
    pieces, depth = [""], 0
    for sign in text:
        depth += (sign == "{") - (sign == "}")
        if sign == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += sign
    return pieces


def by_part(paths: Sequence[Path], name: str) -> dict[str, list[Path]]:
    """Tell the parts apart by what the names of files, or of their folders, begin with; all are to train on where none
    says so."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(part_of(path) or "", []).append(path)
    if set(found) == {""}:
        return {"train": found[""]}
    if "" in found:
        raise BnfuseError(
            f"{found[''][0]}: does not say of which part it is, as others do: begin its name with train, val or test"
        )
    if "train" not in found:
        raise BnfuseError(f"{name}: has {', '.join(found)} but no train: its tars are called train-....tar")
    return found


def part_of(path: Path) -> str | None:
    """Tell the part by what the name of a file begins with, `val-003.tar`, or by its folder, `val/003.tar`."""
    for text in (re.split(r"[^a-z]", path.name.lower())[0], path.parent.name.lower()):
        for part, spellings in PART_NAMES.items():
            if text in spellings:
                return part
    return None


@dataclasses.dataclass(frozen=True)
class Sample:
    """An image in a tar, its place there, and its label."""

    tar: int
    name: str
    start: int
    size: int
    label: int


def samples_of(path: Path, number: int, tally: Tally) -> Iterator[Sample]:
    """List the samples of a tar. Raises BnfuseError for what is no tar, and for an image without a label."""
    try:
        with path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            yield from grouped(path, number, stream, tar, tally)
    except (tarfile.TarError, OSError, EOFError) as error:
        what = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        raise BnfuseError(f"{path}: is no tar that can be read: {what}") from None


def grouped(path: Path, number: int, stream: IO[bytes], tar: tarfile.TarFile, tally: Tally) -> Iterator[Sample]:
    """Put the members that follow each other under one name together."""
    key: str | None = None
    members: dict[str, tarfile.TarInfo] = {}
    for member in (*ordinary(path, stream, tar, tally), None):
        folder, _, base = member.name.rpartition("/") if member is not None else ("", "", "")
        stem, _, ending = base.partition(".")
        this = None if member is None else f"{folder}/{stem}"
        if key is not None and this != key:
            yield from sample(path, number, stream, key, members, tally)
            members = {}
        key = this
        if member is not None:
            members[ending.lower()] = member


def ordinary(path: Path, stream: IO[bytes], tar: tarfile.TarFile, tally: Tally) -> Iterator[tarfile.TarInfo]:
    """List the members that are whole files; links, devices and files with holes are none, and are counted."""
    end = path.stat().st_size
    for member in tar:  # ends without a word at a header that is none
        tar.members = []  # type: ignore[attr-defined]  # of which tarfile keeps all
        if member.isdir():
            continue
        if member.name.rpartition("/")[2].startswith("."):  # ._NAME, as macOS adds for each file
            tally.add("hidden in a tar", f"{path}: {member.name}")
            continue
        if not member.isreg() or member.issparse():
            tally.add("no ordinary file in a tar", f"{path}: {member.name}")
        elif member.offset_data + member.size > end:
            raise tarfile.ReadError(f"it is cut short within {member.name}")
        else:
            yield member
    require_end(stream, tar.offset, end)  # type: ignore[attr-defined]


def require_end(stream: IO[bytes], start: int, end: int) -> None:
    """Raise where no end of a tar is at `start`: a block of zeros, or more, and nothing but zeros behind it."""
    if end - start < tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it is cut short at byte {end}: it has no end")
    stream.seek(start)
    while piece := stream.read(1 << 20):
        if piece.strip(b"\0"):
            at = start + len(piece) - len(piece.lstrip(b"\0"))
            raise tarfile.ReadError(f"it is damaged at byte {at}, or another one is joined to it there")
        start += len(piece)


def sample(
    path: Path, number: int, stream: IO[bytes], key: str, members: Mapping[str, tarfile.TarInfo], tally: Tally
) -> Iterator[Sample]:
    """Give the sample of these members, by their endings; nothing where there is no image among them."""
    images = [ending for ending in members if f".{ending.rpartition('.')[2]}" in IMAGE_SUFFIXES]
    name = key.removeprefix("/")
    if not images:
        tally.add("without an image", f"{path}: {name}")
        return
    images = [ending for ending in images if "." not in ending] or images  # 1.png, not 1.depth.png
    if len(images) > 1:
        two = " and ".join(members[ending].name for ending in images[:2])
        raise BnfuseError(f"{path}: {two} are images of one sample: leave one of them")
    image = members[images[0]]
    for ending in ("cls", "json"):
        if ending in members:
            label = label_in(content_of(stream, members[ending], path), ending, f"{path}: {members[ending].name}")
            yield Sample(number, image.name, image.offset_data, image.size, label)
            return
    raise BnfuseError(f"{path}: {image.name}: has no label: a {name}.cls or {name}.json beside it")


def content_of(stream: IO[bytes], member: tarfile.TarInfo, path: Path) -> bytes:
    """Read a small member, and go back to where the stream was."""
    if member.size > MAX_LABEL_BYTES:
        raise BnfuseError(f"{path}: {member.name}: has {member.size:,} bytes, too many for a label")
    before = stream.tell()
    stream.seek(member.offset_data)
    content = stream.read(member.size)
    stream.seek(before)
    return content


def label_in(content: bytes, ending: str, place: str) -> int:
    """Read a label. Raises BnfuseError where there is no whole number."""
    value: Any = None
    try:
        if ending == "cls":
            value = int(content.decode("ascii").strip())
        else:
            found = json.loads(content)
            held = found if isinstance(found, dict) else {}
            value = next((held[label] for label in LABELS if label in held), found if isinstance(found, int) else None)
    except (ValueError, RecursionError):
        value = None
    if type(value) is not int or not 0 <= value <= 1 << 20:
        what = "a whole number" if ending == "cls" else f"a whole number as {' or '.join(LABELS)}"
        raise BnfuseError(f"{place}: holds no label: {what} from 0")
    return value
