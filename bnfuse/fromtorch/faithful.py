"""What a module does that a graph of its operators does not show: refused, for the graph would train it otherwise.

detach, torch.no_grad in forward          the graph has gradients of all that it computes
autograd.Function, hooks on gradients     a gradient that is not that of the operators
buffers that forward updates              other than the running statistics of BatchNorms
two parameters in one memory              which the graph trains apart
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import onnx

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.module_state import COUNT

HOOKS = ("_backward_hooks", "_backward_pre_hooks")
ALL = "a training graph has the gradients of all that it computes"


def check_module(module: Any, name: str) -> None:
    """Raise for parameters in one memory, and for hooks that change gradients."""
    found: dict[tuple[int, tuple[int, ...]], str] = {}
    for key, tensor in module.named_parameters():  # a tensor under several names is listed once
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and found.setdefault(place, key) != key:
            raise BnfuseError(
                f"{name}: parameters '{found[place]}' and '{key}' are two that share their memory: make them one "
                "(module.a.weight = module.b.weight)"
            )
        if getattr(tensor, "_backward_hooks", None):
            raise BnfuseError(f"{name}: parameter '{key}' has a hook on its gradient, which no graph has: remove it")
    for key, part in module.named_modules():
        if part.training and getattr(part, "momentum", 0) is None and "BatchNorm" in type(part).__name__:
            raise BnfuseError(
                f"{name}: '{key or name}' has momentum=None, the mean over all batches: give it a momentum"
            )
        if any(getattr(part, hooks, None) for hooks in HOOKS):
            raise BnfuseError(f"{name}: '{key or name}' has a backward hook, which no graph has: remove it")


@contextlib.contextmanager
def own_gradients_refused(torch: Any) -> Iterator[None]:
    """Raise where a forward that is traced in this context calls a function with a gradient of its own, hooks a tensor,
    or turns gradients off without a trace. Other threads go on as they did."""
    here = threading.get_ident()

    def refusing(kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return own(self, *args, **kwargs)
            what = getattr(self, "__name__", type(self).__name__)
            raise BnfuseError(f"{kind.format(what)} has a gradient that is not that of its operators")

        return call

    def entered(self: Any) -> None:
        if self.mode and threading.get_ident() == here:
            raise BnfuseError(f"turns gradients off (torch.inference_mode): {ALL}")
        enter(self)

    function, tensor, inference = torch.autograd.Function, torch.Tensor, torch.inference_mode
    apply, hook, enter = function.__dict__["apply"], tensor.register_hook, inference.__enter__
    base: Any = function.__mro__[1]  # an `apply` bound before looks for the next one up, which is to be found here
    kind = "the autograd.Function '{}'"
    function.apply = classmethod(refusing(kind, apply.__func__))
    base.apply = classmethod(refusing(kind, lambda own, *args, **kwargs: super(base, own).apply(*args, **kwargs)))
    tensor.register_hook = refusing("a tensor with a hook ('{}.register_hook')", hook)
    inference.__enter__ = entered
    try:
        yield
    finally:
        function.apply, tensor.register_hook, inference.__enter__ = apply, hook, enter
        del base.apply


def check_program(program: Any, name: str) -> None:
    """Raise where a program stops gradients, or has a tensor with a gradient that is no parameter."""
    for key, tensor in program.constants.items():
        if getattr(tensor, "requires_grad", False) or getattr(tensor, "grad_fn", None) is not None:
            raise BnfuseError(
                f"{name}: '{key}' is a tensor with a gradient, and no parameter: make it an nn.Parameter, "
                "or compute it in forward"
            )
    signature = program.graph_signature
    outer = {*signature.inputs_to_parameters, *signature.user_inputs}
    follows = {node for node in program.graph.nodes if node.op == "placeholder" and node.name in outer}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        operands = [*node.args, *([None] * 6)]
        given = any(operand is not None for operand in operands[3:5])
        if "instance_norm" in str(node.target) and given and operands[5] is True:
            raise BnfuseError(
                f"{name}: an InstanceNorm{place_of(node)} moves running statistics (track_running_stats=True), which "
                "no graph does: build it without, or put it into evaluation mode"
            )
        reached = follows.intersection(node.all_input_nodes)
        if "set_grad_enabled" in str(node.target) or (reached and "detach" in str(node.target)):
            what = "turns gradients off (torch.no_grad)" if "set_grad" in str(node.target) else "detaches a tensor"
            raise BnfuseError(f"{name}: {what}{place_of(node)}: {ALL}")
        if reached:
            follows.add(node)


def place_of(node: Any) -> str:
    """Say in which submodule a node was made, where that is known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return f" in '{path}'" if path else ""


def check_updates(program: Any, model: onnx.ModelProto, name: str) -> None:
    """Raise where a forward updates buffers that are no running statistics of a BatchNorm: the graph leaves it out."""
    statistics = {key for node in model.graph.node if node.op_type == "BatchNormalization" for key in node.input[3:5]}
    for key in program.graph_signature.buffers_to_mutate.values():
        if key not in statistics and key.rpartition(".")[2] != COUNT:
            raise BnfuseError(
                f"{name}: its forward updates buffer '{key}', which is no running statistic of a BatchNorm: a graph "
                "has no such updates. Update it in the training loop"
            )
