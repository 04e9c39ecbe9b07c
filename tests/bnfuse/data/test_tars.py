"""WebDataset's tars give what the folder does that they were made of, and nothing in them is trusted."""

from __future__ import annotations

import gzip
import io
import tarfile

import numpy as np
import pytest
from odd_pictures import add, save_plain, save_tars
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data
from bnfuse.data.tars import expanded

SIZE = {"image": 8, "channels": 1}


def message_of(source, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        load_data(source, **{**SIZE, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["cls", "json"])
def test_tars_are_the_folder_they_were_made_of(tmp_path, kind):
    save_plain(tmp_path / "folder", {"train": 6, "val": 3})
    save_tars(tmp_path / "folder", tmp_path / "tars", kind=kind)
    folder = load_data(tmp_path / "folder", stream=True, **SIZE)
    for spec in (
        tmp_path / "tars",
        f"{tmp_path}/tars/*.tar",
        f"{tmp_path}/tars/{{train-00{{0..2}},val-00{{0..1}}}}.tar",
    ):
        data = load_data(spec, workers=2, **SIZE)
        for part, (x, y) in data.parts.items():
            assert np.array_equal(x[0 : len(x)], folder.parts[part][0][0 : len(x)])
            assert np.array_equal(y, folder.parts[part][1])
        assert "streamed, 12 to train on, 6 held out (val-000.tar and its like)" in data.about[0]


def test_tars_without_parts_are_split(tmp_path):
    save_plain(tmp_path / "folder", {"shard": 5})
    save_tars(tmp_path / "folder", tmp_path / "tars")
    data = load_data(f"{tmp_path}/tars/shard-{{000..001}}.tar", **SIZE)
    assert (len(data.train_y), len(data.test_y)) == (8, 2)


def test_braces_are_those_of_a_shell():
    assert expanded("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expanded("a-{9..10}") == ["a-9", "a-10"]
    assert expanded("{x,y}/{1..2}") == ["x/1", "x/2", "y/1", "y/2"]
    assert expanded("{a-{0..1},b}{x,y}") == ["a-0x", "a-0y", "a-1x", "a-1y", "bx", "by"]
    assert expanded("plain.tar") == ["plain.tar"] and expanded("open{1..2") == ["open{1..2"]
    with pytest.raises(BnfuseError, match="the most that are read"):
        expanded("{0..99999999}.tar")
    with pytest.raises(BnfuseError, match="the most that are read"):
        expanded("{0..999}{0..999}.tar")


def tar_with(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            add(tar, name, content)
    return path


def test_what_is_wrong_with_a_tar_is_named(tmp_path):
    save_plain(tmp_path / "folder", {"train": 2})
    png = (tmp_path / "folder" / "train" / "c0" / "000.png").read_bytes()
    path = tmp_path / "a.tar"
    assert message_of(path) == f"{path}: is not there, or is no file"
    assert "there is no such tar" in message_of(f"{tmp_path}/no-*.tar")
    path.write_bytes(b"no tar at all")
    assert message_of(path).startswith(f"{path}: is no tar that can be read")
    assert f"{path}: 0.png: has no label: a 0.cls or 0.json beside it" in message_of(tar_with(path, ("0.png", png)))
    for label in (b"cat", b"-1", b"", b"\xff", b"1.5"):
        assert f"{path}: 0.cls: holds no label" in message_of(tar_with(path, ("0.png", png), ("0.cls", label)))
    for label in (b"{}", b'{"label": "cat"}', b'{"label": true}', b"[" * 5000):
        assert f"{path}: 0.json: holds no label" in message_of(tar_with(path, ("0.png", png), ("0.json", label)))
    said = message_of(tar_with(path, ("0.png", b"no image"), ("0.cls", b"1"), ("1.png", png), ("1.cls", b"0")))
    assert said.startswith(f"{path}: 0.png: is no image that can be read")
    good = [(f"{number}.{ending}", content) for number in (1, 2) for ending, content in (("png", png), ("cls", b"0"))]
    kept = load_data(tar_with(path, ("0.png", b"no"), ("0.cls", b"1"), *good), skip_unreadable=True, **SIZE)
    assert (len(kept.train_y), len(kept.test_y)) == (1, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rfind(png) + 20])
    assert "is cut short within 2.png" in message_of(path)
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(whole))
    assert message_of(packed) == f"{packed}: is packed, so that no image in it can be read by itself: unpack it to .tar"
    assert "does not say of which part it is" in message_of(
        f"{tar_with(tmp_path / 'train-0.tar', ('0.png', png), ('0.cls', b'0')).parent}/*.tar"
    )


def test_links_and_paths_out_of_a_tar_lead_nowhere(tmp_path):
    save_plain(tmp_path / "folder", {"train": 3})
    png = (tmp_path / "folder" / "train" / "c0" / "000.png").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, name in enumerate(("../../0", "/etc/1", "x/2")):
            add(tar, f"{name}.png", png)
            add(tar, f"{name}.cls", str(number % 2).encode())
        link = tarfile.TarInfo("3.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        add(tar, "notes.txt", b"hello")
    before = sorted(tmp_path.rglob("*"))
    data = load_data(tmp_path / "a.tar", **SIZE)
    assert len(data.train_y) + len(data.test_y) == 3
    told = " ".join(data.about)
    assert "1 no ordinary file in a tar (a.tar: 3.png)" in told and "1 without an image (a.tar: notes)" in told
    assert sorted(tmp_path.rglob("*")) == before


def samples(count, *, first=0):
    """Members of tars: images of one grey, with labels."""
    for number in range(first, first + count):
        stream = io.BytesIO()
        Image.new("L", (8, 8), 200).save(stream, "PNG")
        yield from ((f"{number:03}.cls", str(number % 2).encode()), (f"{number:03}.png", stream.getvalue()))


def test_of_several_images_the_one_with_the_plain_ending_is_the_sample(tmp_path):
    other = io.BytesIO()
    Image.new("L", (8, 8), 10).save(other, "PNG")
    both = [x for name, content in samples(4) for x in ((name.replace(".png", ".depth.png"), other), (name, content))]
    members = [(name, at if isinstance(at, bytes) else at.getvalue()) for name, at in both if "cls" not in name]
    labels = [(name, content) for name, content in samples(4) if "cls" in name]
    path = tar_with(tmp_path / "a.tar", *sorted([*members, *labels]))
    data = load_data(path, mean=0, std=1, **SIZE)
    assert (data.train_x[:] == np.float32(200 / 255)).all()
    two = [("0.cls", b"0"), ("0.left.png", other.getvalue()), ("0.right.png", other.getvalue())]
    said = message_of(tar_with(path, *two))
    assert said == f"{path}: 0.left.png and 0.right.png are images of one sample: leave one of them"


def test_a_tar_that_ends_early_is_refused_wherever_it_is_cut(tmp_path):
    path = tar_with(tmp_path / "a.tar", *samples(6))
    whole = path.read_bytes()
    load_data(path, **SIZE)
    for cut in (2048 * 3, 2048 * 3 + 300, 2048 * 3 + 511):  # between samples, and within a header
        path.write_bytes(whole[:cut])
        assert f"it is cut short at byte {cut}" in message_of(path)
    path.write_bytes(whole[: 2048 * 3 + 10] + b"?" + whole[2048 * 3 + 11 :])
    assert f"it is damaged at byte {2048 * 3}, or" in message_of(path)
    path.write_bytes(whole + whole)
    assert f"it is damaged at byte {len(whole)}, or another one is joined to it there" in message_of(path)


def test_a_tar_that_is_written_anew_is_not_read_at_the_places_of_the_first(tmp_path):
    path = tar_with(tmp_path / "a.tar", *samples(6))
    data = load_data(path, mean=0, std=1, **SIZE)
    tar_with(path, *reversed(list(samples(7))))
    with pytest.raises(BnfuseError, match="is another file than when the run began"):
        data.train_x[:]


@pytest.mark.parametrize("name", ["odd[1]", "odd{a}", "odd*"])
def test_signs_of_patterns_in_the_name_of_a_folder_are_no_pattern(name, tmp_path):
    (tmp_path / name).mkdir()
    tar_with(tmp_path / name / "train-0.tar", *samples(5))
    for spec in ("", "/train-0.tar", "/*.tar", "/train-{0,0}.tar", "/{train,train*}-0.tar"):  # each tar once
        data = load_data(f"{tmp_path}/{name}{spec}", **SIZE)
        assert len(data.train_y) + len(data.test_y) == 5, spec


def test_what_macos_adds_is_left_out(tmp_path):
    both = [x for name, content in samples(5) for x in ((f"./._{name}", b"\0\5\x16\7"), (f"./{name}", content))]
    data = load_data(tar_with(tmp_path / "a.tar", *both), **SIZE)
    assert len(data.train_y) + len(data.test_y) == 5
    assert "10 hidden in a tar (a.tar: ./._000.cls)" in " ".join(data.about)
