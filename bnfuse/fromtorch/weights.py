"""Weights by what names them: files of torch and of safetensors, and those that timm and torchvision offer.

    weights.safetensors                                tensors by name
    weights.pt, .pth, .bin, .ckpt, .tar                what torch.save wrote: a state_dict, alone or in a checkpoint
    timm:resnet50.a1_in1k                              a pretrained model of timm, which downloads it
    torchvision:ResNet50_Weights.IMAGENET1K_V2         weights of torchvision, which downloads them

Of a pickle tensors alone are read (torch.load, weights_only=True).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line, one_line
from bnfuse.core.tensor_files import opened

from .tensors import is_tensor

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
HOLDERS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network", "weights")
FORMS = "a file .safetensors, .pt or .pth, timm:NAME, or torchvision:WEIGHTS"


def read_weights(spec: str | os.PathLike[str]) -> dict[str, Any]:
    """Read tensors by name, numpy's or torch's. Raises BnfuseError, one line, where there are none."""
    text = os.fspath(spec)
    library, colon, name = text.partition(":")
    if colon and library in LIBRARIES and not Path(text).exists():
        return LIBRARIES[library](name, text)
    suffix = Path(text).suffix.lower()
    if suffix == ".safetensors":
        return safe_tensors(text)
    if suffix in PICKLES:
        return pickled(text)
    raise BnfuseError(f"{text}: names no weights: give {FORMS}")


def is_pickle(spec: str | os.PathLike[str]) -> bool:
    """Tell whether a file is one of torch.save, by its name."""
    return Path(spec).suffix.lower() in PICKLES


def safe_tensors(path: str) -> dict[str, Any]:
    """Read a file of safetensors. Types that numpy has not (bfloat16) are read by torch, where that is installed."""
    with opened(path) as file:
        names = list(file.keys())
        strange = any(file.get_slice(name).get_dtype() == "BF16" for name in names)
        if not strange:
            return {name: file.get_tensor(name) for name in names}
    import safetensors

    try:
        import torch  # noqa: F401
    except ImportError:
        raise BnfuseError(f"{path}: has tensors of bfloat16, which need torch: pip install torch") from None
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def pickled(path: str) -> dict[str, Any]:
    """Read the state_dict that torch.save wrote, alone or as an entry of a checkpoint."""
    try:
        import torch
    except ImportError:
        raise BnfuseError(f"{path}: needs torch to read it (pip install torch), or weights as .safetensors") from None
    if not Path(path).is_file():
        raise BnfuseError(f"{path}: there is no such file")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BnfuseError(
            f"{path}: torch.load(weights_only=True) does not read it ({one_line(first_line(error))[:160]}): save the "
            "state_dict alone, by torch.save(model.state_dict(), ...)"
        ) from None
    return state_in(found, path)


def state_in(found: Any, path: str) -> dict[str, Any]:
    """Find the state_dict in what was read: itself, or the entry of a checkpoint under one of its usual names."""
    for holder in (None, *HOLDERS):
        inner = found if holder is None else found.get(holder) if isinstance(found, Mapping) else None
        if isinstance(inner, Mapping) and inner and all(isinstance(name, str) for name in inner):
            tensors = {name: value for name, value in inner.items() if is_tensor(value)}
            if len(tensors) == len(inner) or (holder is not None and tensors):
                return tensors
    what = f"the entries {', '.join(map(str, list(found)[:6]))}" if isinstance(found, Mapping) else type(found).__name__
    raise BnfuseError(f"{path}: holds {what}, and no state_dict: save it by torch.save(model.state_dict(), ...)")


def from_timm(name: str, text: str) -> dict[str, Any]:
    """Take the weights of a pretrained model of timm, which keeps what it downloads."""
    timm = library("timm", text)
    try:
        return dict(timm.create_model(name, pretrained=True).state_dict())
    except Exception as error:
        raise BnfuseError(f"{text}: timm does not give it: {one_line(first_line(error))[:200]}") from None


def from_torchvision(name: str, text: str) -> dict[str, Any]:
    """Take weights of torchvision, which keeps what it downloads."""
    models = library("torchvision.models", text)
    try:
        return dict(models.get_weight(name).get_state_dict(progress=False, check_hash=True))
    except Exception as error:
        raise BnfuseError(f"{text}: torchvision does not give it: {one_line(first_line(error))[:200]}") from None


def library(name: str, text: str) -> Any:
    """Import a library that weights are taken from."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise BnfuseError(f"{text}: needs {package}, which is not installed: pip install {package}") from None


LIBRARIES = {"timm": from_timm, "torchvision": from_torchvision}
