"""Whether two training graphs compute the same: loss, gradients and running statistics from the same inputs and state.

`before` runs in onnxruntime. `after` runs in onnxruntime too, or compiled in our own runtime. Or both are computed in
float64 by onnx's evaluator, slowly, where rounding noise leaves no verdict in float32: there the tolerance is 1e-9.

A tensor's error is ||after - before|| / ||before||. What is tolerated is measured, not guessed: `before` runs again
with its inputs and parameters disturbed by one rounding (relative 2**-24, random signs). A result that moves by so
much under rounding noise cannot be told apart more finely, so the tolerance is eight times that spread, and never
less than 1e-5. A step that computes in fewer bits is measured by `before` computed in these (rounded.py), and may be
off by half as much again. Now and then noise opens a ReLU; where three draws of it say no, up to 16 are made, and then
up to two more seeds asked, before no is the answer. Norms below a millionth of the largest of their kind count as that
much, so that a gradient which is zero but for rounding (a bias in front of a BatchNorm) is not held to its own noise. A
tolerance of 0.1 or more (in fewer bits than float32, of 1) judges nothing: then the answer is that it cannot be judged,
which is no yes. What operators draw at random is drawn once and fed to both, anew for each step (drawing.py).
docs/numerics.md
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.graph.batches import with_batch
from bnfuse.graph.feeds import draw_feeds
from bnfuse.graph.training_graph import TrainingGraph, dropouts
from bnfuse.verifying.interface import check_same_interface
from bnfuse.verifying.interpreter import wide
from bnfuse.verifying.noise import Reference
from bnfuse.verifying.runners import CompiledRunner, FileRunner, Float64Runner, OrtRunner, Where, loss_of
from bnfuse.verifying.verdict import ROUNDINGS, Verification, is_right, is_wrong, refusal_note

DRAWS = 3  # of rounding noise
MOST_DRAWS = 16  # where three say no
SEEDS = 3  # that must all say no
RUNTIMES = ("ort", "tvm", "float64")
FLOAT64 = "fp64"  # no precision that a step can have


def verify_graphs(
    before: TrainingGraph,
    after: TrainingGraph,
    *,
    runtime: str = "ort",
    steps: int = 0,
    seed: int = 0,
    lr: float = 0.01,
    threads: int | None = None,
    target: str = "cpu",
    precision: str | None = None,
    batch: int | None = None,
    progress: Progress = quiet,
) -> Verification:
    """Compare at the initial state of `before`, on random images and labels, of `batch` samples where that is given.

    A ReLU whose input is zero but for rounding is open in one graph and closed in the other, and then gradients part by
    more than any tolerance. That is luck, of one image in many; a mistake is wrong on every image. So where one seed
    says no, up to two more are asked, and the answer is no only where all of them say so.
    """
    if runtime not in RUNTIMES:
        raise BnfuseError(f"runtime '{runtime}' is unknown: it is {', '.join(RUNTIMES[:-1])} or {RUNTIMES[-1]}")
    if runtime != "tvm" and (target, precision) != ("cpu", None):
        what = {"ort": "onnxruntime", "float64": "float64"}[runtime]
        raise BnfuseError(f"{what} takes no target or precision ({target}, {precision}): say --runtime tvm")
    precisions = [name for name in ROUNDINGS if name != FLOAT64]
    if precision not in (None, *precisions):
        raise BnfuseError(f"precision '{precision}' is unknown: it is one of {', '.join(precisions)}")
    check_same_interface(before, after)
    if batch is not None:
        before, after = with_batch(before, batch), with_batch(after, batch)
    where = Where(threads, target, FLOAT64 if runtime == "float64" else precision, seed)
    refused: list[Verification] = []
    for attempt in range(SEEDS):
        found = verify_once(before, after, runtime, steps, seed + attempt, lr, where, progress)
        if found.equal:
            return dataclasses.replace(found, notes=(*found.notes, *(refusal_note(no) for no in refused)))
        refused.append(found)
        if attempt + 1 < SEEDS:
            what = "not equal" if is_wrong(found) else "not to be judged"
            progress(f"{what} on the images of seed {seed + attempt}: asking seed {seed + attempt + 1}")
    return next(filter(is_wrong, refused), refused[0])


def verify_once(
    before: TrainingGraph,
    after: TrainingGraph,
    runtime: str,
    steps: int,
    seed: int,
    lr: float,
    where: Where,
    progress: Progress,
) -> Verification:
    """Compare on the images and labels of one seed."""
    rng = np.random.default_rng(seed)
    feeds, state = draw_feeds(before, rng), before.state()
    if runtime == "float64":  # what is drawn and kept in float32 is disturbed by less than it can tell
        feeds, state = wide(feeds), wide(state)
    kind: type[FileRunner]
    kind, draws = (Float64Runner, 0) if runtime == "float64" else (OrtRunner, DRAWS)
    names = {OrtRunner: "onnxruntime", Float64Runner: "float64", CompiledRunner: "the compiled step"}

    progress(f"running {before.name} in {names[kind]}")
    reference = Reference(before, kind, where, feeds, state, lr, steps, rng)
    reference.draw(draws)
    reference.close()

    bar = bar_of(progress)
    second = CompiledRunner(after, where, bar) if runtime == "tvm" else kind(after, where)
    progress(f"running {after.name} in {names[type(second)]}")
    result, losses = second.evaluate(feeds, state), second.train(feeds, state, lr, steps)
    del second

    tensors, curves = reference.judge(result, losses)
    if not is_right(tensors, curves):
        progress(f"not equal by {draws} draws of rounding noise: drawing more")
    while not is_right(tensors, curves) and len(reference.spreads) < MOST_DRAWS:
        reference.draw(1)
        tensors, curves = reference.judge(result, losses)
    notes = dropout_notes(before, after)
    expected, found = (loss_of(before.signature, values, feeds) for values in (reference.values, result))
    return Verification(runtime, seed, expected, found, tensors, curves, notes, where.precision or "fp32")


def dropout_notes(before: TrainingGraph, after: TrainingGraph) -> tuple[str, ...]:
    """Say where dropout was switched off."""
    dropped = sorted({*dropouts(before.model), *dropouts(after.model)})
    return (f"dropout ratio set to 0 in both graphs ({', '.join(dropped)})",) if dropped else ()
