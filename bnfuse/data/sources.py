"""Where images come from: the embedded digits, Debian's Fashion-MNIST, .npz files, folders of images.

A file is input from outside: nothing is unpickled, sizes are checked before memory is set aside, and what is wrong is
said in one line.
"""

from __future__ import annotations

import gzip
import os
import zipfile
import zlib
from importlib import resources
from pathlib import Path

import numpy as np

from bnfuse.errors import BnfuseError

from .dataset import MAX_BYTES, Dataset, Raw, finish

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))
MAX_IMAGES = 1 << 20
MAX_PIXELS = 1 << 26  # of one image file


def load_data(
    spec: str | os.PathLike[str],
    *,
    image: int | None = None,
    channels: int | None = None,
    classes: int | None = None,
    fit: str = "resize",
    seed: int = 0,
    held_out: float = 0.2,
) -> Dataset:
    """Images by name (`digits`, `fashion-mnist`), of an .npz file, or of a folder with a folder for each class.

    image     side that the images are brought to, by `fit`: resize, or pad with zeros
    channels  1 or 3: grey is repeated, colour is averaged by luminance
    classes   what the network has; fails where the data has more
    held_out  share of the images for testing, chosen by `seed`, where the source has no test part of its own
    """
    for what, value in (("image", image), ("channels", channels), ("classes", classes)):
        if value is not None and not 1 <= value <= 1 << 14:
            raise BnfuseError(f"{what}={value} is out of range: it must be from 1 to {1 << 14}")
    if fit not in ("resize", "pad"):
        raise BnfuseError(f"fit={fit} is unknown: it is resize or pad")
    name = os.fspath(spec)
    raw = _source(name, image, channels)
    return finish(raw, name, image=image, channels=channels, classes=classes, fit=fit, seed=seed, held_out=held_out)


def _source(name: str, image: int | None, channels: int | None) -> Raw:
    if name == "digits":
        return digits()
    if name == "fashion-mnist":
        return fashion_mnist()
    path = Path(name)
    if path.is_dir():
        return image_folder(path, image, channels)
    if path.suffix == ".npz":
        return npz_file(path)
    raise BnfuseError(
        f"{name}: is no data: give digits, fashion-mnist, an .npz with x and y, or a folder with a folder per class"
    )


def digits() -> Raw:
    with resources.files(__package__).joinpath("digits.npz").open("rb") as stream, np.load(stream) as arrays:
        return Raw(arrays["images"][:, None], arrays["labels"], class_names=tuple("0123456789"), scale=16.0)


def fashion_mnist(folder: Path | None = None) -> Raw:
    folder = folder or FASHION_FOLDER
    if not folder.is_dir():
        raise BnfuseError(f"{folder}: is not there: install Debian's package (apt install dataset-fashion-mnist)")
    parts = []
    for part in ("train", "t10k"):
        x = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
        parts.append((x[:, None], read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)))
    return Raw(*parts[0], test=parts[1], class_names=FASHION_CLASSES)


def read_idx(path: Path, rank: int) -> np.ndarray:
    """uint8 values of a gzipped IDX file: magic 0, 0, 8, rank; big-endian sizes; the values."""
    try:
        with gzip.open(path) as stream:
            head = stream.read(4 + 4 * rank)
            shape = tuple(int(size) for size in np.frombuffer(head[4:], ">u4"))
            if head[:4] != bytes((0, 0, 8, rank)) or len(shape) != rank:
                raise BnfuseError(f"{path}: is no IDX file of {rank} dimensions")
            size = int(np.prod(shape, dtype=np.float64))
            if size > MAX_BYTES:
                raise BnfuseError(f"{path}: claims {size} bytes of images")
            data = stream.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise BnfuseError(f"{path}: cannot be read: {error}") from None
    if len(data) != size:
        raise BnfuseError(f"{path}: is cut short: {len(data)} of {size} bytes")
    return np.frombuffer(data, np.uint8).reshape(shape)


def npz_file(path: Path) -> Raw:
    """`x` [N, H, W], [N, C, H, W] or [N, H, W, C] and `y` [N]; `x_test` and `y_test` where it has a test part."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
                raise BnfuseError(f"{path}: unpacks to more than {MAX_BYTES >> 30} GiB")
        with np.load(path, allow_pickle=False) as arrays:
            missing = [key for key in ("x", "y") if key not in arrays]
            if missing:
                found = ", ".join(arrays.files[:6]) or "nothing"
                raise BnfuseError(f"{path}: has no array '{missing[0]}' (it has {found}): it needs x and y")
            x, y = _map_of(arrays["x"], path), arrays["y"]
            test = None
            if "x_test" in arrays and "y_test" in arrays:
                test = (_map_of(arrays["x_test"], path), arrays["y_test"])
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise BnfuseError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if test is not None and test[0].shape[1:] != x.shape[1:]:
        raise BnfuseError(f"{path}: x and x_test hold images of different shapes")
    return Raw(x, y, test=test)


def _map_of(x: np.ndarray, path: Path) -> np.ndarray:
    """[N, C, H, W]."""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or x.dtype.kind not in "fiu" or 0 in x.shape:
        raise BnfuseError(f"{path}: x is {x.dtype} {list(x.shape)}: it must hold images [N, C, H, W] or [N, H, W]")
    if x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise BnfuseError(f"{path}: x holds values that are not finite")
    return x


def image_folder(folder: Path, image: int | None, channels: int | None) -> Raw:
    """`folder/CLASS/picture.png`, or `folder/train/CLASS/...` with `folder/test/CLASS/...` (or val) beside it."""
    train = folder / "train"
    tests = [part for part in (folder / "test", folder / "val") if part.is_dir()]
    if not (train.is_dir() and tests):
        names = class_folders(folder)
        return Raw(*read_classes(folder, names, image, channels), class_names=names)
    names = class_folders(train)
    if class_folders(tests[0]) != names:
        raise BnfuseError(f"{folder}: train and {tests[0].name} do not have the same classes")
    x, y = read_classes(train, names, image, channels)
    return Raw(x, y, test=read_classes(tests[0], names, image, channels), class_names=names)


def class_folders(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(part.name for part in folder.iterdir() if part.is_dir() and not part.name.startswith(".")))
    if not names:
        raise BnfuseError(f"{folder}: has no folders: put the images of each class into a folder of its own")
    return names


def read_classes(
    folder: Path, names: tuple[str, ...], image: int | None, channels: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, C, H, W] and labels; images of different sizes need `image` to be brought to one."""
    files = [(path, label) for label, name in enumerate(names) for path in image_files(folder / name)]
    if not files:
        raise BnfuseError(f"{folder}: its folders hold no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    if len(files) > MAX_IMAGES:
        raise BnfuseError(f"{folder}: holds {len(files)} images: at most {MAX_IMAGES} fit")
    first = read_image(files[0][0], image, channels)
    if len(files) * first.size * 4 > MAX_BYTES:
        size = f"{first.shape[2]}x{first.shape[1]}"
        raise BnfuseError(f"{folder}: {len(files)} images of {size} do not fit into memory: use a smaller --image")
    x = np.empty((len(files), *first.shape), np.uint8)
    for index, (path, _) in enumerate(files):
        values = read_image(path, image, channels or first.shape[0])
        if values.shape != first.shape:
            size, others = (f"{shape[2]}x{shape[1]}" for shape in (values.shape, first.shape))
            raise BnfuseError(f"{path}: is {size}, others are {others}: pass --image")
        x[index] = values
    return x, np.array([label for _, label in files], np.int64)


def image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def read_image(path: Path, image: int | None, channels: int | None) -> np.ndarray:
    """uint8 [C, H, W]; resized to a square of `image`. Grey files have one channel, all others three."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise BnfuseError(f"{path}: has {picture.width}x{picture.height} pixels: too large")
            grey = channels == 1 or (channels is None and picture.mode in ("1", "L", "I", "I;16"))
            converted = picture.convert("L" if grey else "RGB")
            if image is not None and converted.size != (image, image):
                converted = converted.resize((image, image), Image.Resampling.BILINEAR)
            values = np.asarray(converted, np.uint8)
    except BnfuseError:
        raise
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise BnfuseError(f"{path}: is no image that can be read: {' '.join(str(error).split())}") from None
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
