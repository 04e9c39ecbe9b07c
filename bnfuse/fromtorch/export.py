"""A torch module as a forward ONNX graph, in memory: weights, statistics and names as they are, the module unchanged.

    model = exported(module, images)     # onnx.ModelProto, for `bnfuse.build.build(model)`

What the graph cannot say is in its metadata entry `bnfuse.module` (bnfuse/graph/module_state.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from bnfuse.core.errors import BnfuseError, first_line, one_line
from bnfuse.graph.module_state import COUNT, MODULE_KEY, ModuleState

from .batch_constants import traits
from .faithful import check_module, check_program, check_updates, own_gradients_refused
from .names import written as named_apart
from .seeding import undrawn

log = logging.getLogger("bnfuse")

OLDEST = (2, 7)  # of torch: the extra `torch` in pyproject.toml asks for the same
WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}


def is_module(source: Any) -> bool:
    """Tell whether something is a torch module, or a program that torch exported; without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module | torch.export.ExportedProgram)


def unwrapped(module: Any) -> Any:
    """Give the module inside DistributedDataParallel, DataParallel and what torch.compile made."""
    while (inner := WRAPPERS.get(type(module).__name__)) is not None and hasattr(module, inner):
        module = getattr(module, inner)
    return module


def exported(module: Any, example: Any = None, *, name: str | None = None) -> onnx.ModelProto:
    """Export a torch module, in the mode that it is in, or an ExportedProgram.

    `example` is what a call of the module takes: a tensor, a sequence of arguments, or a mapping of keyword arguments;
    an ExportedProgram has its own. Shapes of the graph are those of the example. `name` is what messages call the
    module. Parameters, buffers, modes and the states of all random generators are afterwards what they were before.

    Raises BnfuseError where torch or onnxscript is not installed, where torch cannot export the module, and where its
    forward draws random numbers outside of torch, which would be constants of the graph.
    """
    torch = require_torch()
    module = unwrapped(module)
    name = name or type(module).__name__
    before = versions(module)
    fixed = ""
    with quiet(), undisturbed(torch, name):
        if isinstance(module, torch.export.ExportedProgram):
            program = module
        else:
            check_module(module, name)
            with own_gradients_refused(torch):
                program = captured(module, *arguments_of(example), name)
            fixed = fixed_batch(torch, module, example, program)
        check_program(program, name)
        written, model = as_onnx(program, name, output_names(program))
    if versions(module) != before:
        raise BnfuseError(f"{name}: its forward changes a tensor of the module that torch.export does not follow")
    check_updates(written.exported_program, model, name)
    model.metadata_props.add(
        key=MODULE_KEY,
        value=dataclasses.replace(state_of(module, model, counts_of(program)), fixed_batch=fixed).to_json(),
    )
    return model


def captured(module: Any, args: tuple[Any, ...], keywords: dict[str, Any], name: str) -> Any:
    """Give the program that torch.export makes of a module that is called with these arguments. Raises BnfuseError,
    which begins with `name`, where it cannot."""
    import torch

    try:
        return torch.export.export(module, args, keywords, strict=False)
    except BnfuseError as error:
        raise BnfuseError(f"{name}: {error}") from None
    except Exception as error:
        if isinstance(error.__cause__, BnfuseError):
            raise BnfuseError(f"{name}: {error.__cause__}") from None
        raise BnfuseError(f"{name}: torch.export cannot capture it: {root_of(error)}") from error


def as_onnx(program: Any, name: str, outputs: list[str] | None = None) -> tuple[Any, onnx.ModelProto]:
    """Give what torch.onnx.export makes of a program, and that as a model with the names of the module and each name
    once. Raises BnfuseError, which begins with `name`, where it cannot."""
    import torch

    try:
        made = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False, output_names=outputs)
    except Exception as error:
        raise BnfuseError(f"{name}: torch.onnx.export cannot write it: {root_of(error)}") from error
    return made, named_apart(made, name)


def counts_of(program: Any) -> dict[str, int]:
    """Tell by how much a forward counts batches up, by the names of the counts: a BatchNorm that is called twice counts
    twice."""
    signature, found = program.graph_signature, {}
    for node in program.graph.nodes:
        target = signature.inputs_to_buffers.get(node.name, "") if node.op == "placeholder" else ""
        if target.rpartition(".")[2] == COUNT:
            found[target] = additions(node)
    return found


def additions(count: Any) -> int:
    """Count how often 1 is added to a number of a graph, in place or not."""
    added = [
        user
        for user in count.users
        if user.op == "call_function" and "aten.add" in str(user.target) and user.args == (count, 1)
    ]
    return sum(1 + additions(user) for user in added)


def fixed_batch(torch: Any, module: Any, example: Any, program: Any) -> str:
    """Tell why a graph of a module holds for the batch of its example alone; nothing where it does for others."""
    args, keywords = arguments_of(example)
    tensors = [one for one in (*args, *keywords.values()) if isinstance(one, torch.Tensor) and one.dim()]
    batch = len(tensors[0]) if tensors else 0

    def larger(one: Any) -> Any:
        grows = isinstance(one, torch.Tensor) and one.dim() and len(one) == batch
        return one.new_empty((2 * batch, *one.shape[1:])) if grows else one

    other = tuple(map(larger, args)), {key: larger(one) for key, one in keywords.items()}
    try:
        found = traits(torch.export.export(module, *other, strict=False))
    except Exception as error:
        log.debug("no program at a batch of %d: %s", 2 * batch, first_line(error))
        return f"torch cannot export the module at {2 * batch} samples"
    return "" if found == traits(program) else "its forward computes by the number of samples"


def output_names(program: Any) -> list[str] | None:
    """Give the names of the outputs of a module that returns a dict of tensors, which are its keys."""
    from torch.utils import _pytree as pytree

    spec = program.call_spec.out_spec
    leaves = list(range(spec.num_leaves))
    packed = pytree.tree_unflatten(leaves, spec)
    if not isinstance(packed, Mapping) or list(packed.values()) != leaves:
        return None
    return [str(key) for key in packed]


def require_torch() -> Any:
    """Give torch. Raises BnfuseError where it, or onnxscript, which its exporter needs, is not installed, and for a
    torch whose exporter writes other graphs than those that are read here."""
    try:
        import onnxscript  # noqa: F401
        import torch
        import torch.onnx
    except ImportError as error:
        raise BnfuseError(f"torch modules need torch and onnxscript ({error}): pip install 'bnfuse[torch]'") from None
    if release_of(torch.__version__) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BnfuseError(
            f"torch modules need torch {oldest} or newer, and torch {torch.__version__} is installed: "
            f"pip install -U 'torch>={oldest}'"
        )
    return torch


def release_of(version: str) -> tuple[int, ...]:
    """Give the first two numbers of a version: 2, 13 of "2.13.0+cpu"."""
    return tuple(int(re.match(r"\d*", part)[0] or 0) for part in version.split(".")[:2])  # type: ignore[index]


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give positional and keyword arguments of an example."""
    if example is None:
        return (), {}
    if isinstance(example, Mapping):
        return (), {name: as_tensor(value) for name, value in example.items()}
    return tuple(map(as_tensor, example if isinstance(example, tuple | list) else (example,))), {}


def as_tensor(value: Any) -> Any:
    """Give numpy's array as a tensor, and anything else as it is."""
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def root_of(error: BaseException) -> str:
    """Tell in a line what was at the root of an error of torch's exporter, which wraps it in pages of advice."""
    seen: set[int] = set()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
    return one_line(f"{type(error).__name__}: {first_line(error)}")[:400]


def versions(module: Any) -> dict[str, tuple[int, int, int]]:
    """Tell where each tensor of the module is, and how often it was written; beside it the mode of each submodule."""
    if not hasattr(module, "named_modules"):
        return {}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {name: (id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()}
    return found | {f"mode of {name}": (int(part.training), 0, 0) for name, part in module.named_modules()}


@contextlib.contextmanager
def undisturbed(torch: Any, name: str) -> Iterator[None]:
    """Keep the states of all random generators, and refuse what draws by those of Python and numpy. Autocast does not
    reach inside: its casts would be in the graph."""
    with (
        undrawn(name),
        torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let torch's exporter say nothing: that a module is in training mode is meant so, and errors are raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def state_of(module: Any, model: onnx.ModelProto, calls: Mapping[str, int]) -> ModuleState:
    """Describe the `state_dict` of a module beside its graph: tensors under several names are one tensor there. `calls`
    tells by how much a forward counts batches up."""
    read = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    known = {tensor.name for tensor in model.graph.initializer if tensor.name in read}
    tensors = state_tensors(module)
    owner: dict[int, str] = {}
    for key, tensor in tensors.items():
        if key in known:
            owner.setdefault(id(tensor), key)
    counts = {key: int(tensor) for key, tensor in tensors.items() if key.rpartition(".")[2] == COUNT}
    by_tensor = {id(tensors[key]): each for key, each in calls.items() if key in tensors}
    names = {key: owner[id(tensor)] for key, tensor in tensors.items() if id(tensor) in owner and key not in counts}
    return ModuleState(
        names,
        counts,
        unread=tuple(key for key in tensors if key not in names and key not in counts),
        frozen=tuple(sorted({names[key] for key in names if is_held(tensors[key])})),
        calls={key: each for key in counts if (each := by_tensor.get(id(tensors[key]), 1)) > 1},
    )


def is_held(tensor: Any) -> bool:
    """Tell whether a tensor is a parameter that is not trained."""
    return type(tensor).__name__ == "Parameter" and not tensor.requires_grad


def state_tensors(module: Any) -> dict[str, Any]:
    """Give the tensors of a state_dict themselves, each name with its own."""
    if hasattr(module, "named_modules"):
        return {key: value for key, value in module.state_dict(keep_vars=True).items() if hasattr(value, "data_ptr")}
    return dict(module.state_dict)


def batch_norm_modes(model: onnx.ModelProto) -> tuple[bool, bool]:
    """Tell whether BatchNorms of an exported graph were in training mode, and whether some were in evaluation mode: in
    the graph all of them look the same."""
    said = [
        entry.value
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        for entry in node.metadata_props
        if entry.key == "pkg.torch.onnx.fx_node"
    ]
    evaluated = sum("batch_norm_legit_no_training" in text for text in said)
    return evaluated < len(said), evaluated > 0


def as_arguments(shapes: Sequence[Any]) -> tuple[Any, ...]:
    """Make tensors of shapes: (size, ...) for float32, with a type's name in front of the sizes for another."""
    torch = require_torch()
    made = []
    for shape in shapes:
        kind = getattr(torch, shape[0]) if isinstance(shape[0], str) else torch.float32
        sizes = shape[1:] if isinstance(shape[0], str) else shape
        made.append(torch.zeros(sizes, dtype=kind))
    return tuple(made)
