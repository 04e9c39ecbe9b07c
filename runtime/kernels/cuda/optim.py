"""The update of all parameters on a GPU: the formulas of kernels/common/optim.py in one sweep, at memory speed.

    a block:   its warps walk the buffers together, 256 elements a warp and turn:
               16-byte loads of parameters, gradients and moments, the formula in registers, 16-byte stores

An access of a warp is 512 bytes side by side. A thread has two of them on their way.

At precision fp16 the gradients are those of the loss times the scalar `divisor`, and may have overflowed. Then a
stage before the update looks at every gradient; where one is not finite nothing is updated, and `finite` becomes 0:

    found[block] = is any gradient of the block's share infinite or NaN      (int32, scratch)
    each block of the update joins all of `found`; the first one writes `finite`

The norm of all gradients is two stages: sums of squares of the blocks in float64 (scratch), and one block that joins
them. Threads and lanes are joined in a fixed order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.optim import (
    ACCUMULATE_SCALARS,
    AVERAGE_SCALARS,
    BLOCK,
    NORM_SCALARS,
    FlatProblem,
    Known,
    Update,
    UpdateProblem,
    accumulate_params,
    average_params,
    factors_of,
    gradient_of,
    norm_and_factor,
    norm_params,
    norm_problem,
    scalars_of,
    state_of,
    update_of,
    update_params,
)
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import f32, f64, fma
from bnfuse.runtime.kernels.cuda.device import (
    WARP,
    Block,
    Buffer,
    Expr,
    Stage,
    bits,
    put,
    registers,
    shuffle_xor,
    stage,
    sync,
    unrolled,
    when,
)
from bnfuse.runtime.kernels.cuda.rows import join_threads
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

THREADS = 256
WIDE = 4  # elements of an access
EACH = 2 * WIDE  # elements of a thread in a turn
RUN = EACH * WARP  # elements of a warp in a turn
BLOCKS = 8  # for each multiprocessor, at most: chosen by hand


def update(problem: UpdateProblem, target: CudaTarget) -> Kernel:
    """Make the kernel of an optimiser's formula: parameters, gradients, decay, what the options ask for, and the state,
    as `update_params` lists them; then the scalars of `scalars_of`.

    At fp16 gradients are divided whatever the options say, and there are finite [1] int32 and scratch as results.
    """
    guarded = target.precision == "fp16"
    if guarded:
        problem = dataclasses.replace(problem, options=dataclasses.replace(problem.options, divided=True))
    params, scalars = update_params(problem), scalars_of(problem)
    blocks = blocks_of(problem.elements, target)
    if guarded:
        params += (Param("finite", "out", 1, "int32"), Param("found", "out", blocks, "int32"))
    name = unique_name(problem.op, problem, target)

    def make() -> tuple[Stage, ...]:
        sweep = _update(name, problem, params, scalars, blocks, guarded)
        return (_find(f"{name}_find", problem, params, blocks), sweep) if guarded else (sweep,)

    return Kernel(name, problem, target, params, make, scalars=scalars)


def blocks_of(elements: int, target: CudaTarget) -> int:
    """Count the blocks that walk the buffers: up to BLOCKS for each multiprocessor."""
    return max(1, min(-(-elements // (EACH * THREADS)), BLOCKS * target.multiprocessors))


def _sweep(block: Block, elements: int, blocks: int, whole: object, single: object) -> None:
    """Emit `whole(first)` for each warp's run, of which a thread has EACH elements from `first` on, as `_load` finds
    them, then `single(element)` for each of the rest."""
    runs, rest = divmod(elements, RUN)
    warps = blocks * THREADS // WARP
    turns = -(-runs // warps)
    if turns:
        own = T.bind(block.x * (THREADS // WARP) + block.warp)
        with T.serial(0, turns) as turn:
            run = T.bind(turn * warps + own)
            begin = lambda: whole(run * RUN + block.lane * WIDE)  # type: ignore[operator]  # noqa: E731
            when(True if runs == turns * warps else run < runs, begin)
    if rest:
        own = T.bind(block.x * THREADS + block.tid)
        when(own < rest, lambda: single(runs * RUN + own))  # type: ignore[operator]


def _places(first: Expr) -> list[tuple[int, Expr]]:
    """List the accesses of a thread: its own element, and that of the buffer."""
    return [(i, first + i * WARP) for i in range(0, EACH, WIDE)]


def _load(source: Buffer, first: Expr, into: Buffer) -> None:
    for i, place in _places(first):
        T.buffer_store(into, source[T.ramp(place, 1, WIDE)], [T.ramp(i, 1, WIDE)])


def _store(target: Buffer, first: Expr, values: Buffer) -> None:
    for i, place in _places(first):
        T.buffer_store(target, values[T.ramp(i, 1, WIDE)], [T.ramp(place, 1, WIDE)])


# -- are all gradients finite --------------------------------------------------------------------------------------


def _find(name: str, problem: UpdateProblem, params: Sequence[Param], blocks: int) -> Stage:
    """Emit gradients -> found: 1 for a block that has met one that is not finite."""
    used = [p for p in params if p.name in ("gradients", "found")]
    shared = 4 * THREADS // WARP
    with stage(name, used, grid=(blocks, 1, 1), threads=THREADS, shared=shared) as block:
        found = registers(1, "int32")
        put(found, 0, T.int32(0))

        def whole(first: Expr) -> None:
            values = registers(EACH)
            _load(block["gradients"], first, values)
            for i in range(EACH):
                put(found, 0, tirx.bitwise_or(found[0], _unbounded(values[i])))

        def single(element: Expr) -> None:
            put(found, 0, tirx.bitwise_or(found[0], _unbounded(block["gradients"][element])))

        _sweep(block, problem.elements, blocks, whole, single)
        joined = _any(block, found)
        when(block.tid == 0, lambda: put(block["found"], block.x, joined))
    return block.stage


def _unbounded(value: Expr) -> Expr:
    """Give 1 if the exponent's bits are all set, else 0."""
    exponent = tirx.bitwise_and(bits(value), T.uint32(0x7F800000))
    return tirx.Select(exponent == T.uint32(0x7F800000), T.int32(1), T.int32(0))


def _any(block: Block, found: Buffer) -> Expr:
    """Join `found[0]` by or over the block, for all its threads."""
    warps = THREADS // WARP
    of_warps = T.alloc_buffer((warps,), "int32", scope="shared")
    for distance in (16, 8, 4, 2, 1):
        put(found, 0, tirx.bitwise_or(found[0], shuffle_xor(found[0], distance)))
    when(block.lane == 0, lambda: put(of_warps, block.warp, found[0]))
    sync()
    joined: Expr = of_warps[0]
    for warp in range(1, warps):
        joined = tirx.bitwise_or(joined, of_warps[warp])
    return T.bind(joined)


# -- the update ----------------------------------------------------------------------------------------------------


def _update(
    name: str,
    problem: UpdateProblem,
    params: Sequence[Param],
    scalars: Sequence[tuple[str, str]],
    blocks: int,
    guarded: bool,
) -> Stage:
    with stage(name, params, grid=(blocks, 1, 1), threads=THREADS, scalars=scalars) as block:
        known = _known(block, problem)

        def sweep() -> None:
            _sweep(
                block,
                problem.elements,
                blocks,
                lambda first: _run(block, problem, known, first),
                lambda element: _single(block, problem, known, element),
            )

        if guarded:
            found = registers(1, "int32")
            put(found, 0, T.int32(0))
            block.each(blocks, lambda i: put(found, 0, tirx.bitwise_or(found[0], block["found"][i])))
            bad = _any(block, found)
            when(tirx.And(block.x == 0, block.tid == 0), lambda: put(block["finite"], 0, T.int32(1) - bad))
            when(bad == 0, sweep)
        else:
            sweep()
    return block.stage


def _known(block: Block, problem: UpdateProblem) -> Known:
    """Read what the formula takes. Adam's powers are float64 and slow: one thread of a block computes them."""
    known = dict(block.scalars)
    if problem.options.divided:
        known["unscale"] = T.bind(f32(1.0) / known["divisor"])
    if problem.options.clipped:
        known["clip"] = T.bind(block["clip"][0])
    if "step" not in known:
        return known
    factors = factors_of(problem, known["lr"], known["step"])
    shared = T.alloc_buffer((len(factors),), "float32", scope="shared")

    def compute() -> None:
        for i, (_, factor) in enumerate(factors):
            put(shared, i, factor)

    when(block.tid == 0, compute)
    sync()
    return {**known, **{label: T.bind(shared[i]) for i, (label, _) in enumerate(factors)}}


def _own(block: Block, problem: UpdateProblem, index: Expr) -> tuple[Expr, Expr | None]:
    """Read the weight decay and the factor of the rate of a block of parameters."""
    rate = T.bind(block["rates"][index]) if problem.options.rates else None
    return T.bind(block["decay"][index]), rate


def _run(block: Block, problem: UpdateProblem, known: Known, first: Expr) -> None:
    """Update a thread's elements from `first` on, in registers."""
    state = state_of(problem)
    own = {name: registers(EACH) for name in ("gradients", *state)}
    for name, values in own.items():
        _load(block[name], first, values)
    emit = update_of(problem, own, known)
    for start, place in _places(first):
        decay, rate = _own(block, problem, place // BLOCK)

        def element(i: Expr, start: int = start, decay: Expr = decay, rate: Expr | None = rate) -> None:
            _element(problem, own, known, emit, start + i, decay, rate)

        unrolled(WIDE, element)
    for name in state:
        _store(block[name], first, own[name])


def _single(block: Block, problem: UpdateProblem, known: Known, element: Expr) -> None:
    state = state_of(problem)
    own = {name: registers(1) for name in ("gradients", *state)}
    for name, values in own.items():
        put(values, 0, block[name][element])
    decay, rate = _own(block, problem, element // BLOCK)
    _element(problem, own, known, update_of(problem, own, known), 0, decay, rate)
    for name in state:
        put(block[name], element, own[name][0])


def _element(
    problem: UpdateProblem,
    own: Mapping[str, Buffer],
    known: Known,
    emit: Update,
    i: Expr,
    decay: Expr,
    rate: Expr | None,
) -> None:
    """Update one element in registers."""
    gradients = own["gradients"]
    put(gradients, i, gradient_of(problem.options, gradients[i], known))
    emit(i, gradients[i], decay, rate)


# -- what goes before and beside it ----------------------------------------------------------------------------------


def gradient_norm(elements: int, limit: float, divided: bool, target: CudaTarget) -> Kernel:
    """Make the kernel gradients -> norm [1], clip [1]: the norm of all, and min(1, limit/(norm + 1e-6)).

    Gradients are `divided` by the scalar `divisor`, float32; at fp16 they are. Scratch: sums, float64.
    """
    problem = norm_problem(elements, limit, divided)
    blocks = blocks_of(elements, target)
    params = norm_params(problem, blocks)
    scalars = NORM_SCALARS if divided else ()
    name = unique_name(problem.op, problem, target)

    def make() -> tuple[Stage, ...]:
        return _squares(f"{name}_squares", problem, params, blocks), _join(name, problem, params, scalars, blocks)

    return Kernel(name, problem, target, params, make, scalars=scalars)


def _squares(name: str, problem: FlatProblem, params: Sequence[Param], blocks: int) -> Stage:
    """Emit gradients -> sums: of the squares of each block's share."""
    used = [p for p in params if p.name in ("gradients", "sums")]
    with stage(name, used, grid=(blocks, 1, 1), threads=THREADS) as block:
        total = registers(1, "float64")
        put(total, 0, f64(0.0))

        def add(value: Expr) -> None:
            wide = T.bind(f64(value))
            put(total, 0, total[0] + wide * wide)

        def whole(first: Expr) -> None:
            values = registers(EACH)
            _load(block["gradients"], first, values)
            for i in range(EACH):
                add(values[i])

        _sweep(block, problem.elements, blocks, whole, lambda element: add(block["gradients"][element]))
        joined = join_threads(block, total[0], "float64", tirx.Add)
        when(block.tid == 0, lambda: put(block["sums"], block.x, joined))
    return block.stage


def _join(
    name: str, problem: FlatProblem, params: Sequence[Param], scalars: Sequence[tuple[str, str]], blocks: int
) -> Stage:
    """Emit sums -> norm, clip."""
    used = [p for p in params if p.name != "gradients"]
    with stage(name, used, grid=(1, 1, 1), threads=THREADS, scalars=scalars) as block:
        total = registers(1, "float64")
        put(total, 0, f64(0.0))
        block.each(blocks, lambda i: put(total, 0, total[0] + block["sums"][i]))
        joined = join_threads(block, total[0], "float64", tirx.Add)

        def finish() -> None:
            norm, factor = norm_and_factor(problem, joined, block.scalars.get("divisor"))
            found = T.bind(norm)
            put(block["norm"], 0, found)
            put(block["clip"], 0, factor(found))

        when(block.tid == 0, finish)
    return block.stage


def accumulate(elements: int, target: CudaTarget) -> Kernel:
    """Make the kernel  accumulated <- accumulated + factor*gradients, in place.

    Scalars keep: int32, factor: float32; where keep is 0, what is there counts for nothing.
    """
    problem = FlatProblem("Accumulate", elements)

    def value(block: Block, gradient: Expr, held: Expr) -> Expr:
        kept = tirx.Select(block.scalars["keep"] != 0, held, f32(0.0))
        return fma(block.scalars["factor"], gradient, kept)

    return _in_place(problem, accumulate_params(problem), ACCUMULATE_SCALARS, target, value)


def average(elements: int, target: CudaTarget) -> Kernel:
    """Make the kernel  average <- average + share*(values - average), in place; share: float32."""
    problem = FlatProblem("Average", elements)

    def value(block: Block, new: Expr, held: Expr) -> Expr:
        return fma(block.scalars["share"], new - held, held)

    return _in_place(problem, average_params(problem), AVERAGE_SCALARS, target, value)


def _in_place(
    problem: FlatProblem,
    params: tuple[Param, ...],
    scalars: tuple[tuple[str, str], ...],
    target: CudaTarget,
    value: Callable[[Block, Expr, Expr], Expr],
) -> Kernel:
    """Make a kernel of one stage that changes its second buffer: to `value` of an element of the first and its own."""
    name = unique_name(problem.op, problem, target)
    source, changed = (param.name for param in params)
    blocks = blocks_of(problem.elements, target)

    def make() -> tuple[Stage, ...]:
        with stage(name, params, grid=(blocks, 1, 1), threads=THREADS, scalars=scalars) as block:

            def whole(first: Expr) -> None:
                given, held = registers(EACH), registers(EACH)
                _load(block[source], first, given)
                _load(block[changed], first, held)
                unrolled(EACH, lambda i: put(held, i, value(block, given[i], held[i])))
                _store(block[changed], first, held)

            def single(element: Expr) -> None:
                put(block[changed], element, value(block, block[source][element], block[changed][element]))

            _sweep(block, problem.elements, blocks, whole, single)
        return (block.stage,)

    return Kernel(name, problem, target, params, make, scalars=scalars)
