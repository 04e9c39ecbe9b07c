"""Streamed images are those that are read into memory, to the last bit, and those of torchvision's ImageFolder."""

from __future__ import annotations

import numpy as np
import pytest
from odd_pictures import noise, put, save_odd, save_plain
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data, reading
from bnfuse.data.streamed import StreamedImages
from bnfuse.data.targets import Target

HALF = {"mean": 0.5, "std": 0.25}


def message_of(source, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        load_data(source, **{"image": 16, "channels": 3, "stream": True, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def all_of(images) -> np.ndarray:
    return images[0 : len(images)]


@pytest.mark.parametrize("share", [None, 0.875])
@pytest.mark.parametrize("channels", [1, 3])
def test_an_odd_folder_is_streamed_as_it_is_read(tmp_path, channels, share):
    save_odd(tmp_path)
    options = {"image": 16, "channels": channels, "crop_share": share, **HALF}
    whole = load_data(tmp_path, **options)
    parts = load_data(tmp_path, stream=True, workers=3, **options)
    assert isinstance(parts.train_x, StreamedImages) and isinstance(whole.train_x, np.ndarray)
    for part in ("train", "test"):
        (x, y), (x_read, y_read) = parts.parts[part], whole.parts[part]
        assert x.shape == x_read.shape and x.dtype == x_read.dtype == np.float32
        assert np.array_equal(all_of(x), x_read)
        assert np.array_equal(y, y_read)
        for some in (np.array([2, 0]), -1, slice(None, None, 2), np.arange(len(y)) % 2 == 1, np.array([], int)):
            assert np.array_equal(x[some], x_read[some])
    normal, normal_read = parts.normalised(), whole.normalised()
    assert np.array_equal(all_of(normal.train_x), normal_read.train_x)
    assert (parts.mean, parts.std, parts.class_names) == ((0.5,) * channels, (0.25,) * channels, ("a", "ü b"))


def test_an_odd_folder_is_pillows(tmp_path):
    """Beside a loader in three lines, over the paths in order."""
    save_odd(tmp_path)
    data = load_data(tmp_path, image=16, channels=3, stream=True, workers=1)
    read = {}
    for path in tmp_path.glob("*/**/*.*"):
        with Image.open(path) as opened:
            values = np.asarray(opened.convert("RGB").resize((16, 16), Image.Resampling.BILINEAR))
            read[str(path)] = values.transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    seen = set()
    for images, labels in data.parts.values():
        for index, label in enumerate(labels):
            name = images.items.name(index)
            assert np.array_equal(images.row(index), read[name]), name
            assert label == name.startswith(str(tmp_path / "ü b"))
            seen.add(name)
    assert seen == set(read) and len(seen) == 19


@pytest.mark.torchvision
def test_an_odd_folder_is_torchvisions(tmp_path):
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    save_odd(tmp_path / "train")
    save_plain(tmp_path, {"val": 1})
    for label, name in enumerate(("a", "ü b")):
        (tmp_path / "val" / f"c{label}").rename(tmp_path / "val" / name)
    data = load_data(tmp_path, image=28, channels=3, stream=True, crop_share=0.875, mean="imagenet", std="imagenet")
    steps = [T.Resize(32), T.CenterCrop(28), T.ToTensor(), T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    theirs = ImageFolder(tmp_path / "train", T.Compose(steps))
    ours = data.normalised()
    assert [str(tmp_path / "train" / path) for path, _ in theirs.samples] == [
        ours.train_x.items.name(index) for index in range(len(ours.train_x))
    ]
    assert theirs.classes == list(data.class_names) and theirs.targets == data.train_y.tolist()
    for index, (image, _) in enumerate(theirs):
        assert np.abs(ours.train_x.row(index) - image.numpy()).max() < 1e-6


def test_what_does_not_fit_into_memory_is_streamed(tmp_path, monkeypatch):
    save_plain(tmp_path, {"train": 5, "val": 2})
    held = load_data(tmp_path, image=8, channels=1)
    monkeypatch.setattr("bnfuse.data.dataset.MAX_BYTES", 4 * 14 * 64 - 1)
    data = load_data(tmp_path, image=8, channels=1)
    assert isinstance(data.train_x, StreamedImages)
    assert data.about[0].startswith(f"{tmp_path}: streamed, 10 to train on, 4 held out (val/)")
    assert np.array_equal(all_of(data.train_x), held.train_x)
    assert data.mean == pytest.approx(held.mean, abs=1e-6) and data.std == pytest.approx(held.std, abs=1e-6)
    monkeypatch.setattr("bnfuse.data.dataset.MAX_BYTES", 1 << 33)
    monkeypatch.setattr("bnfuse.data.dataset.free_memory", lambda: 5000)
    assert isinstance(load_data(tmp_path, image=8, channels=1).train_x, StreamedImages)


def test_mean_and_deviation_of_many_are_those_of_some(tmp_path, monkeypatch):
    save_plain(tmp_path, {"train": 30, "val": 1})
    monkeypatch.setattr("bnfuse.data.reading.SAMPLE", 20)
    found = [load_data(tmp_path, image=8, channels=1, stream=True, seed=seed) for seed in (0, 0, 1)]
    assert found[0].mean == found[1].mean != found[2].mean
    chosen = np.sort(np.random.default_rng(0).choice(60, 20, replace=False))
    some = found[0].train_x[chosen].astype(np.float64)
    assert (found[0].mean[0], found[0].std[0]) == pytest.approx((some.mean(), some.std()), rel=1e-6)


def test_damaged_files_are_named_before_anything_is_trained(tmp_path):
    save_plain(tmp_path, {"train": 4, "val": 2})
    (tmp_path / "train" / "c0" / "001.png").write_bytes(b"")
    said = message_of(tmp_path)
    assert said.startswith(f"{tmp_path}/train/c0/001.png: is no image that can be read")
    assert "pass --skip-unreadable" in said
    (tmp_path / "train" / "c1" / "002.png").write_bytes(b"no image")
    cut = tmp_path / "val" / "c1" / "000.png"
    Image.fromarray(noise(3, 90, 90)).save(cut)
    cut.write_bytes(cut.read_bytes()[:900])  # its header is whole
    (tmp_path / "val" / "c0" / "lost.png").symlink_to(tmp_path / "nowhere")
    data = load_data(tmp_path, image=16, channels=3, stream=True, skip_unreadable=True)
    assert [len(labels) for _, labels in data.parts.values()] == [6, 3]
    assert f"note: {tmp_path}: left out: 4 unreadable (train/c0/001.png)" in data.about
    same = load_data(tmp_path, image=16, channels=3, skip_unreadable=True)
    assert np.array_equal(all_of(data.train_x), same.train_x) and np.array_equal(data.train_y, same.train_y)


def test_a_file_that_is_cut_short_is_named_when_it_is_met(tmp_path):
    save_plain(tmp_path, {"train": 4, "val": 2})
    cut = tmp_path / "val" / "c1" / "000.png"
    Image.fromarray(noise(3, 90, 90)).save(cut)
    cut.write_bytes(cut.read_bytes()[:900])
    data = load_data(tmp_path, image=16, channels=3, stream=True)
    with pytest.raises(BnfuseError, match=r"val/c1/000\.png: is no image that can be read: .*--skip-unreadable"):
        all_of(data.test_x)


def test_what_is_ignored_of_streamed_images_is_told(tmp_path):
    save_odd(tmp_path)
    told = "\n".join(load_data(tmp_path, image=16, channels=3, stream=True).about)
    assert "1 of the images have a rotation in EXIF, which is not applied (first: a/rotated.jpeg)" in told
    assert "1 of the images have several frames" in told
    assert "4 of the images may be partly transparent" in told
    sure = "\n".join(load_data(tmp_path, image=16, channels=3, stream=True, skip_unreadable=True).about)
    assert "4 of the images are partly transparent" in sure


def test_of_very_many_some_are_looked_at(tmp_path, monkeypatch):
    save_plain(tmp_path, {"train": 10, "val": 2})
    monkeypatch.setattr("bnfuse.data.reading.HEADERS", 5)
    monkeypatch.setattr("bnfuse.data.reading.EVERY", 2)
    looked, heard = [], []
    inner = reading.look

    def look(items, asked, index):
        looked.append(items.name(index))
        return inner(items, asked, index)

    def progress(_):
        pass

    progress.bar = lambda done, total, what: heard.append((done, total, what))
    monkeypatch.setattr(reading, "look", look)
    load_data(tmp_path, image=8, channels=1, stream=True, workers=1, mean=0.5, std=0.5, progress=progress)
    assert len(looked) == len(set(looked)) == 9  # five of twenty, four of four
    assert heard == [*((n, 5, "images looked at") for n in (2, 4, 5)), *((n, 4, "images looked at") for n in (2, 4))]


def test_labels_of_pixels_have_no_part_cut_out(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.zeros((4, 8, 8), np.int64))
    targets = (Target("labels", (8, 8), np.dtype(np.int64), 3),)
    with pytest.raises(BnfuseError, match="has labels of pixels, which a crop share would have to cut out too"):
        load_data(tmp_path / "a.npz", image=8, channels=1, targets=targets, crop_share=0.9)


def test_sixteen_bits_stay_sixteen_bits(tmp_path):
    words = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for name in ("a/0.png", "a/1.png", "b/0.png"):
        put(tmp_path / name, Image.fromarray(words))
    data = load_data(tmp_path, image=8, channels=3, stream=True)
    assert np.allclose(all_of(data.train_x), words / 65535, atol=1e-7)


def test_options_are_looked_at_first(tmp_path):
    save_plain(tmp_path, {"train": 2, "val": 1})
    assert "give the size of the images that are streamed" in message_of(tmp_path, image=None)
    assert "not padded" in message_of(tmp_path, fit="pad")
    assert "a crop share of 1.5 is none" in message_of(tmp_path, crop_share=1.5)
    assert "workers" in message_of(tmp_path, workers=0)
    assert "give --mean and --std, or neither" in message_of(tmp_path, mean=0.5)
    assert "--mean imagenet: has 3 numbers, images have 1 channels" in message_of(
        tmp_path, channels=1, mean="imagenet", std="imagenet"
    )
    assert "--std 0: must be numbers above 0" in message_of(tmp_path, mean="0", std="0")
    assert "--mean a,b,c: is imagenet, a number, or one" in message_of(tmp_path, mean="a,b,c", std="1")
    assert message_of("digits").startswith("digits: holds arrays, which are read as a whole")


def test_the_middle_of_arrays_is_taken_too(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (6, 20, 30), np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(6) % 2)
    data = load_data(tmp_path / "a.npz", image=16, crop_share=0.8)
    assert np.allclose(np.sort(data.train_x, axis=0), np.sort(x[_kept(6)][:, None, 2:18, 7:23] / 255, axis=0))


def _kept(count: int) -> np.ndarray:
    """What is not held out."""
    return np.random.default_rng(0).permutation(count)[1:]
