"""Tensors of torch as numpy's arrays and back, on any device; torch is imported by what makes tensors alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from bnfuse.core.errors import BnfuseError, first_line


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(value: Any, what: str) -> np.ndarray:
    """Give a torch tensor of any device as numpy's array: its values without its gradient, bfloat16 as float32.

    Anything else is taken by DLPack, or as numpy does. `what` is what messages call it.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        if is_tensor(value):
            plain = value.detach()
            found: np.ndarray = (plain.float() if plain.dtype == sys.modules["torch"].bfloat16 else plain).cpu().numpy()
            return found
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BnfuseError(f"{what} cannot be read as an array: {first_line(error)}") from None


def as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Give arrays as torch tensors of the host, in the same memory. Raises BnfuseError where there is no torch."""
    try:
        import torch
    except ImportError:
        raise BnfuseError("tensors of torch need torch, which is not installed: pip install torch") from None
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
