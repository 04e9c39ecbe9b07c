"""`torch.compile(model, backend="bnfuse")`: each graph that dynamo cuts out of a model runs as a fused step.

    graph(parameters, buffers, inputs, sizes)   ->   a module with those parameters and buffers, called with the inputs
                                                ->   fused, as `bnfuse.torch.fuse` does it

dynamo hands all tensors of a model in as inputs of the graph, and says in the source of each where it comes from. A
graph that cannot be fused, or that has nothing to fuse, is torch's, and one line of logging says why.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.passes.pipeline import passes_of

from .engine import Engine, Options, Programs
from .shell import FusedModule, shell

log = logging.getLogger("bnfuse")

OPTIONS = ("level", "precision", "threads", "cache", "fallback")
OF_GRAPHS = frozenset({"graph", "layout", "holders", "numbers"})  # of a Graph: `Compiled` has its own of each
STATE = re.compile(
    r"(?P<root>.*?)(?P<path>(\._modules\['[^']*'\])*)\._(?P<table>parameters|buffers)\['(?P<leaf>[^']*)'\]"
)
SIZE = re.compile(r"(?P<tensor>.*)\.size\(\)\[(?P<axis>\d+)\]")


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter or buffer of the model: its place among the inputs of the graph, and where it belongs."""

    place: int
    path: tuple[str, ...]
    name: str
    is_parameter: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the inputs of a graph are, by their places: state, tensors of the call, and sizes of those.

    `sizes` has for the place of a size the tensor (by its place) and the axis that it is of. `numbers` are the places
    of numbers that may be others in a later call (with dynamic=True a norm's momentum).
    """

    state: tuple[Held, ...]
    inputs: tuple[int, ...]
    sizes: Mapping[int, tuple[int, int]]
    numbers: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many inputs the graph has."""
        return len(self.state) + len(self.inputs) + len(self.sizes) + len(self.numbers)


@dataclasses.dataclass(frozen=True)
class Number:
    """A number in the place of a tensor that dynamo has for it: a graph takes it out before anything else."""

    value: float

    def item(self) -> float:
        """Give the number."""
        return self.value


class Graph(nn.Module):
    """A graph as a module: the state among its inputs in modules by the names that the model has for them."""

    graph: Callable[..., Any]
    layout: Layout
    holders: list[tuple[nn.Module, Held]]
    numbers: list[Number]

    def __init__(
        self, graph: Callable[..., Any], layout: Layout, state: Sequence[torch.Tensor], numbers: Sequence[float]
    ) -> None:
        super().__init__()
        self.__dict__["numbers"] = list(map(Number, numbers))
        self.__dict__["graph"] = graph  # no submodule: it has no state
        self.__dict__["layout"] = layout
        holders: list[tuple[nn.Module, Held]] = []
        norms = {held.path for held in layout.state if held.name in ("running_mean", "running_var")}
        for held, tensor in zip(layout.state, state, strict=True):
            holder = self._holder(held.path, norms)
            if held.is_parameter:
                assert isinstance(tensor, nn.Parameter), held.name  # layout_of saw to it, dynamo guards the type
                holder.register_parameter(held.name, tensor)
            else:
                holder.register_buffer(held.name, tensor)
            holders.append((holder, held))
        self.__dict__["holders"] = holders

    def take(self, state: Sequence[torch.Tensor | None]) -> None:
        """Let this be the state, in the order of the layout; None where there is none."""
        for (holder, held), tensor in zip(self.holders, state, strict=True):
            table: dict[str, Any] = holder._parameters if held.is_parameter else holder._buffers
            table[held.name] = tensor

    def _holder(self, path: tuple[str, ...], norms: set[tuple[str, ...]]) -> nn.Module:
        module: nn.Module = self
        for index, name in enumerate(path):
            if name not in module._modules:
                module.add_module(name, batch_norm() if path[: index + 1] in norms else nn.Module())
            module = module._modules[name]  # type: ignore[assignment]
        return module

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Call the graph with the state as it is here."""
        layout = self.layout
        given: list[Any] = [None] * layout.count
        for holder, held in self.holders:
            given[held.place] = getattr(holder, held.name)
        for place, tensor in zip(layout.inputs, inputs, strict=True):
            given[place] = tensor
        for place, (tensor_place, axis) in layout.sizes.items():
            given[place] = given[tensor_place].shape[axis]
        for place, number in zip(layout.numbers, self.numbers, strict=True):
            given[place] = number
        return self.graph(*given)


def batch_norm() -> nn.Module:
    """Make a BatchNorm that only holds its state: a capture knows by its class whose statistics may move."""
    made = nn.BatchNorm2d(1, affine=False, track_running_stats=False)
    made._buffers.clear()
    made._parameters.clear()
    return made


class Compiled:
    """What dynamo calls in the place of a graph. It outlives the models, whose state it holds during a call alone."""

    def __init__(self, graph: torch.fx.GraphModule, layout: Layout, options: Options) -> None:
        self.graph, self.layout, self.options = graph, layout, options
        self.programs: dict[tuple[float, ...], Programs] = {}  # by the numbers among the inputs
        self.fused: dict[tuple[float, ...], tuple[Graph, FusedModule]] = {}  # by those; models share a graph
        self.lock = threading.RLock()

    def __call__(self, *given: Any) -> Any:
        """Run the graph. The engine leaves single calls to torch, where it must."""
        with self.lock:
            graph, fused = self.module(given)
            try:
                return fused(*(given[place] for place in self.layout.inputs))
            finally:
                graph.take([None] * len(self.layout.state))

    def module(self, given: Sequence[Any]) -> tuple[Graph, FusedModule]:
        """Give the graph as a module, and that fused, with the state in these inputs."""
        state = [given[held.place] for held in self.layout.state]
        numbers = tuple(float(given[place]) for place in self.layout.numbers)
        if numbers not in self.fused:
            graph = Graph(self.graph.forward, self.layout, state, numbers)
            made = shell(graph)
            engine = Engine(made, None, self.options, self.programs.setdefault(numbers, Programs()))
            engine.name = name_of(self.graph)
            made.__dict__["_bnfuse"] = engine
            self.fused[numbers] = graph, made
        graph, made = self.fused[numbers]
        graph.take(state)
        return graph, made


def backend(
    graph: torch.fx.GraphModule,
    example: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph for dynamo: `torch.compile(model, backend="bnfuse", options={"precision": "bf16"})`.

    `options` are those of `bnfuse.torch.fuse`: level, precision, threads, cache, and fallback ("torch", the default
    here, or "error"). Raises BnfuseError for others, and for a `mode`, which is inductor's.
    """
    chosen = options_of(mode, options or {})
    try:
        layout = layout_of(graph, example)
    except BnfuseError as error:
        if chosen.fallback == "error":
            raise
        log.warning("%s is left to torch: %s", name_of(graph), error)
        return graph.forward
    if not any(node.op == "call_function" and is_worth(node) for node in graph.graph.nodes):
        log.info("%s has nothing to fuse, and is torch's", name_of(graph))
        return graph.forward
    return Compiled(graph, layout, chosen)


def options_of(mode: str | None, options: Mapping[str, Any]) -> Options:
    """Check what torch.compile was given besides."""
    if mode not in (None, "default"):
        raise BnfuseError(f"torch.compile(mode='{mode}') is inductor's: the backend bnfuse has options= alone")
    unknown = sorted(options.keys() - {*OPTIONS})
    if unknown:
        raise BnfuseError(
            f"torch.compile: the backend bnfuse has no option '{unknown[0]}': it has {', '.join(OPTIONS)}"
        )
    found: dict[str, Any] = {"level": "icf", "fallback": "torch", "precision": None, "threads": None, "cache": True}
    found.update(options)
    passes_of(found["level"], pool_first=False)  # raises for a level that there is not
    return Options(**found, ignored=OF_GRAPHS)


def layout_of(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Layout:
    """Tell what the inputs of a graph are. Raises BnfuseError for a graph with other inputs or results than tensors."""
    if any(True for _ in graph.parameters()) or any(True for _ in graph.buffers()):
        raise BnfuseError(
            "the graph holds its parameters itself (torch._dynamo.config.inline_inbuilt_nn_modules is off)"
        )
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sources = [source_of(node) for node in places]
    by_source = {source: place for place, source in enumerate(sources) if source}
    state, inputs, sizes, numbers = [], [], {}, []
    roots: dict[str, str] = {}
    for place, (given, source) in enumerate(zip(example, sources, strict=True)):
        if (found := STATE.fullmatch(source)) and isinstance(given, torch.Tensor):
            root = roots.setdefault(found["root"], f"model{len(roots) or ''}")
            path = (root, *re.findall(r"\._modules\['([^']*)'\]", found["path"]))
            if found["table"] == "parameters" and not isinstance(given, nn.Parameter):
                raise BnfuseError(f"its parameter '{found['leaf']}' is a {type(given).__name__}")
            state.append(Held(place, path, found["leaf"], found["table"] == "parameters"))
        elif isinstance(given, nn.Parameter) and not source:
            raise BnfuseError(
                f"it is a part of a graph, and does not say whose parameter '{places[place].name}' is: compile the "
                "model, and wrap what is compiled in DistributedDataParallel"
            )
        elif isinstance(given, torch.Tensor) and is_number(places[place], given):
            numbers.append(place)
        elif isinstance(given, torch.Tensor):
            inputs.append(place)
        elif (found := SIZE.fullmatch(source)) and found["tensor"] in by_source:
            sizes[place] = by_source[found["tensor"]], int(found["axis"])
        else:
            raise BnfuseError(f"it takes '{source or places[place].name}', a {type(given).__name__}, and no tensor")
    results = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    for result in results:
        if not isinstance(getattr(result, "meta", {}).get("example_value"), torch.Tensor):
            raise BnfuseError(f"it gives '{result}', which is no tensor")
    return Layout(tuple(state), tuple(inputs), sizes, tuple(numbers))


def is_number(node: Any, given: torch.Tensor) -> bool:
    """Tell whether an input is a number of Python's that dynamo made a tensor: all that is done is to take it out."""
    taken = all(user.op == "call_method" and user.target == "item" for user in node.users)
    return given.dtype == torch.float64 and given.dim() == 0 and bool(node.users) and taken


def source_of(node: Any) -> str:
    """Write where dynamo found an input of a graph: L['self']._modules['conv']._parameters['weight']."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    try:
        name = source.name
        return str(name() if callable(name) else name)
    except Exception as error:  # sources of other kinds have no name
        log.debug("torch.compile: '%s' has no source: %s", node.name, first_line(error))
        return ""


def is_worth(node: Any) -> bool:
    """Tell whether an operator is a convolution, a product or a norm, in front of or behind which something fuses."""
    name = getattr(node.target, "__name__", str(node.target))
    return any(part in name for part in ("conv", "norm"))


def name_of(graph: torch.fx.GraphModule) -> str:
    """Name a graph as messages do."""
    count = sum(node.op not in ("placeholder", "output", "get_attr") for node in graph.graph.nodes)
    return f"torch.compile: a graph of {count} operators"
