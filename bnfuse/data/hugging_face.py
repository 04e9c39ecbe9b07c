"""Tables of Hugging Face's `datasets`: by name (`hf:cifar10`, `hf:owner/name:config`), or a folder that `save_to_disk`
wrote. Their rows lie in files that are mapped into memory; images are decoded when they are asked for, by us.

The column of images is the one of type Image, that of labels the one of type ClassLabel, or of whole numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError

from .dataset import Part, Raw
from .folders import PART_NAMES
from .items import Rows
from .reading import Reading, looked_at
from .tally import Tally

PREFIX = "hf:"
MARKS = (("dataset_dict.json",), ("dataset_info.json", "state.json"))  # of folders that save_to_disk wrote
INSTALL = "pip install 'bnfuse[hf]'"
COMMON_LABELS = ("label", "labels", "fine_label", "class", "target")


def is_table(folder: Path) -> bool:
    """Tell whether `save_to_disk` wrote the folder."""
    return any(all((folder / name).is_file() for name in names) for names in MARKS)


def hub_table(name: str, reading: Reading) -> Raw:
    """Open a data set of the hub, which is fetched once and kept by `datasets`."""
    datasets = imported(name)
    repository, _, config = name.removeprefix(PREFIX).partition(":")
    return table_of(name, reading, lambda: datasets.load_dataset(repository, config or None))


def saved_table(folder: Path, reading: Reading) -> Raw:
    """Open a folder that `save_to_disk` wrote."""
    datasets = imported(str(folder))
    return table_of(str(folder), reading, lambda: datasets.load_from_disk(str(folder)))


def imported(name: str) -> Any:
    """Import the package. Raises BnfuseError where it is not installed."""
    try:
        import datasets
    except ImportError:
        raise BnfuseError(f"{name}: needs the package `datasets`, which is not installed: {INSTALL}") from None
    return datasets


def table_of(name: str, reading: Reading, load: Any) -> Raw:
    """Read the parts of a table. Raises BnfuseError with one line, whatever the package raises."""
    reading.require_streaming(name)
    try:
        found = load()
    except Exception as error:  # of the hub, of the network, of its files
        raise BnfuseError(f"{name}: cannot be opened: {' '.join(str(error).split()) or type(error).__name__}") from None
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    named = {part: split for part, spellings in PART_NAMES.items() for split in splits if split.lower() in spellings}
    if "train" not in named:
        raise BnfuseError(f"{name}: has no part 'train' (it has {', '.join(splits) or 'nothing'})")
    left, remarks = Tally(Path(name)), Tally(Path(name))
    image, label, classes = columns_of(splits[named["train"]], name)
    parts = {}
    for part, split in named.items():
        table = splits[split]
        if {image, label} - set(table.features):
            raise BnfuseError(f"{name}: its part '{split}' has no columns '{image}' and '{label}'")
        labels = np.asarray(table.with_format("numpy", columns=[label])[:][label])
        encoded = table.cast_column(image, type(table.features[image])(decode=False))
        items = Rows(encoded.select_columns([image]), image, f"{name} {split}", np.arange(len(table)))
        if len(items) and (labels.dtype.kind not in "iu" or int(labels.min()) < 0):
            first = int(np.argmax(labels < 0)) if labels.dtype.kind in "iu" else 0
            raise BnfuseError(f"{items.name(first)}: has no label: its '{label}' is {labels[first]!r}")
        chosen = np.flatnonzero(looked_at(items, reading, remarks, left))
        if not len(chosen):
            raise BnfuseError(f"{name}: none of the {len(items)} images of its part '{split}' can be read")
        parts[part] = Part(reading.images(items.take(chosen)), labels[chosen].astype(np.int64), f"its {split} part")
    others = [split for split in splits if split not in named.values()]
    notes = [f"{name}: left out: its parts {', '.join(others)}"] if others else []
    notes += [f"{name}: left out: {', '.join(left.parts())}"] if left.counts else []
    return Raw(parts, class_names=classes, notes=(*notes, *remarks.lines()), fitted=True)


def columns_of(table: Any, name: str) -> tuple[str, str, tuple[str, ...]]:
    """Find the column of images and that of labels, and the names of classes where the table has them."""
    kinds = {column: type(feature).__name__ for column, feature in table.features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    if not labels:
        labels = [column for column in COMMON_LABELS if "int" in str(getattr(table.features.get(column), "dtype", ""))]
    if len(images) != 1 or not labels:
        each = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        raise BnfuseError(f"{name}: has {each}: it needs one column of type Image, and one of type ClassLabel")
    chosen = next((column for column in COMMON_LABELS if column in labels), labels[0])
    return images[0], chosen, tuple(getattr(table.features[chosen], "names", None) or ())
