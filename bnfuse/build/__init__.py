"""From a forward graph to a training file, without onnxruntime, and without torch unless the source is a module of it.

built = build("forward.onnx", batch=16)      # .model, .notes
built = build(module, example=images)        # a torch module, as it is
model = build_training_graph("forward.onnx")  # the model alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from bnfuse.core.ranges import check_whole
from bnfuse.graph.module_state import MODULE_KEY
from bnfuse.graph.shapes import complete_shapes

from .batch_norms import check_definition, tell_definition
from .decompose import decompose
from .forward import read_forward
from .losses import Term
from .modules import buffer_digests, module_state, opened
from .own_losses import loss_in_graph, read_ending
from .repair import make_canonical, repair
from .training import NOTES_KEY, add_loss, differentiated_inputs, finish, gradient_graph, set_metadata
from .traps import check_forward, drop_unread_inputs
from .variables import choose_variables
from .written_pools import join_written_pools

__all__ = ["NOTES_KEY", "Built", "Term", "build", "build_training_graph"]


@dataclasses.dataclass(frozen=True)
class Built:
    """A training file, what had to be repaired in its source, and what is likely to be wrong with it, a line each.

    `trainable` and `frozen` are the names of the parameters, the latter with statistics that stay as they are.
    """

    model: onnx.ModelProto
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


def build(
    source: Any,
    *,
    example: Any = None,
    loss: str | Path | Sequence[Term] | onnx.ModelProto = "cross-entropy",
    labels: Sequence[str] = (),
    batch: int | None = None,
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    train_bn: bool = False,
    frozen_bn: bool = False,
    freeze_bn: Sequence[str] = (),
    running_variance: str | None = None,
    init: Sequence[str] = (),
    allow_folded_bn: bool = False,
    logits: str | None = None,
    seed: int = 0,
    file: str | None = None,
    input_gradients: Sequence[str] | None = None,
) -> Built:
    """Make the training file of a forward model (docs/training-file.md).

    source    a ModelProto, the path of a file, or a torch module in training mode (or a program that torch exported)
    example   what a torch module is called with: a tensor, or a tuple of arguments, whose shapes are the graph's; a
              module is exported as it is and stays as it is, with its own names
    loss      what docs/training-file.md lists, as text or as terms: cross-entropy (int64 labels), mse (float32 labels
              of the output's shape), "cross-entropy@main + 0.4*cross-entropy@aux", none (the gradients of the
              outputs are inputs), ...; own, which is the loss that the file ends in; a loss as a model, or its file
    labels    inputs that are labels of such a loss, beside those of integers
    batch     fixes the first dimension of every data input
    train     globs of the parameters to train; freeze takes some of them away. Constants that were no parameters of
              the network (affine=False, buffers) train only where a glob other than * matches them
    train_bn  BatchNormalization exported for inference becomes training BN
    frozen_bn takes a file whose BatchNormalizations are all frozen: they normalise by their running statistics
    freeze_bn globs of BatchNormalizations to freeze so, by the names of their modules, parameters or nodes
    running_variance  by which variance of the batch the running one is moved: "onnx", as ONNX defines it, the biased
              one, by default; "torch", as torch moves it, the unbiased one, by default of a torch module
    init      globs of the parameters and statistics to draw anew; all others keep the values that the file has
    logits    which output the loss reads, where there are several
    seed      of the values that are drawn: for `init`, and where the file has none
    file      name for messages, where `source` is no path

    input_gradients  data inputs whose gradients are outputs, `<input>_grad`; given, and be it empty, a graph may have
              nothing to train

    allow_folded_bn  takes a file whose BatchNorms its exporter is known to have folded away
    """
    check_whole("seed", seed)
    if running_variance is not None:
        check_definition(running_variance)
    given = opened(
        source,
        example,
        file=file,
        batch=batch,
        train_bn=train_bn,
        frozen_bn=frozen_bn,
        running_variance=running_variance,
    )
    forward = read_forward(given.model, file=given.file, batch=batch)
    module, buffers = module_state(forward.model), buffer_digests(forward.model)
    ending = read_ending(forward, loss, labels, logits)
    found = repair(
        forward,
        train_bn=given.train_bn,
        frozen_bn=given.frozen_bn,
        freeze_bn=freeze_bn,
        terms=ending.terms,
        outputs=ending.outputs,
        seed=seed,
        init=init,
        allow_folded_bn=allow_folded_bn,
        own_loss=ending.loss,
        labels=ending.labels,
        file=ending.file,
    )
    check_forward(forward)
    graph_loss = loss_in_graph(forward, ending, found)
    drop_unread_inputs(forward, graph_loss.labels if graph_loss else ())
    if graph_loss is not None:
        found.constants.names.update(graph_loss.untrained(forward, train))
        found.fixed.update(graph_loss.constants)
    data = differentiated_inputs(forward, input_gradients or ())
    variables = choose_variables(
        forward,
        found.constants.names,
        found.fixed,
        train,
        freeze,
        found.untracked,
        module.frozen,
        required=input_gradients is None,
    )
    found.constants.names.update(join_written_pools(forward, variables.all))
    decompose(forward, found.constants, frozenset(variables.all), frozenset(variables.frozen))
    make_canonical(forward)
    ends = graph_loss.ends(forward) if graph_loss else add_loss(forward, ending.terms, found.outputs)
    tell_definition(forward, given.running_variance)
    built = gradient_graph(forward, variables, ends, unbiased=given.running_variance == "torch", data=data)
    model = finish(built, forward, variables, ends, data)
    if module.is_known:
        set_metadata(model, MODULE_KEY, module.within(variables.all, buffers).to_json())
    complete_shapes(model, forward.file)
    notes, warnings = tuple(forward.notes), tuple(forward.warnings)
    return Built(model, notes, warnings, variables.trainable, variables.frozen)


def build_training_graph(
    source: Any,
    *,
    example: Any = None,
    loss: str | Path | Sequence[Term] | onnx.ModelProto = "cross-entropy",
    labels: Sequence[str] = (),
    batch: int | None = None,
    train: Sequence[str] = ("*",),
    freeze: Sequence[str] = (),
    train_bn: bool = False,
    frozen_bn: bool = False,
    freeze_bn: Sequence[str] = (),
    running_variance: str | None = None,
    init: Sequence[str] = (),
    allow_folded_bn: bool = False,
    logits: str | None = None,
    seed: int = 0,
    file: str | None = None,
    input_gradients: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """Do what `build` does, without its notes, which are also in the model's metadata."""
    return build(
        source,
        example=example,
        loss=loss,
        labels=labels,
        batch=batch,
        train=train,
        freeze=freeze,
        train_bn=train_bn,
        frozen_bn=frozen_bn,
        freeze_bn=freeze_bn,
        running_variance=running_variance,
        init=init,
        allow_folded_bn=allow_folded_bn,
        logits=logits,
        seed=seed,
        file=file,
        input_gradients=input_gradients,
    ).model
