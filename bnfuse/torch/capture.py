"""A torch module, in the mode that it is in, as a training graph whose gradients of outputs come in.

    module  ->  torch.export  ->  ONNX  ->  build (no loss)  ->  rewrite  ->  Captured

The exported program says what the graph alone would not: which buffers change, what was detached, how inputs and
outputs are packed. What would not come out as in torch is refused here, in one line.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError
from bnfuse.fromtorch.batch_constants import traits
from bnfuse.fromtorch.export import as_onnx as written
from bnfuse.fromtorch.export import captured
from bnfuse.graph.module_state import MODULE_KEY, ModuleState
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import Rewritten, rewrite

from .facts import read, refuse_means_of_several_calls
from .undisturbed import as_found, cumulative_momentum, no_traces, quiet, with_parameters
from .watch import is_plain

log = logging.getLogger("bnfuse")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

LOCK = threading.RLock()  # what is patched while a module is captured is the process's


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of the module: a result of the graph by its place, or a constant."""

    place: int | None
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class Captured:
    """What was captured of a module: the rewritten training graph, and how it hangs together with the module.

    `inputs` are the graph's names of the tensors of a call, None where nothing reads one. `reached` has, for each
    result of the graph, the parameters (by name) and inputs (by place) that a gradient of it reaches.
    """

    rewritten: Rewritten
    notes: tuple[str, ...]
    inputs: tuple[str | None, ...]
    input_gradients: dict[int, str]  # place of an input -> output of the graph that is its gradient
    results: tuple[str, ...]
    outputs: tuple[Output, ...]
    packed: Any  # pytree of the outputs
    trainable: tuple[str, ...]
    state: tuple[str, ...]  # all parameters and statistics of the graph
    running: tuple[str, ...]  # those of them that a forward moves
    counts: dict[str, int]  # num_batches_tracked -> by how much a forward counts it up
    cumulative: frozenset[str]  # running statistics that are the mean of all batches (momentum=None)
    reached: tuple[frozenset[str | int], ...]
    traits: str  # what it computes, without the sizes of shapes
    baked: tuple[str, ...] = ()  # parameters and buffers whose values are constants of the graph

    @functools.cached_property
    def kept(self) -> tuple[str, ...]:
        """Name what backward depends on: all of the state but what a forward moves."""
        moved = {*self.running}
        return tuple(name for name in self.state if name not in moved)


def capture(
    module: nn.Module,
    arguments: Arguments,
    *,
    gradients: bool,
    wanted_inputs: Sequence[int] = (),
    level: str = "icf",
    name: str = "the module",
) -> Captured:
    """Capture a module, in the mode that it is in, called with these arguments. It is left as it was.

    With `gradients` parameters with requires_grad=True train, and inputs at the places `wanted_inputs` (among the
    tensors of the call) get gradients; without it the graph only computes results. Raises BnfuseError for what would
    not come out as in torch.
    """
    check_types(module, name)
    with LOCK, as_found(module), with_parameters(module), cumulative_momentum(module) as cumulative:
        program, packing = exported_with_packing(module, arguments, name)
        facts = read(program, module, name)
        seen = f"{traits(program)}\n{packing.leaves} {packing.packed}"
        proto = as_onnx(program, name)
    refuse_means_of_several_calls(facts, cumulative, name)
    produced = [value.name for value in proto.graph.output]
    if len(produced) != len(facts.results):
        raise BnfuseError(f"{name}: torch exports {len(produced)} results of {len(facts.results)}")
    present = {value.name for value in proto.graph.input}
    inputs = [given if given in present else None for given in facts.inputs]
    data = [inputs[place] for place in wanted_inputs] if gradients else []
    known = dict(module.named_parameters(remove_duplicate=False))
    frozen = [key for key, one in known.items() if not one.requires_grad]
    built = build(
        proto,
        loss="none",
        train=("*",) if gradients else (),
        freeze=[literal(key) for key in frozen] if gradients else (),
        train_bn=facts.trains_norms,
        frozen_bn=not facts.trains_norms,
        running_variance="torch",
        file=name,
        input_gradients=[given for given in data if given is not None],
    )
    graph = open_graph(built.model, name=name)
    signature = graph.signature
    trainable = tuple(signature.trainable)
    wanted = {key for key in frozenset().union(*facts.reached) if key in known and known[key].requires_grad}
    odd = {*trainable} ^ wanted if gradients else set()
    if odd:
        raise BnfuseError(f"{name}: '{min(odd)}' has no gradient here that is torch's: a parameter of a kind not known")
    state = (*trainable, *signature.frozen, *signature.running)
    owned = {*facts.parameters, *facts.buffers}
    tensors = {**known, **dict(module.named_buffers(remove_duplicate=False))}
    followed = {id(tensors[key]) for key in (*state, *facts.counts) if key in tensors}
    return Captured(
        rewritten=rewrite(graph.model, level=level, signature=signature),
        notes=built.notes,
        inputs=tuple(given if given in signature.data else None for given in inputs),
        input_gradients={
            place: signature.input_gradients[str(inputs[place])]
            for place in (wanted_inputs if gradients else ())
            if inputs[place] in signature.input_gradients
        },
        results=tuple(signature.output_gradients),
        outputs=packing.outputs(facts.places),
        packed=packing.packed,
        trainable=trainable,
        state=tuple(key for key in state if key in owned),
        running=tuple(key for key in signature.running if key in owned),
        counts=facts.counts,
        cumulative=frozenset(cumulative),
        reached=facts.reached,
        traits=seen,
        baked=tuple(sorted(key for key in facts.operands if key in tensors and id(tensors[key]) not in followed)),
    )


def traits_of(module: nn.Module, arguments: Arguments, name: str) -> str:
    """Export a module, as `capture` does, and tell what it computes without the sizes of shapes."""
    with LOCK, as_found(module), with_parameters(module), cumulative_momentum(module):
        program, packing = exported_with_packing(module, arguments, name)
        return f"{traits(program)}\n{packing.leaves} {packing.packed}"


def exported_with_packing(module: nn.Module, arguments: Arguments, name: str) -> tuple[Any, Packing]:
    """Give the exported program, and how its results were packed."""
    packing, own = Packing(module), module.__dict__.get("forward")
    module.__dict__["forward"] = packing.function()
    try:
        return exported(module, arguments, name), packing
    finally:
        module.__dict__.update({"forward": own})
        if own is None:
            del module.__dict__["forward"]


def literal(name: str) -> str:
    """Write a name as a glob that matches it alone."""
    return "".join(f"[{c}]" if c in "[*?" else c for c in name)


def check_types(module: nn.Module, name: str) -> None:
    """Refuse state of other types than float32."""
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise BnfuseError(
                f"{name}: '{key}' is {kind}: parameters are float32, and torch.autocast chooses what is less"
            )
        if tensor.is_complex() or tensor.layout != torch.strided or nn.parameter.is_lazy(tensor):
            raise BnfuseError(f"{name}: '{key}' is complex, sparse or not initialised: nothing here computes with it")


class Packing:
    """A forward that gives the tensors among its results alone, and keeps how they were packed."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward
        self.leaves: list[Any] = []  # None for a tensor
        self.packed: Any = None

    def function(self) -> Callable[..., Any]:
        """Give it as a function with the signature of the forward."""

        @functools.wraps(self.forward)
        def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            return self.run(*args, **kwargs)

        return forward

    def run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """Run the forward."""
        with no_traces(self.module):
            found = self.forward(*args, **kwargs)
        leaves, self.packed = pytree.tree_flatten(found)
        self.leaves = [None if isinstance(one, torch.Tensor) else Output(None, one) for one in leaves]
        odd = next((out.constant for out in self.leaves if out is not None and not is_plain(out.constant)), None)
        if odd is not None:
            raise BnfuseError(
                f"returns an object of type {type(odd).__name__}: tensors in tuples, lists and dicts it can"
            )
        return tuple(one for one in leaves if isinstance(one, torch.Tensor))

    def outputs(self, places: Sequence[int]) -> tuple[Output, ...]:
        """Give the outputs, of whose tensors each is this result of the graph."""
        left = iter(places)
        return tuple(Output(next(left)) if one is None else one for one in self.leaves)


def exported(module: nn.Module, arguments: Arguments, name: str) -> Any:
    """Give what torch.export makes of the module."""
    args, kwargs = pytree.tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, arguments)
    with quiet():
        return captured(module, args, kwargs, name)


def as_onnx(program: Any, name: str) -> Any:
    """Give the exported program as an ONNX model, with the weights and names of the module."""
    with quiet():
        proto = written(program, name)[1]
    proto.metadata_props.add(key=MODULE_KEY, value=ModuleState().to_json())  # every tensor is the module's own
    return proto
