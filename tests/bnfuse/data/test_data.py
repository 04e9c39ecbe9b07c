"""Images: embedded, from files, from folders; split, resized, in batches; one line for what is damaged."""

from __future__ import annotations

import gzip
import struct
import zipfile

import numpy as np
import pytest
from sklearn.datasets import load_digits

from bnfuse.core.errors import BnfuseError
from bnfuse.data import Dataset, batches, load_data, sources
from bnfuse.data.resizing import interpolation, pad, resize


def message_of(spec, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        load_data(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_digits_are_embedded():
    data = load_data("digits")
    assert data.train_x.shape == (1438, 1, 8, 8) and data.test_x.shape == (359, 1, 8, 8)
    assert data.train_x.dtype == np.float32 and data.train_y.dtype == np.int64
    assert (data.train_x.min(), data.train_x.max(), data.classes) == (0.0, 1.0, 10)
    assert len(set(data.train_y)) == 10 and data.class_names == tuple("0123456789")


def test_digits_are_scikit_learns():
    with np.load(sources.__file__.replace("sources.py", "digits.npz")) as ours:
        theirs = load_digits()
        assert np.array_equal(ours["images"], theirs.images) and np.array_equal(ours["labels"], theirs.target)


def test_split_depends_on_the_seed_alone():
    a, b, c = (load_data("digits", seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(a.train_x, b.train_x) and not np.array_equal(a.train_y, c.train_y)
    assert len(load_data("digits", held_out=0.5).test_x) == 898
    whole = {x.tobytes() for x in np.concatenate([c.train_x, c.test_x])}
    assert whole == {x.tobytes() for x in np.concatenate([a.train_x, a.test_x])}


def test_mean_and_deviation_normalise():
    data = load_data("digits", channels=3)
    assert data.shape == (3, 8, 8)
    assert data.mean == pytest.approx(data.train_x.mean((0, 2, 3)), rel=1e-5)
    normal = data.normalised()
    assert normal.train_x.mean((0, 2, 3)) == pytest.approx([0] * 3, abs=1e-4)
    assert normal.train_x.std((0, 2, 3)) == pytest.approx([1] * 3, rel=1e-4)
    assert normal.train_x.dtype == np.float32 and normal.mean == (0, 0, 0)


def test_batches_are_whole_shuffled_and_repeatable():
    x, y = np.arange(10)[:, None], np.arange(10)
    first = [part[1].tolist() for part in batches(x, y, 3, seed=0, epoch=1)]
    assert first == [part[1].tolist() for part in batches(x, y, 3, seed=0, epoch=1)]
    assert first != [part[1].tolist() for part in batches(x, y, 3, seed=0, epoch=2)]
    assert [len(part) for part in first] == [3, 3, 3] and len({*first[0], *first[1], *first[2]}) == 9
    assert all((a[:, 0] == b).all() for a, b in batches(x, y, 3, seed=0, epoch=1))
    with pytest.raises(BnfuseError, match="10 images do not fill a batch of 11"):
        next(batches(x, y, 11, seed=0, epoch=0))


def test_resizing_keeps_constants_and_means():
    x = np.random.default_rng(0).random((2, 3, 8, 8)).astype(np.float32)
    assert np.allclose(resize(np.ones_like(x), 19), 1)
    assert np.allclose(resize(x, 4).mean((2, 3)), x.mean((2, 3)), atol=0.05)
    assert np.array_equal(interpolation(8, 8), np.eye(8, dtype=np.float32))


@pytest.mark.torch
@pytest.mark.parametrize("size", [5, 16, 20])
def test_resizing_is_torchs_antialiased_bilinear(size):
    import torch

    x = np.random.default_rng(0).random((2, 1, 8, 8)).astype(np.float32)
    how = {"mode": "bilinear", "antialias": True, "align_corners": False}
    expected = torch.nn.functional.interpolate(torch.tensor(x), (size, size), **how).numpy()
    assert (
        np.abs(resize(x, size) - expected).max() < 0.02
        if size < 8
        else np.allclose(resize(x, size), expected, atol=1e-5)
    )


def test_padding_centres_the_image():
    padded = pad(np.ones((1, 1, 2, 2), np.float32), 5)
    assert padded.shape == (1, 1, 5, 5) and padded.sum() == 4 and padded[0, 0, 1:3, 1:3].all()
    assert load_data("digits", image=16, fit="pad").train_x[:, :, :4].max() == 0
    assert message_of("digits", image=4, fit="pad") == "images of 8x8 do not fit into 4x4: resize them instead"


def test_grey_becomes_colour_and_colour_grey(tmp_path):
    assert np.ptp(load_data("digits", channels=3).train_x, axis=1).max() == 0
    x = np.zeros((4, 3, 2, 2), np.uint8)
    x[:, 1] = 255
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(4))
    assert np.allclose(load_data(tmp_path / "a.npz", channels=1).train_x, 0.587)
    assert "images of 3 channels do not become images of 2" in message_of(tmp_path / "a.npz", channels=2)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((6, 5, 5), (1, 5, 5)), ((6, 3, 5, 5), (3, 5, 5)), ((6, 5, 5, 3), (3, 5, 5)), ((6, 7, 5, 5), (7, 5, 5))],
)
def test_npz(tmp_path, shape, expected):
    x = np.random.default_rng(0).random(shape)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(6) % 3)
    data = load_data(tmp_path / "a.npz")
    assert data.shape == expected and data.classes == 3 and (len(data.train_x), len(data.test_x)) == (5, 1)
    assert data.train_x.max() <= 1 and data.train_x.dtype == np.float32


def test_npz_with_its_own_test_part(tmp_path):
    x = np.full((3, 4, 4), 255, np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x=x, y=np.arange(3), x_test=x[:1], y_test=np.array([4]))
    data = load_data(tmp_path / "a.npz")
    assert (len(data.train_x), len(data.test_x), data.classes, data.train_x.max()) == (3, 1, 5, 1.0)


class Evil:
    def __reduce__(self):
        raise AssertionError("was unpickled")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 4, 4))}, "has no array 'y' (it has x): it needs x and y"),
        ({"a": np.zeros(3)}, "has no array 'x' (it has a)"),
        ({"x": np.zeros(3), "y": np.zeros(3, int)}, "x is float64 [3]: it must hold images"),
        ({"x": np.zeros((3, 4, 4)), "y": np.zeros(2, int)}, "has 3 images but labels of shape [2]"),
        ({"x": np.zeros((3, 4, 4)), "y": np.zeros(3)}, "its labels are float64: they must be integers"),
        ({"x": np.zeros((3, 4, 4)), "y": np.array([0, 1, -1])}, "has labels from -1 to 1"),
        ({"x": np.zeros((3, 4, 4)), "y": np.array([0, 1, 1 << 40])}, "has labels from 0 to 1099511627776"),
        ({"x": np.full((3, 4, 4), np.nan), "y": np.zeros(3, int)}, "x holds values that are not finite"),
        ({"x": np.array(["a"]), "y": np.zeros(1, int)}, "x is <U1 [1]: it must hold images"),
        ({"x": np.zeros((0, 4, 4)), "y": np.zeros(0, int)}, "x is float64 [0, 1, 4, 4]: it must hold images"),
        ({"x": np.zeros((1, 4, 4)), "y": np.zeros(1, int)}, "1 images cannot be split"),
    ],
)
def test_npz_that_is_no_data(tmp_path, arrays, message):
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    assert message_of(path).startswith(f"{path}: {message}")


def test_npz_that_is_damaged_or_hostile(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((3, 4, 4)), y=np.zeros(3, int))
    good = path.read_bytes()
    for content in (b"", b"text", good[:40], good[: len(good) // 2]):
        path.write_bytes(content)
        assert message_of(path).startswith(f"{path}: ")
    np.savez(path, x=np.array([object()], dtype=object), y=np.zeros(1, int))
    assert "Object arrays cannot be loaded" in message_of(path)
    header = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999, 9999, 9999), }".ljust(117)
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header + b"\n")
        archive.writestr("y.npy", header + b"\n")
    assert message_of(path).startswith(f"{path}: 9999999 images of 1x9999x9999 take 3.72e+06 GiB as float32")


@pytest.mark.parametrize("member", [b"no array", b"\x93NUMPY\x01\x00\x20\x00" + b"{'descr': '<i8', 'shape': ((((,\n"])
@pytest.mark.parametrize("name", ["x", "y"])
def test_npz_with_a_member_that_is_no_array(tmp_path, name, member):
    path = tmp_path / "a.npz"
    arrays = {"x": np.zeros((3, 4, 4)), "y": np.zeros(3, int)}
    del arrays[name]
    np.savez(path, **arrays)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{name}.npy", member)
    assert message_of(path).startswith(f"{path}: cannot be read: ")


def test_more_classes_than_the_network_has():
    said = (
        "digits: has 10 classes, the network 3: its last layer must give 10 numbers (a network that comes with bnfuse "
    )
    assert message_of("digits", classes=3) == said + "does when built with --classes 10)"
    data = load_data("digits", classes=12)
    assert data.classes == 12
    assert data.about[1:] == ("note: digits: has 10 classes, the network tells 12 apart",)


def test_images_that_do_not_fit_into_memory():
    assert message_of("digits", image=4096).startswith("digits: 1797 images of 1x4096x4096 take 112 GiB")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("nothing", {}, "nothing: is no data: give digits, fashion-mnist, "),
        ("none.npz", {}, "none.npz: cannot be read: "),
        ("digits", {"image": 0}, "image=0 is out of range"),
        ("digits", {"channels": -1}, "channels=-1 is out of range"),
        ("digits", {"fit": "crop"}, "fit=crop is unknown"),
        ("digits", {"held_out": 1.5}, "digits: 1797 images cannot be split"),
    ],
)
def test_bad_requests(spec, options, message):
    assert message_of(spec, **options).startswith(message)


# Fashion-MNIST


def write_idx(path, values: np.ndarray, magic: bytes | None = None) -> None:
    head = (magic or bytes((0, 0, 8, values.ndim))) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 5)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 28, 28)))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", rng.integers(0, 10, count))
    monkeypatch.setattr(sources, "FASHION_FOLDER", tmp_path)
    return tmp_path


def test_fashion_mnist_is_read_from_its_idx_files(fashion):
    data = load_data("fashion-mnist", image=32)
    assert data.train_x.shape == (20, 1, 32, 32) and data.test_x.shape == (5, 1, 32, 32)
    assert data.classes == 10 and data.class_names[9] == "Ankle boot" and data.train_x.max() <= 1


def test_fashion_mnist_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FASHION_FOLDER", tmp_path / "none")
    assert message_of("fashion-mnist").endswith("install Debian's package (apt install dataset-fashion-mnist)")


def test_fashion_mnist_that_is_damaged(fashion):
    path = fashion / "train-images-idx3-ubyte.gz"
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    assert message_of("fashion-mnist").startswith(f"{path}: ")
    path.write_bytes(b"plain")
    assert message_of("fashion-mnist").startswith(f"{path}: cannot be read: ")
    write_idx(path, np.zeros((2, 2)))
    assert message_of("fashion-mnist") == f"{path}: is no IDX file of 3 dimensions"
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", 60000, 28, 28) + b"\0" * 99))
    assert message_of("fashion-mnist") == f"{path}: is cut short: 99 of 47040000 bytes"
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", *[0xFFFFFFFF] * 3)))
    assert message_of("fashion-mnist").startswith(f"{path}: claims ")
    path.unlink()
    assert message_of("fashion-mnist").startswith(f"{path}: cannot be read: ")


# Folders


def write_images(folder, classes, count=3, size=(6, 4), mode="RGB"):
    from PIL import Image

    for index, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new(mode, size, 40 * index if mode == "L" else (40 * index, 10, 200)).save(
                folder / name / f"{number}.png"
            )


def test_folder_with_a_folder_for_each_class(tmp_path):
    write_images(tmp_path, ["cat", "ant"])
    data = load_data(tmp_path)
    assert data.shape == (3, 4, 6) and data.class_names == ("ant", "cat")
    assert (len(data.train_x), len(data.test_x)) == (5, 1)
    reds = {(round(255 * float(x[0, 0, 0])), int(y)) for x, y in zip(data.train_x, data.train_y, strict=True)}
    assert reds == {(40, 0), (0, 1)}  # the second folder written is the first by name
    assert load_data(tmp_path, image=8, channels=1).shape == (1, 8, 8)


def test_folder_with_train_and_test(tmp_path):
    write_images(tmp_path / "train", ["a", "b"], mode="L")
    write_images(tmp_path / "test", ["a", "b"], 1, mode="L")
    data = load_data(tmp_path)
    assert (len(data.train_x), len(data.test_x), data.shape) == (6, 2, (1, 4, 6))
    (tmp_path / "test" / "b").rename(tmp_path / "test" / "c")
    assert message_of(tmp_path) == f"{tmp_path / 'test'}: has a class 'c' that the training part has not"


def test_folders_that_hold_no_images(tmp_path):
    assert message_of(tmp_path).startswith(f"{tmp_path}: has no folders")
    (tmp_path / "a").mkdir()
    assert message_of(tmp_path).startswith(f"{tmp_path}: its folders hold no images")
    (tmp_path / "a" / "x.png").write_bytes(b"no image")
    assert message_of(tmp_path).startswith(f"{tmp_path / 'a' / 'x.png'}: is no image that can be read")


def test_images_of_different_sizes_need_a_size(tmp_path):
    write_images(tmp_path, ["a"])
    write_images(tmp_path, ["b"], size=(7, 7))
    assert message_of(tmp_path).endswith("is 7x7, others are 6x4: pass --image")
    assert load_data(tmp_path, image=5).shape == (3, 5, 5)


def test_dataset_of_ones_own():
    x, y = np.zeros((2, 1, 4, 4), np.float32), np.array([0, 1])
    assert Dataset(x, y, x, y, classes=2).shape == (1, 4, 4)
