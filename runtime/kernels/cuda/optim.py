"""The update of all parameters on a GPU: the formulas of kernels/common/optim.py in one sweep, at memory speed.

    a block:   its threads walk the buffers together, 8 elements a thread and turn:
               16-byte loads of parameters, gradients and moments, the formula in registers, 16-byte stores

At precision fp16 the gradients are those of the loss times the scalar `loss_scale`, and may have overflowed. Then a
stage before the update looks at every gradient; where one is not finite nothing is updated, and `finite` becomes 0:

    found[block] = is any gradient of the block's share infinite or NaN      (int32, scratch)
    each block of the update joins all of `found`; the first one writes `finite`
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from bnfuse.runtime.kernels.common.optim import (
    BLOCK,
    Update,
    UpdateProblem,
    adamw_factors,
    adamw_problem,
    adamw_update,
    moments_of,
    scalars_of,
    sgd_problem,
    sgd_update,
    update_params,
)
from bnfuse.runtime.kernels.common.params import unique_name
from bnfuse.runtime.kernels.common.steps import f32
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
from bnfuse.runtime.kernels.kernel import Kernel, Param
from bnfuse.runtime.targets.target import CudaTarget

THREADS = 256
WIDE = 4  # elements of an access
EACH = 2 * WIDE  # elements of a thread in a turn; they share a weight decay
BLOCKS = 8  # for each multiprocessor, at most: chosen by hand


def sgd(elements: int, momentum: float, nesterov: bool, target: CudaTarget) -> Kernel:
    """Make the kernel: parameters (in place), gradients, decay [elements/16], [momentum (in place)].

    Scalars: lr: float32; at fp16 also loss_scale: float32, and as results finite [1] int32 and scratch.
    """
    return _kernel(sgd_problem(elements, momentum, nesterov), target)


def adamw(elements: int, betas: tuple[float, float], epsilon: float, target: CudaTarget) -> Kernel:
    """Make the kernel: parameters (in place), gradients, decay [elements/16], first_moment, second_moment (in place).

    Scalars: lr: float32, step: int64; at fp16 as `sgd`.
    """
    return _kernel(adamw_problem(elements, betas, epsilon), target)


def _kernel(problem: UpdateProblem, target: CudaTarget) -> Kernel:
    scaled = target.precision == "fp16"
    params, scalars = update_params(problem), scalars_of(problem)
    blocks = blocks_of(problem, target)
    if scaled:
        params += (Param("finite", "out", 1, "int32"), Param("found", "out", blocks, "int32"))
        scalars += (("loss_scale", "float32"),)
    name = unique_name(problem.op, problem, target)

    def make() -> tuple[Stage, ...]:
        update = _update(name, problem, params, scalars, blocks)
        return (_find(f"{name}_find", problem, params, blocks), update) if scaled else (update,)

    return Kernel(name, problem, target, params, make, scalars=scalars)


def blocks_of(problem: UpdateProblem, target: CudaTarget) -> int:
    """Count the blocks that walk the buffers: up to BLOCKS for each multiprocessor."""
    return max(1, min(-(-problem.elements // (EACH * THREADS)), BLOCKS * target.multiprocessors))


def _sweep(block: Block, elements: int, blocks: int, whole: object, single: object) -> None:
    """Emit `whole(first)` for each run of 8 elements, then `single(element)` for each of the rest.

    Both are dealt to all threads.
    """
    runs, rest = divmod(elements, EACH)
    own = T.bind(block.x * THREADS + block.tid)
    threads = blocks * THREADS
    turns = -(-runs // threads)
    if turns:
        with T.serial(0, turns) as turn:
            run = T.bind(turn * threads + own)
            when(True if runs == turns * threads else run < runs, lambda: whole(run * EACH))  # type: ignore[operator]
    if rest:
        when(own < rest, lambda: single(runs * EACH + own))  # type: ignore[operator]


def _load(source: Buffer, first: Expr, into: Buffer) -> None:
    for i in range(0, EACH, WIDE):
        T.buffer_store(into, source[T.ramp(first + i, 1, WIDE)], [T.ramp(i, 1, WIDE)])


def _store(target: Buffer, first: Expr, values: Buffer) -> None:
    for i in range(0, EACH, WIDE):
        T.buffer_store(target, values[T.ramp(i, 1, WIDE)], [T.ramp(first + i, 1, WIDE)])


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
    name: str, problem: UpdateProblem, params: Sequence[Param], scalars: Sequence[tuple[str, str]], blocks: int
) -> Stage:
    scaled = any(label == "loss_scale" for label, _ in scalars)
    with stage(name, params, grid=(blocks, 1, 1), threads=THREADS, scalars=scalars) as block:
        known = _scalars(block, problem)
        unscale = T.bind(f32(1.0) / block.scalars["loss_scale"]) if scaled else None

        def sweep() -> None:
            _sweep(
                block,
                problem.elements,
                blocks,
                lambda first: _run(block, problem, known, unscale, first),
                lambda element: _single(block, problem, known, unscale, element),
            )

        if scaled:
            found = registers(1, "int32")
            put(found, 0, T.int32(0))
            block.each(blocks, lambda i: put(found, 0, tirx.bitwise_or(found[0], block["found"][i])))
            bad = _any(block, found)
            when(tirx.And(block.x == 0, block.tid == 0), lambda: put(block["finite"], 0, T.int32(1) - bad))
            when(bad == 0, sweep)
        else:
            sweep()
    return block.stage


def _scalars(block: Block, problem: UpdateProblem) -> list[Expr]:
    """Read what the formula takes. AdamW's powers are float64 and slow: one thread of a block computes them."""
    lr = block.scalars["lr"]
    if problem.op != "AdamW":
        return [lr]
    shared = T.alloc_buffer((2,), "float32", scope="shared")

    def compute() -> None:
        for i, factor in enumerate(adamw_factors(problem, lr, block.scalars["step"])):
            put(shared, i, factor)

    when(block.tid == 0, compute)
    sync()
    return [lr, T.bind(shared[0]), T.bind(shared[1])]


def _formula(problem: UpdateProblem, buffers: dict[str, Buffer], scalars: list[Expr]) -> Update:
    return (adamw_update if problem.op == "AdamW" else sgd_update)(problem, buffers, scalars)


def _run(block: Block, problem: UpdateProblem, scalars: list[Expr], unscale: Expr | None, first: Expr) -> None:
    """Update 8 elements from `first` on, in registers."""
    state = ("parameters", *moments_of(problem))
    own = {name: registers(EACH) for name in ("gradients", *state)}
    for name, values in own.items():
        _load(block[name], first, values)
    decay = T.bind(block["decay"][first // BLOCK])
    update = _formula(problem, own, scalars)

    def each(i: Expr) -> None:
        if unscale is not None:
            put(own["gradients"], i, own["gradients"][i] * unscale)
        update(i, decay)

    unrolled(EACH, each)
    for name in state:
        _store(block[name], first, own[name])


def _single(block: Block, problem: UpdateProblem, scalars: list[Expr], unscale: Expr | None, element: Expr) -> None:
    state = ("parameters", *moments_of(problem))
    own = {name: registers(1) for name in ("gradients", *state)}
    for name, values in own.items():
        put(values, 0, block[name][element])
    if unscale is not None:
        put(own["gradients"], 0, own["gradients"][0] * unscale)
    _formula(problem, own, scalars)(0, block["decay"][element // BLOCK])
    for name in state:
        put(block[name], element, own[name][0])
