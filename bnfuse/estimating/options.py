"""What can be asked of an estimate: the options of `bnfuse estimate`, described here alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bnfuse.core.options import option

Order = Literal["file", "dfs"]
Optimizer = Literal["none", "sgd", "momentum", "adamw", "adam", "rmsprop", "lion"]
Strategy = Literal["ring", "halving", "tree", "server"]
Mode = Literal["strong", "weak"]

QUESTIONS = ("sweep", "reuse", "roofline", "workers")  # options that ask for something else than an estimate


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of `bnfuse estimate`. Quantities are text ("24MB", "616GB/s") or numbers (bytes, bytes/s, FLOP/s)."""

    source: Any
    hardware: str | None = option(
        None,
        "i9-10980xe, rtx2080ti, rx6900xt, a100, h100 (the default), host (this machine, as measured), or a "
        "ReRAM/GPU stack: 2r2g, 3r1g.",
        metavar="NAME",
    )
    cache: str | float | None = option(None, "Its cache: 24MB (of 2^20).", metavar="B")
    bandwidth: str | float | None = option(None, "Its memory bandwidth: 616GB/s.", metavar="B/s")
    flops: str | float | None = option(None, "Its rate of computing: 13.45TFLOP/s.", metavar="FLOP/s")
    precision: str = option(
        "fp32",
        "What maps are stored in, and the rate of products: fp32, tf32, bf16, fp16.",
        metavar="P",
    )
    measure: bool = option(False, "Measure the host again.")
    levels: Sequence[str] = option((), "Levels to compare: none,rcf,mvf,bnff,icf.", metavar="L,...", flag="--level")
    sweep: str | None = option(
        None,
        "An estimate for each value of cache, bandwidth, flops, batch: cache=24MB:1000MB:2MB, batch=8,16.",
        metavar="AXIS=A:B:STEP",
    )
    reuse: bool = option(False, "Where bytes are reused: the five scopes, and the cache that each needs.")
    roofline: bool = option(False, "FLOP for each byte of the layers, and what they attain at that.")
    workers: str | None = option(None, "Data-parallel steps on so many workers: 1,2,4,8.", metavar="P,...")
    network: str = option("6GB/s", "Bandwidth between workers: 6GB/s, 100Gbit/s.", metavar="B/s")
    reduce: Strategy = option(
        "ring",
        "How gradients are summed: ring and halving in buckets beside the backward pass, by simulation; tree and "
        "server behind it, by the paper's formulas.",
    )
    bucket: str | None = option(None, "Least size of a bucket of gradients (4MB).", metavar="B")
    latency: float = option(0.0, "Microseconds that a message takes at least.", low=0)
    jitter: float = option(0.0, "Spread of the workers' times, as part of a step.", low=0)
    sharded: bool = option(False, "Each worker updates its part of the parameters.")
    scaling: Mode = option("strong", "Whether workers share a batch (strong) or have one each (weak).")
    overlap: float = option(
        0.0, "Part of the backward pass that communication of --reduce tree or server hides behind.", low=0, high=1
    )
    remove: str | None = option(None, "BatchNorms to take out, as of `bnfuse rewrite`.", metavar="LIST")
    order: Order = option("file", "The file's order, or depth first to the joins.")
    optimizer: Optimizer = option("none", "Count the update of a training graph's parameters.")
    views: bool = option(False, "Count concatenations and reshapes as copies.")
    assume: Mapping[str, object] = option(
        None, "A modelling choice (docs/estimate.md), repeatable.", metavar="KEY=VALUE", factory=dict
    )
    zoo: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # batch, image, ... of a network of the zoo
    signature: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for opening a file that others wrote
    plot: Path | None = None

    @property
    def kinds(self) -> list[str]:
        """The options that ask for something of their own: there may be one."""
        return [name for name in QUESTIONS if getattr(self, name) not in (None, False)]
