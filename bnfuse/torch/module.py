"""`fuse`: a module that is as it was, but for its forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_whole

from .engine import Engine, Options
from .partial import fuse_parts
from .shell import FusedModule, rebound, shell


def fuse(
    module: nn.Module,
    example: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    level: str = "icf",
    fallback: str = "error",
    precision: str | None = None,
    threads: int | None = None,
    cache: bool | str | Path = True,
    ignore: tuple[str, ...] = (),
    pieces: int | None = None,
) -> nn.Module:
    """Fuse a module: what comes back has the same parameters, buffers and submodules, and is called as the module is.

    `example` are the arguments of a call, a tuple or a single one, `kwargs` those with names: the module is compiled
    for their shapes at once, in the mode that it is in. Other batch sizes, modes and shapes are compiled when they
    come.

    level      of fusion, as in `bnfuse.rewrite`
    fallback   what is not supported: "error" raises BnfuseError with the reason; "torch" leaves that part of the module
               to torch and fuses the largest submodules around it (`report` says which)
    precision  fp32 or bf16, on a GPU also tf32 or fp16 (fp32 on a CPU), where torch.autocast does not say
    threads    on a CPU; torch's number of threads by default
    cache      a folder for compiled kernels, True for the user's own, False for none
    pieces     of backward, each with the gradients of some parameters; by default 1, and 4 where there are several
               processes, which send the first gradients while the others are computed
    ignore     plain attributes ("path.name") that no forward depends on: what else changes is captured anew

    docs/torch.md
    """
    if not isinstance(module, nn.Module):
        raise BnfuseError(f"fuse takes an nn.Module, not a {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule | nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise BnfuseError(f"a {type(module).__name__} is not fused: fuse the module that it holds, then wrap it")
    if isinstance(module, FusedModule):
        raise BnfuseError("the module is fused already")
    arguments = example if isinstance(example, tuple) else (example,)
    if pieces is not None:
        check_whole("pieces", pieces, 1)
    options = Options(level, fallback, precision, threads, cache, frozenset(ignore), pieces)
    named = dict(kwargs or {})
    try:
        return fused_whole(module, arguments, named, options)
    except BnfuseError as error:
        if fallback == "error":
            raise

        def fuse_one(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
            return fused_whole(part, args, kwargs, options)

        return fuse_parts(module, arguments, named, str(error), fuse_one)


def fused_whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> FusedModule:
    """Fuse a module as a whole. Raises BnfuseError where it cannot be."""
    fused = shell(module)
    engine = Engine(fused, rebound(module.__dict__.get("forward"), module, fused), options)
    fused.__dict__["_bnfuse"] = engine
    engine.prepare(args, kwargs)
    return fused
