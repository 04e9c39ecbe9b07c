"""Exchanges inside kernels, between GPUs that reach each other's memory: interpreted, a thread for each rank."""

from __future__ import annotations

import threading

import lockstep
import numpy as np
import pytest

from bnfuse.runtime.kernels.common.coefficients import box_words
from bnfuse.runtime.kernels.cuda.coefficients import coefficients
from bnfuse.runtime.program.program import HEADER, STOP
from bnfuse.runtime.targets.target import CudaTarget

CHANNELS, RANKS = 5, 3
Buffers = dict[str, np.ndarray]


class Ranks:
    """The boxes of some ranks, and a kernel of one operator that all of them run."""

    def __init__(self, name: str, arguments: tuple, sent: int) -> None:
        self.kernel = coefficients(((name, arguments),), CudaTarget("sm_90", 4))
        self.headers = [np.zeros(HEADER, np.uint64) for _ in range(RANKS)]
        for rank, header in enumerate(self.headers):
            header[0] = rank
        self.boxes = [np.zeros(box_words(RANKS, sent, CHANNELS), np.uint64) for _ in range(RANKS)]

    def run(self, rank: int, given: Buffers) -> None:
        (stage,) = self.kernel.build()
        out = {f"outbox{other}": box for other, box in enumerate(self.boxes)}
        lockstep.run(stage.function, {**given, **out, "header": self.headers[rank], "inbox": self.boxes[rank]})

    def together(self, given: list[Buffers]) -> None:
        threads = [threading.Thread(target=self.run, args=(rank, each), daemon=True) for rank, each in enumerate(given)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank waits for ever"


def drawn(rng: np.random.Generator, *names: str) -> Buffers:
    return {name: rng.standard_normal(CHANNELS).astype(np.float32) for name in names}


def test_moments_of_all_ranks_are_those_of_all_samples_turn_after_turn():
    """Three turns: halves of the boxes are used again."""
    ranks = Ranks("all_moments", (CHANNELS, RANKS, RANKS, True), 2)
    rng = np.random.default_rng(0)
    for _ in range(3):
        samples = rng.standard_normal((RANKS, 7, CHANNELS)) + 1000 * rng.standard_normal((RANKS, 1, CHANNELS))
        given = [
            {
                "mean": own.mean(0).astype(np.float32),
                "variance": own.var(0).astype(np.float32),
                **drawn(rng, "all_mean", "all_variance"),
            }
            for own in samples
        ]
        ranks.together(given)
        whole = samples.reshape(-1, CHANNELS)
        np.testing.assert_allclose(given[0]["all_mean"], whole.mean(0), rtol=1e-6, atol=1e-4)
        np.testing.assert_allclose(given[0]["all_variance"], whole.var(0), rtol=1e-5)
        for other in given[1:]:
            assert all(np.array_equal(given[0][name], other[name]) for name in ("all_mean", "all_variance"))


def test_terms_are_summed_in_the_order_of_ranks():
    total = 8
    ranks = Ranks("all_terms", (CHANNELS, total, RANKS, True), 2)
    rng = np.random.default_rng(1)
    terms = rng.standard_normal((RANKS, 2, total)).astype(np.float32)
    given = [
        {
            "beta_term": own[0],
            "gamma_term": own[1],
            "beta_term_offset": np.int32(3),
            "gamma_term_offset": np.int32(3),
            **drawn(rng, "all_beta_term", "all_gamma_term"),
        }
        for own in terms
    ]
    ranks.together(given)
    wanted = terms.astype(np.float64)[:, :, 3 : 3 + CHANNELS].sum(0) / RANKS
    for each in given:
        assert np.array_equal(each["all_beta_term"], wanted[0].astype(np.float32))
        assert np.array_equal(each["all_gamma_term"], wanted[1].astype(np.float32))


@pytest.mark.parametrize("late", [False, True], ids=["before", "while it waits"])
def test_a_kernel_whose_rank_has_given_up_waits_for_nobody(late):
    ranks = Ranks("all_moments", (CHANNELS, RANKS, RANKS, True), 2)
    given = drawn(np.random.default_rng(2), "mean", "variance", "all_mean", "all_variance")
    thread = threading.Thread(target=ranks.run, args=(1, given), daemon=True)
    if not late:
        ranks.headers[1][STOP] = 1
    thread.start()
    if late:
        thread.join(0.5)
        assert thread.is_alive()
        ranks.headers[1][STOP] = 1
    thread.join(60)
    assert not thread.is_alive()
