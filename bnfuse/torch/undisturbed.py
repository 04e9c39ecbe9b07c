"""Around a capture: module and process stay as they were, and what an exported graph would not show is refused."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.export import quiet as said_nothing
from bnfuse.fromtorch.faithful import own_gradients_refused
from bnfuse.fromtorch.seeding import undrawn

from .facts import BATCH_NORM, STATISTICS
from .watch import OWN, frozen


@contextlib.contextmanager
def as_found(module: nn.Module, *, watched: bool = True) -> Iterator[None]:
    """Let the state of the random generators be as it was, and autocast off, while a module is captured. What that
    saves for a backward is none of the caller's: torch.utils.checkpoint counts what is.

    `watched` refuses what a graph of operators does not show of gradients.
    """
    device = next((one.device for one in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(itself, itself),
        own_gradients_refused(torch) if watched else contextlib.nullcontext(),
    ):
        yield


def itself(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor."""
    return tensor


@contextlib.contextmanager
def no_traces(module: nn.Module) -> Iterator[None]:
    """Refuse a forward that draws by Python's or numpy's generators, or counts in attributes: it would do so once.

    What it did is undone.
    """
    modules = [(path, one, attributes_of(one), contained(one)) for path, one in module.named_modules()]
    with undrawn():
        yield
    for path, one, before, values in modules:
        after = attributes_of(one)
        if odd := sorted(key for key in {*before, *after} if before.get(key) != after.get(key)):
            for key in odd:
                one.__dict__.pop(key, None)
                one.__dict__.update({key: restored(*values[key])} if key in before else {})
            what = f"{path}.{odd[0]}".lstrip(".")
            raise BnfuseError(f"its forward changes the attribute '{what}', which a fused one would not")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Give the attributes of a module as they can be compared later. Tensors are not read: they may have no values."""
    return {key: frozen(value, reads=False) for key, value in module.__dict__.items() if is_own(key)}


def contained(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Give the attributes of a module, each with a copy of what it contains, where it is a list, dict or set."""
    return {
        key: (value, copy.copy(value) if type(value) in (list, dict, set) else None)
        for key, value in module.__dict__.items()
        if is_own(key)
    }


def restored(value: Any, before: Any) -> Any:
    """Give an attribute with what it contained before."""
    if before is not None:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(before)
    return value


def is_own(key: str) -> bool:
    """Tell whether an attribute is a module's own, and none that every nn.Module has."""
    return key not in OWN or key == "training"


@contextlib.contextmanager
def with_parameters(module: nn.Module) -> Iterator[None]:
    """Let tensors that stand in the place of parameters (torch.func.functional_call) be parameters while a module is
    captured."""
    tables: list[dict[str, Any]] = [one._parameters for one in module.modules()]
    odd = [
        (table, key, tensor)
        for table in tables
        for key, tensor in table.items()
        if tensor is not None and not isinstance(tensor, nn.Parameter)
    ]
    try:
        for table, key, tensor in odd:
            table[key] = nn.Parameter(tensor.detach(), tensor.requires_grad)
        yield
    finally:
        for table, key, tensor in odd:
            table[key] = tensor


@contextlib.contextmanager
def cumulative_momentum(module: nn.Module) -> Iterator[set[str]]:
    """Let BatchNorms with momentum=None be captured as giving the statistics of the batch. Gives the names of theirs.

    The mean over all batches is made of them, and of the count, after each forward.
    """
    found = [(key, one) for key, one in module.named_modules() if isinstance(one, BATCH_NORM) and one.momentum is None]
    try:
        for _, norm in found:
            norm.momentum = 1.0
        yield {f"{key}.{what}" if key else what for key, _ in found for what in STATISTICS}
    finally:
        for _, norm in found:
            norm.momentum = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what exporters print and warn of: what counts is looked at here."""
    with said_nothing(), contextlib.redirect_stdout(io.StringIO()):
        yield
