"""Tables of Hugging Face's datasets, by the package itself where it is installed; else the line that says so."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from odd_pictures import noise, save_plain
from PIL import Image

from bnfuse.core.errors import BnfuseError
from bnfuse.data import load_data

SIZE = {"image": 8, "channels": 1}


def message_of(source, **options) -> str:
    with pytest.raises(BnfuseError) as caught:
        load_data(source, **{**SIZE, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "dataset_dict.json").write_text("{}")
    for source in ("hf:mnist", tmp_path):
        said = message_of(source)
        assert said == f"{source}: needs the package `datasets`, which is not installed: pip install 'bnfuse[hf]'"


@pytest.mark.datasets
@pytest.mark.parametrize("by_path", [False, True])
def test_a_table_is_the_folder_it_was_made_of(tmp_path, by_path):
    import datasets

    save_plain(tmp_path / "folder", {"train": 6, "val": 3})
    folder = load_data(tmp_path / "folder", stream=True, **SIZE)
    features = datasets.Features(
        {"id": datasets.Value("int32"), "picture": datasets.Image(), "label": datasets.ClassLabel(names=["c0", "c1"])}
    )
    parts = {}
    for part, split in (("train", "train"), ("val", "validation")):
        files = sorted((tmp_path / "folder" / part).rglob("*.png"))
        rows = {
            "id": list(range(len(files))),
            "picture": [str(path) if by_path else {"bytes": path.read_bytes(), "path": None} for path in files],
            "label": [int(path.parent.name == "c1") for path in files],
        }
        parts[split] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "table")
    data = load_data(tmp_path / "table", workers=2, **SIZE)
    assert data.class_names == ("c0", "c1")
    for part, (x, y) in data.parts.items():
        assert np.array_equal(x[0 : len(x)], folder.parts[part][0][0 : len(x)])
        assert np.array_equal(y, folder.parts[part][1])


@pytest.mark.datasets
def test_tables_that_do_not_fit_are_told(tmp_path):
    import datasets

    pictures = [Image.fromarray(noise(number, 9, 9)) for number in range(3)]
    table = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, -1]}).cast_column("image", datasets.Image())
    table.save_to_disk(tmp_path / "a")
    assert "row 2: has no label: its 'label' is" in message_of(tmp_path / "a")
    table.remove_columns("label").save_to_disk(tmp_path / "b")
    assert "has image (Image): it needs one column of type Image, and one of type ClassLabel" in message_of(
        tmp_path / "b"
    )
    datasets.DatasetDict({"other": table}).save_to_disk(tmp_path / "c")
    assert "has no part 'train' (it has other)" in message_of(tmp_path / "c")
    (tmp_path / "b" / "state.json").write_text("broken")
    assert "cannot be opened" in message_of(tmp_path / "b")
