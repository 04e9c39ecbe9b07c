"""A torch module, in the mode that it is in, as a training graph whose gradients of outputs come in.

    module  ->  torch.export  ->  ONNX  ->  build (no loss)  ->  rewrite  ->  Captured

The exported program says what the graph alone would not: which buffers change, what was detached, how inputs and
outputs are packed. What would not come out as in torch is refused here, in one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnfuse.build import build
from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import Rewritten, rewrite

from .watch import is_plain

log = logging.getLogger("bnfuse")

BATCH_NORM = nn.modules.batchnorm._BatchNorm
STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
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


def capture(
    module: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
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
        packing, own = Packing(module.forward, name), module.__dict__.get("forward")
        module.__dict__["forward"] = packing.function()
        try:
            program = exported(module, arguments, name)
        finally:
            module.__dict__.update({"forward": own})
            if own is None:
                del module.__dict__["forward"]
        facts = read(program, module, name)
        proto = as_onnx(program, name)
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
    )


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


@contextlib.contextmanager
def as_found(module: nn.Module, *, watched: bool = True) -> Iterator[None]:
    """Let the state of the random generators be as it was, and autocast off, while a module is captured.

    `watched` refuses what a graph of operators does not show of gradients.
    """
    device = next((one.device for one in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
        what_gradients_would_miss() if watched else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def what_gradients_would_miss() -> Iterator[None]:
    """Refuse what a graph of operators does not show: gradients that a function of its own or a hook gives.

    Other threads go on as they did.
    """
    here = threading.get_ident()

    def refusing(kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return own(self, *args, **kwargs)
            what = getattr(self, "__name__", type(self).__name__)
            raise BnfuseError(f"{kind.format(what)} has a gradient that is not that of its operators")

        return call

    function, tensor = torch.autograd.Function, torch.Tensor
    apply, hook = function.__dict__["apply"], tensor.register_hook
    function.apply = classmethod(  # type: ignore[assignment, method-assign]
        refusing("the autograd.Function '{}'", apply.__func__)
    )
    tensor.register_hook = refusing("a tensor with a hook ('{}.register_hook')", hook)  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.apply, tensor.register_hook = apply, hook  # type: ignore[method-assign]


@contextlib.contextmanager
def with_parameters(module: nn.Module) -> Iterator[None]:
    """Let tensors that stand in the place of parameters (torch.func.functional_call) be parameters while a module is
    captured."""
    tables: list[dict[str, Any]] = [one._parameters for one in module.modules()]
    odd = [
        (table, key, tensor)
        for table in tables
        for key, tensor in table.items()
        if tensor is not None and not isinstance(tensor, nn.Parameter)
    ]
    try:
        for table, key, tensor in odd:
            table[key] = nn.Parameter(tensor.detach(), tensor.requires_grad)
        yield
    finally:
        for table, key, tensor in odd:
            table[key] = tensor


@contextlib.contextmanager
def cumulative_momentum(module: nn.Module) -> Iterator[set[str]]:
    """Let BatchNorms with momentum=None be captured as giving the statistics of the batch. Gives the names of theirs.

    The mean over all batches is made of them, and of the count, after each forward.
    """
    found = [(key, one) for key, one in module.named_modules() if isinstance(one, BATCH_NORM) and one.momentum is None]
    try:
        for _, norm in found:
            norm.momentum = 1.0
        yield {f"{key}.{what}" if key else what for key, _ in found for what in STATISTICS}
    finally:
        for _, norm in found:
            norm.momentum = None


class Packing:
    """A forward that gives the tensors among its results alone, and keeps how they were packed."""

    def __init__(self, forward: Callable[..., Any], name: str) -> None:
        self.forward, self.name = forward, name
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
        leaves, self.packed = pytree.tree_flatten(self.forward(*args, **kwargs))
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


def exported(module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], name: str) -> Any:
    """Give what torch.export makes of the module."""
    positional, named = arguments
    detached = pytree.tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, (positional, named))
    try:
        with quiet():
            return torch.export.export(module, detached[0], detached[1], strict=False)
    except BnfuseError as error:
        raise BnfuseError(f"{name}: {error}") from None
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, BnfuseError):
            raise BnfuseError(f"{name}: {cause}") from None
        raise BnfuseError(f"{name}: torch.export cannot capture it: {first_line(error)}") from error


def as_onnx(program: Any, name: str) -> Any:
    """Give the exported program as an ONNX model, with the weights and names of the module."""
    try:
        with quiet():
            found: Any = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
    except Exception as error:
        cause = error.__cause__ or error
        raise BnfuseError(f"{name}: torch.onnx.export cannot write it: {first_line(cause)}") from error
    return found.model_proto


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what exporters print and warn of: what counts is looked at here."""
    loggers = [logging.getLogger(each) for each in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


# -- what the exported program says ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an exported program says beside its graph."""

    inputs: tuple[str, ...]  # placeholders of the tensors of a call
    results: tuple[str, ...]  # of the graph, each once
    places: tuple[int, ...]  # which result each tensor that comes out is
    parameters: frozenset[str]
    buffers: frozenset[str]
    operands: frozenset[str]  # parameters and buffers that something reads
    trains_norms: bool
    counts: dict[str, int]
    reached: tuple[frozenset[str | int], ...]


def read(program: Any, module: nn.Module, name: str) -> Facts:
    """Read the facts. Raises BnfuseError where the module does what a fused one would not."""
    graph, signature = program.graph, program.graph_signature
    refuse_constants(program, name)
    refuse_detached(graph, signature, name)
    inputs = tuple(
        spec.arg.name
        for spec in signature.input_specs
        if spec.kind.name == "USER_INPUT" and type(spec.arg).__name__ == "TensorArgument"
    )
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    results: dict[str, int] = {}
    returned: list[int] = []
    nodes = {node.name: node for node in graph.nodes}
    for spec in signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            continue
        node = nodes[spec.arg.name]
        kind = node.meta["val"].dtype
        if node.op == "placeholder" or kind != torch.float32:
            what = "an input or a parameter as it is" if node.op == "placeholder" else f"a tensor of {kind}"
            raise BnfuseError(f"{name}: returns {what} ('{node.name}'): results are float32 and computed")
        returned.append(results.setdefault(node.name, len(results)))
    known = {node.name for node in graph.nodes if node.op == "placeholder" and node.users}
    places = {key: place for place, key in enumerate(inputs)}
    return Facts(
        inputs=inputs,
        results=tuple(results),
        places=tuple(returned),
        parameters=frozenset(key for key, _ in module.named_parameters(remove_duplicate=False)),
        buffers=frozenset(key for key, _ in module.named_buffers(remove_duplicate=False)),
        operands=frozenset(targets[key] for key in known if key in targets),
        trains_norms=any(is_training_norm(node) for node in graph.nodes),
        counts=counts_of(program, module, name),
        reached=tuple(reach(nodes[key], signature.inputs_to_parameters, places) for key in results),
    )


def refuse_constants(program: Any, name: str) -> None:
    """Refuse tensors that are attributes of the module, neither parameters nor buffers, where they have gradients."""
    for key, tensor in program.constants.items():
        if isinstance(tensor, torch.Tensor) and (tensor.requires_grad or tensor.grad_fn is not None):
            raise BnfuseError(
                f"{name}: '{key}' is a tensor with a gradient, and no parameter: make it an nn.Parameter, or "
                "compute it in forward"
            )


def refuse_detached(graph: Any, signature: Any, name: str) -> None:
    """Refuse what stops gradients: it leaves no trace in a graph of operators."""
    outer = {*signature.inputs_to_parameters, *signature.user_inputs}
    follows = {node for node in graph.nodes if node.op == "placeholder" and node.name in outer}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        target = str(node.target)
        reached = follows.intersection(node.all_input_nodes)
        if "set_grad_enabled" in target or (reached and "detach" in target):
            what = "turns gradients off (torch.no_grad)" if "set_grad" in target else "detaches a tensor"
            raise BnfuseError(f"{name}: {what}{where(node)}: a fused module has the gradients of all that it computes")
        if reached:
            follows.add(node)


def where(node: Any) -> str:
    """Say in which submodule a node was made, where that is known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return f" in '{path}'" if path else ""


def is_training_norm(node: Any) -> bool:
    """Tell whether a node normalises by the statistics of the batch, and is a BatchNorm."""
    target = str(node.target)
    if "batch_norm" not in target or node.op != "call_function":
        return False
    if "legit" in target or "native" in target:
        return "no_training" not in target and any(argument is True for argument in node.args[5:6])
    return any(argument is True for argument in node.args[5:6])


def counts_of(program: Any, module: nn.Module, name: str) -> dict[str, int]:
    """Give by how much each forward counts BatchNorms' batches up. Raises where anything else of the module, or an
    input, is changed in place."""
    norms = {key: one for key, one in module.named_modules(remove_duplicate=False) if isinstance(one, BATCH_NORM)}
    own = {f"{key}.{COUNT}".lstrip(".") for key in norms}
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    roots: dict[Any, Any] = {}
    found: dict[str, int] = {}
    for node in program.graph.nodes:
        roots[node] = aliased(node, roots)
        root = roots[node] if is_in_place(node) else None
        if root is None or root.op != "placeholder":
            continue
        target = targets.get(root.name)
        if target not in own:
            what = f"'{target}'" if target else "its input"
            raise BnfuseError(f"{name}: its forward changes {what} in place{where(node)}, which a fused one would not")
        if "add_" not in str(node.target) or node.args[1] != 1:
            raise BnfuseError(f"{name}: counts the batches of a BatchNorm by '{node.target}', and not one by one")
        found[target] = found.get(target, 0) + 1
    return found


def is_in_place(node: Any) -> bool:
    """Tell whether a node writes to its first operand."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)


def aliased(node: Any, roots: Mapping[Any, Any]) -> Any:
    """Give the node whose memory a node's result is: its own, or that of what it is a view of."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    if node.op == "call_function" and returns and returns[0].alias_info is not None and node.all_input_nodes:
        return roots.get(node.all_input_nodes[0], node)
    return node


def reach(result: Any, parameters: Mapping[str, str], places: Mapping[str, int]) -> frozenset[str | int]:
    """List the parameters and inputs that a result is computed of."""
    pending, seen = [result], {result}
    found: set[str | int] = set()
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            if node.name in parameters:
                found.add(parameters[node.name])
            elif node.name in places:
                found.add(places[node.name])
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return frozenset(found)
