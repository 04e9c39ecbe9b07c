"""What a BatchNorm computes per channel: coefficients from statistics, and those of its input gradient.

Each operator is a serial loop of a few microseconds, and adjacent ones share a launch (runtime/grouping.py). The length
of a loop is a run-time value taken from the buffers, so one compiled kernel serves every BN of a network; a range of
channels of a longer vector is that vector and an offset, passed like a map's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.opset.spec import PLAIN_OPS
from bnfuse.runtime.kernels.cpu import tir
from bnfuse.runtime.kernels.cpu.norm import NormProblem
from bnfuse.runtime.kernels.cpu.steps import Expr
from bnfuse.runtime.kernels.cpu.sweep import f64, to_f32, unique_name
from bnfuse.runtime.kernels.kernel import Kernel, Param, Target

Emit = Callable[[Callable[[str], Expr], Callable[[str, Expr], None]], None]


@dataclasses.dataclass(frozen=True)
class Loop:
    """An operator over `channels` channels. `emit(get, put)` writes one channel; `ranges` has the operands that are
    ranges of longer vectors, and those vectors' lengths."""

    problem: NormProblem
    channels: int
    emit: Emit
    ranges: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def params(self) -> list[Param]:
        op = PLAIN_OPS[self.problem.op]
        operands = [Param(n, "in", self.ranges.get(n, self.channels), is_map=n in self.ranges) for n in op.operands]
        return operands + [Param(name, "out", self.channels) for name in op.results]


@dataclasses.dataclass(frozen=True)
class GroupProblem:
    """Operators that one launch does in turn. They may read what those before them wrote."""

    members: tuple[NormProblem, ...]

    @property
    def op(self) -> str:
        return "+".join(member.op for member in self.members)


def finalize(channels: int, epsilon: float, momentum: float) -> Loop:
    """scale, bias, mean, variance, running_mean, running_variance
    -> a, b, inv_std, new_running_mean, new_running_variance.
    """

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        inv_std = T.bind(f64(1.0) / tirx.sqrt(f64(get("variance")) + f64(epsilon)))
        a = T.bind(f64(get("scale")) * inv_std)
        put("a", to_f32(a))
        put("b", to_f32(f64(get("bias")) - f64(get("mean")) * a))
        put("inv_std", to_f32(inv_std))
        for name in ("mean", "variance"):
            running, batch = f64(get(f"running_{name}")), f64(get(name))
            put(f"new_running_{name}", to_f32(running * f64(momentum) + batch * f64(1.0 - momentum)))

    problem = NormProblem("BatchNormFinalize", constants=(("epsilon", epsilon), ("momentum", momentum)))
    return Loop(problem, channels, emit)


def grad_terms(channels: int) -> Loop:
    """dbeta, dgamma, a, inv_std -> beta_term, gamma_term."""

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        put("beta_term", get("a") * get("dbeta"))
        put("gamma_term", get("a") * get("inv_std") * get("dgamma"))

    return Loop(NormProblem("BatchNormGradTerms"), channels, emit)


def grad_terms_accumulate(channels: int, total: int) -> Loop:
    """dbeta, dgamma, a, inv_std, beta_acc, gamma_acc -> beta_term, gamma_term; the accumulators have `total` channels
    and the offset (of the first channel read) of a map.
    """

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        put("beta_term", get("beta_acc") + get("a") * get("dbeta"))
        put("gamma_term", get("gamma_acc") + get("a") * get("inv_std") * get("dgamma"))

    return Loop(NormProblem("BatchNormGradTermsAccumulate"), channels, emit, {"beta_acc": total, "gamma_acc": total})


def grad_finalize(channels: int, total: int, count: int) -> Loop:
    """beta_term, gamma_term, mean -> q, w; the terms have `total` channels and the offset (`start`) of a map."""

    def emit(get: Callable[[str], Expr], put: Callable[[str, Expr], None]) -> None:
        q = T.bind(f64(0.0) - f64(get("gamma_term")) / f64(float(count)))
        put("q", to_f32(q))
        put("w", to_f32(f64(0.0) - f64(get("beta_term")) / f64(float(count)) - q * f64(get("mean"))))

    problem = NormProblem("BatchNormGradFinalize", constants=(("count", count),))
    return Loop(problem, channels, emit, {"beta_term": total, "gamma_term": total})


LOOPS: dict[str, Callable[..., Loop]] = {
    loop.__name__: loop for loop in (finalize, grad_terms, grad_terms_accumulate, grad_finalize)
}

Member = tuple[str, tuple[Any, ...]]  # a name in LOOPS, and its arguments


def coefficients(members: tuple[Member, ...], target: Target) -> Kernel:
    """The kernel of some operators, one after the other. With several, parameter x of member i is x_i."""
    loops = [LOOPS[name](*arguments) for name, arguments in members]
    params = [dataclasses.replace(p, name=param_name(p.name, i, loops)) for i, o in enumerate(loops) for p in o.params]
    problem = loops[0].problem if len(loops) == 1 else GroupProblem(tuple(loop.problem for loop in loops))
    name = unique_name(problem.op, problem, target)
    return Kernel(name, problem, target, tuple(params), lambda: _function(name, loops))


def param_name(name: str, member: int, members: Any) -> str:
    return name if len(members) == 1 else f"{name}_{member}"


def _function(name: str, loops: list[Loop]) -> Any:
    symbolic = []
    for i, loop in enumerate(loops):
        length, longer = tirx.Var(f"channels_{i}", "int32"), tirx.Var(f"total_{i}", "int32")
        symbolic += [
            dataclasses.replace(p, name=param_name(p.name, i, loops), elements=longer if p.is_map else length)
            for p in loop.params
        ]
    with tir.function(name, symbolic, may_alias=len(loops) > 1) as args:
        for i, loop in enumerate(loops):
            _emit_loop(args, loop, {p.name: param_name(p.name, i, loops) for p in loop.params})
    return args.result


def _emit_loop(args: tir.Arguments, loop: Loop, names: Mapping[str, str]) -> None:
    def place(param: str, channel: Expr) -> Expr:
        return args.offsets[param] + channel if param in args.offsets else channel

    first_result = names[PLAIN_OPS[loop.problem.op].results[0]]
    with T.serial(0, args[first_result].shape[0]) as channel:
        loop.emit(
            lambda param: args[names[param]][place(names[param], channel)],
            lambda param, value: T.buffer_store(args[names[param]], value, [channel]),
        )
