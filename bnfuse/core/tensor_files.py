"""Checkpoints as files: tensors by name with text beside them, in safetensors form."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from bnfuse.core.errors import BnfuseError, first_line


def read_safetensors(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the tensors whose names are wanted, and the text. Raises BnfuseError where the file is no checkpoint."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}, file.metadata() or {}  # noqa: SIM118


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the text beside the tensors. Raises BnfuseError where the file is no checkpoint."""
    with opened(path) as file:
        return file.metadata() or {}


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open the file, and turn what goes wrong while it is read into one line with its name."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise BnfuseError(f"{Path(path)}: no checkpoint in safetensors form ({first_line(error)})") from None
