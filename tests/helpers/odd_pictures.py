"""Folders and tars of pictures: plain ones, and one with all that files of images may be."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def noise(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """Smooth colours: a few random ones, interpolated."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, channels), np.uint8)
    large = Image.fromarray(small[..., 0] if channels == 1 else small).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(large)


def save_odd(folder: Path) -> None:
    """Write classes `a` and `ü b`: every mode of 8 bits, sizes, endings, places, links, a rotation, frames. Nothing in
    it is damaged."""
    for number, size in enumerate(((20, 31), (33, 17), (24, 24))):
        put(folder / "a" / f"{number}.JPG", Image.fromarray(noise(number, *size)), quality=95)
        put(folder / "ü b" / "deep" / "er" / f"é{number}.png", Image.fromarray(noise(9 + number, *size)))
    colour = Image.fromarray(noise(20, 21, 26))
    exif = Image.Exif()
    exif[0x0112] = 6
    put(folder / "a" / "rotated.jpeg", colour, exif=exif)
    put(folder / "a" / "grey.png", colour.convert("L"))
    put(folder / "a" / "inks.jpg", colour.convert("CMYK"), quality=95)
    put(folder / "a" / "palette.png", colour.quantize(17))
    put(folder / "a" / "black and white.png", colour.convert("1"))
    put(folder / "ü b" / "clear.png", with_alpha(colour))
    put(folder / "ü b" / "grey and clear.png", with_alpha(colour).convert("LA"))
    put(folder / "ü b" / "clear.webp", with_alpha(colour), lossless=True)
    put(folder / "ü b" / "palette and clear.png", colour.quantize(9), transparency=3)
    put(folder / "ü b" / "plain.BMP", colour)
    put(folder / "ü b" / "frames.tiff", colour, save_all=True, append_images=[colour.rotate(90)])
    put(folder / "ü b" / "words.ppm", colour)
    (folder / "ü b" / "linked.png").symlink_to(folder / "a" / "grey.png")


def put(path: Path, picture: Image.Image, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)


def with_alpha(picture: Image.Image) -> Image.Image:
    found = picture.copy()
    found.putalpha(Image.fromarray(noise(77, picture.height, picture.width, 1)))
    return found


def save_plain(folder: Path, counts: dict[str, int], size: tuple[int, int] = (12, 10), classes: int = 2) -> None:
    """Write `counts` images of each class of each part: grey smooth ones, whose brightness tells their class."""
    for part, count in counts.items():
        for label in range(classes):
            for number in range(count):
                values = noise(1000 * label + number, *size, 1) // 2 + 120 * label
                put(folder / part / f"c{label}" / f"{number:03}.png", Image.fromarray(values.astype(np.uint8)))


def save_tars(folder: Path, out: Path, per_shard: int = 5, kind: str = "cls") -> None:
    """Write a folder of parts as tars, `PART-000.tar` and so on, with the images in the folder's order."""
    out.mkdir(parents=True, exist_ok=True)
    for part in sorted(path.name for path in folder.iterdir()):
        classes = sorted(path.name for path in (folder / part).iterdir())
        files = [(path, classes.index(name)) for name in classes for path in sorted((folder / part / name).iterdir())]
        for start in range(0, len(files), per_shard):
            with tarfile.open(out / f"{part}-{start // per_shard:03}.tar", "w") as tar:
                for number, (path, label) in enumerate(files[start : start + per_shard]):
                    add(tar, f"{start + number:05}{path.suffix}", path.read_bytes())
                    text = str(label) if kind == "cls" else json.dumps({"label": label, "of": path.name})
                    add(tar, f"{start + number:05}.{kind}", text.encode())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
