"""Layouts of folders: parts by their names, classes as ImageFolder has them, and nothing left out without a count."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data


def put(folder, *names, value: int = 0):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), value, np.uint8)).save(folder / name)


def message_of(folder, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        load_data(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def values_of(x) -> list[int]:
    return sorted(round(255 * float(one.mean())) for one in x)


def part_of_each(root, *names):
    for value, name in enumerate(names, 1):
        put(root / name, "a/0.png", "a/1.png", "b/0.png", value=value)


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Valid"])
def test_train_val_and_test_are_told_apart_by_name(tmp_path, val):
    part_of_each(tmp_path, "train", val, "test")
    data = load_data(tmp_path)
    assert values_of(data.train_x) == [1] * 3
    assert values_of(data.held_out[0]) == [2] * 3
    assert values_of(data.final[0]) == values_of(data.test_x) == [3] * 3
    held_out = f"3 held out ({val}/) to choose the best epoch by, 3 (test/) to be scored at the end"
    assert data.about == (f"{tmp_path}: 3 to train on, {held_out}; 2 classes",)
    assert np.allclose(data.normalised().val_x, (data.val_x - data.mean[0]) / data.std[0])


@pytest.mark.parametrize("other", ["val", "valid", "test"])
def test_one_other_part_is_held_out_and_it_is_said_that_it_chooses(tmp_path, other):
    part_of_each(tmp_path, "train", other)
    data = load_data(tmp_path)
    assert values_of(data.held_out[0]) == [2] * 3
    assert data.final is None
    note = f"note: {tmp_path}: test/ chooses the best epoch, for there is no val: its accuracy flatters"
    assert data.about[0] == f"{tmp_path}: 3 to train on, 3 held out ({other}/) to choose the best epoch by; 2 classes"
    assert data.about[1:] == ((note,) if other == "test" else ())


def test_train_alone_is_split(tmp_path):
    part_of_each(tmp_path, "train")
    data = load_data(tmp_path)
    assert (len(data.train_x), len(data.test_x), data.class_names) == (2, 1, ("a", "b"))
    assert "1 held out (20% of the images, drawn by the seed)" in data.about[0]


def test_parts_that_cannot_be_told(tmp_path):
    part_of_each(tmp_path, "val", "test")
    assert message_of(tmp_path) == f"{tmp_path}: has val/, test/ but no train/"
    put(tmp_path / "flat", "train/a/0.png", "test/0.png")
    assert message_of(tmp_path / "flat").startswith(
        f"{tmp_path / 'flat' / 'test'}: holds images but no folders: put the"
    )
    part_of_each(tmp_path, "train", "valid")
    assert message_of(tmp_path) == f"{tmp_path}: has both val/ and valid/: keep one of them"
    shutil.rmtree(tmp_path / "val")
    shutil.rmtree(tmp_path / "valid")
    shutil.rmtree(tmp_path / "test")
    put(tmp_path, "dev/a/0.png")
    assert "train/ holds folders, and dev/ lies beside it: call the folder of images" in message_of(tmp_path)


def test_a_class_may_be_called_train(tmp_path):
    put(tmp_path, "train/0.png", "car/0.png", "car/1.png")
    assert load_data(tmp_path).class_names == ("car", "train")


def test_other_folders_beside_the_parts_are_counted(tmp_path):
    part_of_each(tmp_path, "train", "val")
    put(tmp_path, "annotations/x.png")
    (tmp_path / "README.md").write_text("about")
    assert load_data(tmp_path).about[1] == f"note: {tmp_path}: left out: 2 beside the parts (README.md)"


def test_classes_of_parts_agree_by_name(tmp_path):
    part_of_each(tmp_path, "train", "val")
    shutil.rmtree(tmp_path / "val" / "b")
    assert message_of(tmp_path) == f"{tmp_path / 'val'}: has no folder for the class 'b' of the training part"
    (tmp_path / "val" / "b").mkdir()
    assert f"note: {tmp_path / 'val'}: holds no images of class 'b'" in load_data(tmp_path).about
    put(tmp_path, "val/c/0.png")
    assert message_of(tmp_path) == f"{tmp_path / 'val'}: has a class 'c' that the training part has not"


def test_images_below_a_class_are_of_it_as_in_torchvision(tmp_path):
    put(tmp_path, "a/0.png", "a/x/y/1.PNG", "a/x/2.JPG", "ü/é.png", "ü/0.png", "B/a.TIFF", "10/a.bmp", "9/a.jpeg")
    data = load_data(tmp_path)
    labels = np.concatenate([data.train_y, data.test_y])
    assert data.class_names == ("10", "9", "B", "a", "ü")
    assert np.bincount(labels).tolist() == [1, 1, 1, 3, 2]
    assert not any("left out" in line for line in data.about)


def test_nothing_is_left_out_without_a_count(tmp_path):
    put(tmp_path, "a/0.png", "b/0.png", "b/._0.png", ".cache/0.png", "__MACOSX/a/._0.png", "stray.png")
    for name in ("a/1.heic", "a/2.heic", "b/notes.txt", "b/Thumbs.db", ".DS_Store", "b/none"):
        (tmp_path / name).write_bytes(b"")
    data = load_data(tmp_path)
    assert data.class_names == ("a", "b")
    note = data.about[1]
    assert note.startswith(f"note: {tmp_path}: left out: 5 hidden or system (.DS_Store), 2 of .heic (a/1.heic), ")
    assert "1 of .txt (b/notes.txt)" in note
    assert "1 outside the class folders (stray.png)" in note
    assert "1 without an ending (b/none)" in note


def test_a_class_without_images_is_refused(tmp_path):
    put(tmp_path, "a/0.png", "a/1.png")
    (tmp_path / "b").mkdir()
    assert message_of(tmp_path).startswith(
        f"{tmp_path}: holds no images of class 'b': add some or take its folder away"
    )
    (tmp_path / "b" / "0.heic").write_bytes(b"")
    assert "holds no images of class 'b' (left out: 1 of .heic (b/0.heic)): add some" in message_of(tmp_path)


def test_one_class_alone_is_noted(tmp_path):
    put(tmp_path, "photos/a/0.png", "photos/b/0.png")
    assert "all images are of one class, 'photos'" in load_data(tmp_path).about[-1]


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    put(tmp_path / "data", "a/0.png", "b/0.png")
    put(tmp_path / "far", "1.png")
    (tmp_path / "data" / "a" / "far").symlink_to(tmp_path / "far")
    (tmp_path / "data" / "a" / "up").symlink_to(tmp_path / "data" / "a")
    data = load_data(tmp_path / "data")
    assert len(data.train_x) + len(data.test_x) == 3
    assert data.about[1] == f"note: {tmp_path / 'data'}: left out: 1 linked in a circle (a/up)"
    (tmp_path / "data" / "b" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    assert "lost.png: is no image that can be read: No such file" in message_of(tmp_path / "data")


def test_a_file_that_cannot_be_read_is_named_or_skipped_and_counted(tmp_path):
    put(tmp_path, "a/0.png", "a/1.png", "b/0.png", "b/1.png")
    put(tmp_path, "a/2.png", value=77)
    (tmp_path / "a" / "0.png").write_bytes(b"")
    (tmp_path / "b" / "0.png").write_bytes((tmp_path / "b" / "1.png").read_bytes()[:40])
    assert message_of(tmp_path).startswith(f"{tmp_path}/a/0.png: is no image that can be read")
    assert message_of(tmp_path).endswith("Mend or remove it, or pass --skip-unreadable.")
    data = load_data(tmp_path, skip_unreadable=True)
    x, y = np.concatenate([data.train_x, data.test_x]), np.concatenate([data.train_y, data.test_y])
    assert sorted(zip(values_of(x), sorted(y, reverse=True), strict=True)) == [(0, 0), (0, 1), (77, 0)]
    assert f"note: {tmp_path}: left out: 2 unreadable (a/0.png)" in data.about
    (tmp_path / "b" / "1.png").write_bytes(b"")
    assert "holds no images of class 'b'" in message_of(tmp_path, skip_unreadable=True)


def test_colour_anywhere_is_colour_everywhere(tmp_path):
    put(tmp_path, "a/0.png", "b/1.png", value=9)
    Image.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "a" / "1.png")
    data = load_data(tmp_path)
    x = np.concatenate([data.train_x, data.test_x])
    assert sorted(tuple(np.round(255 * one.mean((1, 2))).astype(int)) for one in x) == [(1, 2, 3), (9,) * 3, (9,) * 3]


def test_too_much_for_memory_is_said_before_anything_is_read(tmp_path, monkeypatch):
    """Where it cannot be streamed: padded images are not."""
    put(tmp_path, "a/0.png", "b/0.png")
    (tmp_path / "a" / "1.png").write_bytes(b"unread")
    monkeypatch.setattr("bnfuse.data.dataset.MAX_BYTES", 1 << 10)
    said = message_of(tmp_path, image=16, channels=3, fit="pad")
    assert "3 images of 3x16x16 take 8.58e-06 GiB as float32, more than" in said


def test_what_is_ignored_of_images_is_said_once(tmp_path):
    put(tmp_path, "b/0.png")
    (tmp_path / "a").mkdir()
    for number in range(2):
        Image.new("RGBA", (4, 4), (9, 9, 9, 0)).save(tmp_path / "a" / f"{number}.png")
    (note,) = (line for line in load_data(tmp_path).about if "transparent" in line)
    assert note.startswith(f"note: {tmp_path}: 2 of the images are partly transparent, which is ignored")


def test_parts_of_unknown_names_are_noted(tmp_path):
    put(tmp_path, "training_set/a/0.png", "training_set/b/0.png", "test_set/a/0.png", "test_set/b/0.png")
    said = "hold folders of the same names (a, b): if they are parts, call them train/, val/ and test/"
    assert said in load_data(tmp_path).about[-1]
    put(tmp_path, "test_set/0.png")  # a class that has an image of its own
    assert not any(said in line for line in load_data(tmp_path).about)


def test_thumbnails_of_a_server_are_left_out(tmp_path):
    put(tmp_path, "a/0.png", "b/0.png", "a/@eaDir/0.png/SYNOPHOTO_THUMB_M.png", "@eaDir/0.png")
    data = load_data(tmp_path)
    assert (len(data.train_y) + len(data.test_y), data.class_names) == (2, ("a", "b"))


def test_pictures_of_a_folder_are_padded_too(tmp_path):
    put(tmp_path, "a/0.png", "b/0.png", value=255)
    data = load_data(tmp_path, image=6, fit="pad")
    assert np.array_equal(data.train_x[0, 0], np.pad(np.ones((4, 4)), 1))
    assert "is 4x4, which does not fit into 3x3" in message_of(tmp_path, image=3, fit="pad")


def test_a_path_that_cannot_be_looked_at_is_no_data(tmp_path):
    assert "is no data" in message_of("x" * 5000)
