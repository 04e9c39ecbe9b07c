"""What a BatchNorm computes per channel: coefficients from statistics, and those of its input gradient.

Each operator is one formula, `emit(get, put)`, that both code generators put into loops of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.reference_sampling import range_factor
from bnfuse.runtime.kernels.common.norm import NormProblem
from bnfuse.runtime.kernels.common.steps import Expr, f64, to_f32
from bnfuse.runtime.kernels.kernel import Param
from bnfuse.runtime.program.program import HEADER

Emit = Callable[["Get", "Put"], None]


class Get(Protocol):
    """The value of an operand for the channel at hand; of one with rows, that of a row."""

    def __call__(self, param: str, row: int = 0) -> Expr:
        """Give the float32 element of operand `param`, in `row` where that has rows."""


class Put(Protocol):
    """Store a result for the channel at hand; of one with rows, in a row."""

    def __call__(self, param: str, value: Expr, row: int = 0) -> None:
        """Store float32 `value` as the element of result `param`, in `row` where that has rows."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """An operator over `channels` channels. `emit(get, put)` writes one channel; `ranges` has the operands that are
    ranges of longer vectors, and those vectors' lengths. Those named in `rows` are matrices of so many rows, `pitch`
    elements apart: row r of a channel lies at r*pitch + channel. A pitch of 0 is the number of channels.

    Those in `sent` are exchanged with `ranks` ranks by the loop itself, on GPUs that reach each other's memory
    (kernels/cuda/mapped.py): `get` gives a row of them for each rank."""

    problem: NormProblem
    channels: int
    emit: Emit
    ranges: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pitch: int = 0
    sent: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def params(self) -> list[Param]:
        """List the float32 operands, then the results. Operands in `ranges` take an offset, as maps do."""
        op = PLAIN_OPS[self.problem.op]
        operands = [Param(n, "in", self._elements(n), is_map=n in self.ranges) for n in op.operands]
        return operands + [Param(name, "out", self._elements(name)) for name in op.results] + self._boxes()

    def _boxes(self) -> list[Param]:
        """List where the ranks find what is sent to them."""
        if not self.sent:
            return []
        words = box_words(self.ranks, len(self.sent), self.channels)
        outboxes = [Param(f"outbox{rank}", "out", words, "uint64") for rank in range(self.ranks)]
        return [Param("header", "in", HEADER, "uint64"), Param("inbox", "inout", words, "uint64"), *outboxes]

    def _elements(self, name: str) -> int:
        return (
            self.rows[name] * (self.pitch or self.channels)
            if name in self.rows
            else self.ranges.get(name, self.channels)
        )


def box_words(ranks: int, sent: int, channels: int) -> int:
    """Count the words of a box (kernels/cuda/mapped.py)."""
    return (2 * ranks * sent + 1) * channels


def finalize(channels: int, epsilon: float, momentum: float, elements: float = 0.0) -> Loop:
    """Describe BatchNormFinalize: scale, bias, mean, variance, running_mean, running_variance
    -> a, b, inv_std, new_running_mean, new_running_variance.

    The running variance takes the unbiased estimate where `elements` says of how many elements a channel is.
    """

    def emit(get: Get, put: Put) -> None:
        inv_std = T.bind(f64(1.0) / tirx.sqrt(f64(get("variance")) + f64(epsilon)))
        a = T.bind(f64(get("scale")) * inv_std)
        put("a", to_f32(a))
        put("b", to_f32(f64(get("bias")) - f64(get("mean")) * a))
        put("inv_std", to_f32(inv_std))
        for name in ("mean", "variance"):
            running, batch = f64(get(f"running_{name}")), f64(get(name))
            share = (1.0 - momentum) * (unbiasing(elements) if name == "variance" else 1.0)
            put(f"new_running_{name}", to_f32(running * f64(momentum) + batch * f64(share)))

    constants = (("epsilon", epsilon), ("momentum", momentum), *_counted(elements))
    return Loop(NormProblem("BatchNormFinalize", constants=constants), channels, emit)


def unbiasing(elements: float) -> float:
    """Give the factor that makes a variance over so many elements the unbiased estimate; 1 for at most one."""
    return elements / (elements - 1.0) if elements > 1 else 1.0


def _counted(elements: float) -> tuple[tuple[str, float], ...]:
    return (("elements", elements),) if elements else ()


def grad_terms(channels: int) -> Loop:
    """Describe BatchNormGradTerms: dbeta, dgamma, a, inv_std -> beta_term, gamma_term."""

    def emit(get: Get, put: Put) -> None:
        put("beta_term", get("a") * get("dbeta"))
        put("gamma_term", get("a") * get("inv_std") * get("dgamma"))

    return Loop(NormProblem("BatchNormGradTerms"), channels, emit)


def grad_terms_accumulate(channels: int, total: int) -> Loop:
    """Describe BatchNormGradTermsAccumulate: dbeta, dgamma, a, inv_std, beta_acc, gamma_acc -> beta_term, gamma_term.

    The accumulators have `total` channels and the offset (of the first channel read) of a map.
    """

    def emit(get: Get, put: Put) -> None:
        put("beta_term", get("beta_acc") + get("a") * get("dbeta"))
        put("gamma_term", get("gamma_acc") + get("a") * get("inv_std") * get("dgamma"))

    return Loop(NormProblem("BatchNormGradTermsAccumulate"), channels, emit, {"beta_acc": total, "gamma_acc": total})


def grad_finalize(channels: int, total: int, count: int) -> Loop:
    """Describe BatchNormGradFinalize: beta_term, gamma_term, mean -> q, w, of a BN over `count` pixels.

    The terms have `total` channels and the offset (`start`) of a map.
    """

    def emit(get: Get, put: Put) -> None:
        q = T.bind(f64(0.0) - f64(get("gamma_term")) / f64(float(count)))
        put("q", to_f32(q))
        put("w", to_f32(f64(0.0) - f64(get("beta_term")) / f64(float(count)) - q * f64(get("mean"))))

    problem = NormProblem("BatchNormGradFinalize", constants=(("count", count),))
    return Loop(problem, channels, emit, {"beta_term": total, "gamma_term": total})


def mix_statistics(channels: int, weight: float) -> Loop:
    """Describe MixStatistics: mean, variance, mean_2, variance_2 -> mixed_mean, mixed_variance.

    Each is weight*first + (1 - weight)*second.
    """

    def emit(get: Get, put: Put) -> None:
        for name in ("mean", "variance"):
            first, second = f64(get(name)), f64(get(f"{name}_2"))
            put(f"mixed_{name}", to_f32(first * f64(weight) + second * f64(1.0 - weight)))

    return Loop(NormProblem("MixStatistics", constants=(("weight", weight),)), channels, emit)


def sampled_grad_finalize(channels: int, count: int, weight: float) -> Loop:
    """Describe SampledGradFinalize: beta_term, gamma_term, mean -> q, w: the gradient of one part of a mixture.

    The part has `count` pixels, and `weight` in the mixture.
    """

    def emit(get: Get, put: Put) -> None:
        share = weight / count
        q = T.bind(f64(get("gamma_term")) * f64(-share))
        put("q", to_f32(q))
        put("w", to_f32(f64(get("beta_term")) * f64(-share) - q * f64(get("mean"))))

    problem = NormProblem("SampledGradFinalize", constants=(("count", count), ("weight", weight)))
    return Loop(problem, channels, emit)


def all_moments(channels: int, ranks: int, counted: int, mapped: bool = False) -> Loop:
    """Describe AllReduceMoments of what was gathered: mean, variance [ranks, channels] -> all_mean, all_variance. Where
    GPUs are `mapped` it gathers them itself: mean, variance [channels].

    Of the first `counted` ranks, in their order: the same bits on each of them. The means' squared distances are taken
    from the mean, so nothing cancels however far that is from 0.
    """

    def emit(get: Get, put: Put) -> None:
        means = [T.bind(f64(get("mean", rank))) for rank in range(counted)]
        mean = T.bind(f64(1.0 / counted) * total(means))
        put("all_mean", to_f32(mean))
        own = [f64(get("variance", rank)) + (each - mean) * (each - mean) for rank, each in enumerate(means)]
        put("all_variance", to_f32(f64(1.0 / counted) * total(own)))

    problem = NormProblem("AllReduceMoments", constants=(("ranks", ranks), ("counted", counted)))
    read = ("mean", "variance")
    if mapped:
        return Loop(problem, channels, emit, sent=read, ranks=ranks)
    return Loop(problem, channels, emit, rows=dict.fromkeys(read, ranks))


def total(terms: Sequence[Expr]) -> Expr:
    """Add terms up in their order."""
    return functools.reduce(lambda left, right: left + right, terms)


def all_terms(channels: int, length: int, ranks: int, mapped: bool = False) -> Loop:
    """Describe a rank's part of AllReduceTerms: beta_term, gamma_term -> all_beta_term, all_gamma_term.

    Their `channels` channels from an offset on, of `length`, divided by the number of ranks: what is summed over these.
    Where GPUs are `mapped` they are exchanged and summed, too, in the order of ranks.
    """
    read = ("beta_term", "gamma_term")

    def emit(get: Get, put: Put) -> None:
        for name in read:
            terms = [f64(get(name, rank)) for rank in range(ranks if mapped else 1)]
            put(f"all_{name}", to_f32(total(terms) * f64(1.0 / ranks)))

    problem = NormProblem("AllReduceTerms", constants=(("ranks", ranks),))
    ranges = dict.fromkeys(read, length)
    return Loop(problem, channels, emit, ranges, sent=read if mapped else (), ranks=ranks)


def l1_grad_finalize(channels: int, count: int) -> Loop:
    """Describe L1GradFinalize: beta_term, gamma_term, variance, sign_mean -> q, w, over `count` pixels."""

    def emit(get: Get, put: Put) -> None:
        deviation = tirx.sqrt(f64(get("variance")) * f64(math.pi / 2))
        q = T.bind(f64(get("gamma_term")) * deviation * f64(-1.0 / count))
        put("q", to_f32(q))
        put("w", to_f32(f64(get("beta_term")) * f64(-1.0 / count) - q * f64(get("sign_mean"))))

    return Loop(NormProblem("L1GradFinalize", constants=(("count", count),)), channels, emit)


def range_grad_finalize(channels: int, count: int) -> Loop:
    """Describe RangeGradFinalize: beta_term, gamma_term, low, high, low_count, high_count -> q_low, q_high, w.

    Its statistics are over `count` pixels.
    """

    def emit(get: Get, put: Put) -> None:
        factor = range_factor(count)
        width = f64(get("high")) - f64(get("low"))
        term = T.bind(f64(get("gamma_term")) * width * f64(factor * factor))
        put("q_low", to_f32(term / f64(get("low_count"))))
        put("q_high", to_f32(f64(0.0) - term / f64(get("high_count"))))
        put("w", to_f32(f64(get("beta_term")) * f64(-1.0 / count)))

    return Loop(NormProblem("RangeGradFinalize", constants=(("count", count),)), channels, emit)


def local_finalize(
    channels: int, pitch: int, groups: int, epsilon: float, momentum: float, elements: float = 0.0
) -> Loop:
    """Describe LocalFinalize: scale, bias [c], mean, variance [groups, pitch], running_mean, running_variance [c]
    -> a, b, inv_std [groups, pitch], new_running_mean, new_running_variance [c].

    The running statistics follow the average of the groups, the variance as in `finalize`.
    """

    def emit(get: Get, put: Put) -> None:
        for group in range(groups):
            inv_std = T.bind(f64(1.0) / tirx.sqrt(f64(get("variance", group)) + f64(epsilon)))
            a = T.bind(f64(get("scale")) * inv_std)
            put("a", to_f32(a), group)
            put("b", to_f32(f64(get("bias")) - f64(get("mean", group)) * a), group)
            put("inv_std", to_f32(inv_std), group)
        for name in ("mean", "variance"):
            total = f64(get(name, 0))
            for group in range(1, groups):
                total = total + f64(get(name, group))
            running = f64(get(f"running_{name}"))
            share = (1.0 - momentum) / groups * (unbiasing(elements) if name == "variance" else 1.0)
            put(f"new_running_{name}", to_f32(running * f64(momentum) + total * f64(share)))

    numbers = (("pitch", pitch), ("groups", groups), ("epsilon", epsilon), ("momentum", momentum))
    constants = (*numbers, *_counted(elements))
    rows = dict.fromkeys(("mean", "variance", "a", "b", "inv_std"), groups)
    return Loop(NormProblem("LocalFinalize", constants=constants), channels, emit, rows=rows, pitch=pitch)


LOOPS: dict[str, Callable[..., Loop]] = {
    loop.__name__: loop
    for loop in (
        finalize,
        grad_terms,
        grad_terms_accumulate,
        grad_finalize,
        mix_statistics,
        sampled_grad_finalize,
        all_moments,
        all_terms,
        l1_grad_finalize,
        range_grad_finalize,
        local_finalize,
    )
}
Member = tuple[str, tuple[Any, ...]]  # a name in LOOPS, and its arguments


def param_name(name: str, member: int, members: Any) -> str:
    """Name a parameter of operator number `member` of a launch: with that number where there are several."""
    return name if len(members) == 1 else f"{name}_{member}"
