"""How long a message between workers takes, by the algorithm that moves it.

With b bytes on each of p workers, BW bytes/s in and out of each of them and a latency of l seconds, summing them takes

    ring       2 (p-1)/p * b/BW + 2 (p-1) l     a reduce-scatter and an all-gather around a ring
    halving    2 (p-1)/p * b/BW + 2 log2(p) l   the same by halves and doubles, or by pipelined trees
    tree       2 log2(p) * (b/BW + l)           [Iandola16], eq. 3.4
    server     p * (b/BW + l)                   [Iandola16], eq. 3.3

Half of it is the reduce-scatter, after which each worker has the sum of its part, and half the all-gather.
"""

from __future__ import annotations

import math
from typing import get_args

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.options import Strategy
from bnfuse.estimating.parallel.scaling import MESSAGES, Network, communication_s

ALGORITHMS: tuple[Strategy, ...] = get_args(Strategy)


def sum_s(bytes: float, workers: float, network: Network, algorithm: Strategy = "ring") -> float:
    """Give the seconds in which `bytes` of each worker are summed, and the sum is on all of them.

    `workers` may be broken.
    """
    if algorithm in MESSAGES:
        return communication_s(bytes, workers, network, algorithm)
    if algorithm not in ALGORITHMS:
        raise BnfuseError(f"reduce={algorithm} is unknown: it is {', '.join(ALGORITHMS)}")
    if workers <= 1:
        return 0.0
    hops = workers - 1 if algorithm == "ring" else math.log2(workers)
    return 2 * ((workers - 1) / workers * bytes / network.bandwidth + hops * network.latency)


def half_s(bytes: float, workers: float, network: Network, algorithm: Strategy = "ring") -> float:
    """Give the seconds of a reduce-scatter of `bytes`, or of the all-gather after which each worker has all of them."""
    return sum_s(bytes, workers, network, algorithm) / 2


def gather_s(own: float, workers: float, network: Network, algorithm: Strategy = "ring") -> float:
    """Give the seconds in which each worker gets the `own` bytes of all: an all-gather of p times as many."""
    return half_s(own * workers, workers, network, algorithm)
