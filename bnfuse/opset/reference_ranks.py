"""What the exchanges between ranks compute, in numpy: of all ranks' operands, and of one rank's.

As `reference.py`, of which this is a part. `moments_of_all` and `terms_of_all` are given the operands of all ranks, in
their order; RANKS has the operators as a run of one rank has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Operands = Mapping[str, Array]
Attributes = Mapping[str, Any]


def counted_ranks(size: int, attributes: Attributes) -> tuple[int, ...]:
    """List the ranks of a run of `size` that count: all of them, or the first `ranks`."""
    return tuple(range(min(attributes.get("ranks", 0) or size, size)))


def moments_of_all(means: Sequence[Array], variances: Sequence[Array], attributes: Attributes) -> tuple[Array, Array]:
    """Give mean and biased variance, [C] each, of the elements of all ranks that count; each has equally many."""
    ranks = counted_ranks(len(means), attributes)
    own = np.stack([means[rank] for rank in ranks])
    return own.mean(axis=0), np.mean([variances[rank] for rank in ranks], axis=0) + own.var(axis=0)


def terms_of_all(
    beta_terms: Sequence[Array], gamma_terms: Sequence[Array], rank: int, attributes: Attributes
) -> tuple[Array, Array]:
    """Give what one rank gets of the terms of all, of the channels [start, stop)."""
    ranks = counted_ranks(len(beta_terms), attributes)
    channels, share = slice(attributes["start"], attributes["stop"]), float(rank in ranks) / len(ranks)
    beta, gamma = (np.sum([term[channels] for term in terms], axis=0) * share for terms in (beta_terms, gamma_terms))
    return beta, gamma


RANKS: dict[str, Callable[[Operands, Attributes], tuple[Array, ...]]] = {
    "AllReduceMoments": lambda operands, attributes: moments_of_all(
        [operands["mean"]], [operands["variance"]], attributes
    ),
    "AllReduceTerms": lambda operands, attributes: terms_of_all(
        [operands["beta_term"]], [operands["gamma_term"]], 0, attributes
    ),
}
