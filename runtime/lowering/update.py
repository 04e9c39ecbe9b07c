"""The update phase: one launch over the flat buffers of all trainable parameters, their gradients and moments.

accumulate    gradients -> accumulated                     where an update is of several backward passes
update        accumulated or gradients -> norm, clip       where they are clipped by their norm
              parameters, moments, average                 the optimiser
              running statistics -> their average          where there is one
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.optim import (
    BLOCK,
    Options,
    UpdateProblem,
    adam_problem,
    lion_problem,
    rmsprop_problem,
    scalars_of,
    sgd_problem,
)
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.groups import check_globs, decay_of, rates_of
from bnfuse.runtime.program.optim import SGD, Adam, Lion, Optimizer, RMSprop

FLOAT = np.dtype(np.float32).itemsize


def update_phase(low: Lowering, optimizer: Optimizer) -> None:
    """Add the optimiser's launches, its moments, and what else its recipe asks for. Every trainable parameter must have
    a gradient."""
    names = low.signature.trainable
    outputs = {value.name for value in low.graph.outputs}
    missing = [name for name in names if low.signature.gradients.get(name) not in outputs]
    if missing or not names:
        what = f"parameter '{missing[0]}' has no gradient among the outputs" if missing else "nothing is trainable"
        raise BnfuseError(f"{what}: build the training graph anew, or compile it without an optimizer")
    check_globs(optimizer, names)
    inputs = {value.name: value for value in low.graph.inputs}
    own = {name: low.storages[low.dense(inputs[name])] for name in names}
    elements = max(s.offset + p.aligned(s.bytes) for s in own.values()) // FLOAT
    low.regions[p.GRADIENTS] = low.regions[p.PARAMETERS]
    gradients = low.storage(elements, region=p.GRADIENTS, offset=0)
    if optimizer.accumulate > 1:
        gradients = accumulated(low, gradients)
    options = options_of(low, optimizer)
    refs: dict[str, Ref] = {
        "parameters": low.storage(elements, region=p.PARAMETERS, offset=0),
        "gradients": gradients,
        "decay": low.constant_storage(by_block({n: decay_of(optimizer, n) for n in names}, own, elements)),
        **{moment: low.storage(elements, region=p.OPTIMIZER) for moment in optimizer.moments},
    }
    if options.rates:
        rates = rates_of(optimizer, reading_order(low), {name: len(low.shape(inputs[name])) for name in names})
        refs["rates"] = low.constant_storage(by_block(rates, own, elements))
    if optimizer.clip_norm is not None:
        refs["clip"] = clip_factor(low, gradients, optimizer.clip_norm, options.divided)
    if options.averaged:
        low.regions[p.AVERAGE] = low.regions[p.PARAMETERS]
        refs["average"] = low.storage(elements, region=p.AVERAGE, offset=0)
    if low.target.precision == "fp16":
        low.finite = low.storage(1, "int32", p.OUTPUTS)
        refs["finite"] = low.finite
    problem = problem_of(optimizer, elements, options)
    low.launch(registry.UPDATE, (problem, low.target), refs, [p.Scalar(name) for name, _ in scalars_of(problem)])
    if options.averaged:
        average_running(low, after=optimizer.accumulate > 1)


def options_of(low: Lowering, optimizer: Optimizer) -> Options:
    """Tell what a kernel does besides the formula."""
    return Options(
        rates=optimizer.has_rates,
        divided=optimizer.accumulate > 1 or low.target.precision == "fp16" or low.ranks.size > 1,
        clipped=optimizer.clip_norm is not None,
        bound=None if optimizer.clip_value is None else float(optimizer.clip_value),
        averaged=optimizer.ema is not None,
    )


def problem_of(optimizer: Optimizer, elements: int, options: Options) -> UpdateProblem:
    """Describe the kernel that an optimiser needs for so many parameters."""
    if isinstance(optimizer, SGD):
        return sgd_problem(elements, optimizer.momentum, optimizer.nesterov, options)
    if isinstance(optimizer, Adam):  # AdamW is one too
        return adam_problem(type(optimizer).__name__, elements, optimizer.betas, optimizer.epsilon, options)
    if isinstance(optimizer, RMSprop):
        own = (optimizer.alpha, optimizer.epsilon, optimizer.momentum, optimizer.tensorflow)
        return rmsprop_problem(elements, *own, options)
    assert isinstance(optimizer, Lion), optimizer
    return lion_problem(elements, optimizer.betas, options)


def accumulated(low: Lowering, gradients: int) -> int:
    """Add the launch that adds gradients up, in a phase of its own. Gives where they are then."""
    elements = low.storages[gradients].elements
    total = low.storage(elements, region=p.ACCUMULATED)
    low.phase = "accumulate"
    refs: dict[str, Ref] = {"gradients": gradients, "accumulated": total}
    low.launch(registry.ACCUMULATE, (elements, low.target), refs, map(p.Scalar, ("keep", "factor")))
    low.phase = "update"
    return total


def clip_factor(low: Lowering, gradients: int, limit: float, divided: bool) -> int:
    """Add the launch that takes the norm of all gradients. Gives the number that they are to be multiplied by."""
    elements = low.storages[gradients].elements
    low.norm, clip = low.storage(1, region=p.OUTPUTS), low.storage(1)
    refs: dict[str, Ref] = {"gradients": gradients, "norm": low.norm, "clip": clip}
    arguments = (elements, float(limit), divided, low.target)
    low.launch(registry.GRADIENT_NORM, arguments, refs, [p.Scalar("divisor")] if divided else [])
    return clip


def average_running(low: Lowering, after: bool) -> None:
    """Add the launches that average running statistics: `after` new ones have taken their place, or before."""
    if not (size := low.regions.get(p.RUNNING, 0)):
        return
    low.regions[p.AVERAGE_RUNNING] = size
    region = p.RUNNING if after else p.NEW_RUNNING
    low.regions.setdefault(region, size)
    pieces = [(0, size // FLOAT)]
    if not after and set(low.signature.running.values()) - {value.name for value in low.graph.outputs}:
        held = [s for s in low.storages if s.region == p.NEW_RUNNING]  # some statistics never move
        pieces = [(s.offset, s.elements) for s in held]
    for offset, elements in pieces:
        refs: dict[str, Ref] = {
            "values": low.storage(elements, region=region, offset=offset),
            "average": low.storage(elements, region=p.AVERAGE_RUNNING, offset=offset),
        }
        low.launch(registry.AVERAGE, (elements, low.target), refs, [p.Scalar("share")])


def reading_order(low: Lowering) -> list[str]:
    """List the trainable parameters as the graph first reads them."""
    wanted = set(low.signature.trainable)
    found = dict.fromkeys(
        value.name for node in low.graph for value in node.inputs if value is not None and value.name in wanted
    )
    return [*(str(name) for name in found), *(name for name in low.signature.trainable if name not in found)]


def by_block(values: Mapping[str, float], own: Mapping[str, p.Storage], elements: int) -> np.ndarray:
    """Give the value of each parameter to its blocks."""
    found = np.zeros(elements // BLOCK, np.float32)
    for name, storage in own.items():
        first = storage.offset // (BLOCK * FLOAT)
        found[first : first + p.aligned(storage.bytes) // (BLOCK * FLOAT)] = values[name]
    return found
