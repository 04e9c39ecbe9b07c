"""Which program runs a call: by the modes of the modules, what trains, the inputs, autocast and the device."""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.targets.arch import CPU_PRECISIONS, PRECISIONS

from . import chain
from .call import Fused
from .capture import Arguments, Captured, capture, traits_of
from .program import Call, Compiling, Program
from .reports import Part, Report
from .shell import FusedModule, plain
from .watch import Attributes, Watch, content, is_plain

log = logging.getLogger("bnfuse")

DEVICE = operator.attrgetter("device")
PIECES = 4  # of backward, where there are several processes
MOST_CHANGES = 8  # of attributes, each captured anew: then it is one that changes all the time


@dataclasses.dataclass(frozen=True)
class Options:
    """What `fuse` was asked for."""

    level: str
    fallback: str
    precision: str | None
    threads: int | None
    cache: bool | str | Path
    ignored: frozenset[str]
    pieces: int | None = None

    def __post_init__(self) -> None:
        """Refuse words that there are not: a precision that is unknown here would be float32 on a CPU."""
        if self.fallback not in ("error", "torch"):
            raise BnfuseError(f"fallback '{self.fallback}' is unknown: it is error or torch")
        if self.precision not in (None, *PRECISIONS):
            raise BnfuseError(f"there is no precision '{self.precision}': there is {', '.join(PRECISIONS)}")


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor of a call, as far as a program depends on it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiated: bool


@dataclasses.dataclass(frozen=True)
class Key:
    """What a program is made for."""

    modes: tuple[bool, ...]
    flags: tuple[bool, ...]  # which parameters train; none where no gradients are wanted
    gradients: bool
    attributes: Attributes
    packed: str  # how the tensors of the call are packed, with what else was given
    inputs: tuple[Input, ...]
    device: str
    autocast: torch.dtype | None
    baked: tuple[tuple[str, Any], ...] = ()  # values of the module's tensors that are constants of the program

    def at(self, batch: int) -> Key:
        """Give the same for another batch size."""
        inputs = tuple(dataclasses.replace(one, shape=(batch, *one.shape[1:])) for one in self.inputs)
        return dataclasses.replace(self, inputs=inputs)


@dataclasses.dataclass
class Entry:
    """A program, and the types of its results under autocast."""

    program: Program
    dtypes: tuple[torch.dtype, ...] | None = None


class Programs:
    """The programs of a module and of its copies, by what they are for."""

    def __init__(self) -> None:
        self.entries: dict[Key, Entry] = {}
        self.lock = threading.RLock()
        self.baked: dict[Key, tuple[str, ...]] = {}  # which tensors are constants, by keys without their values
        self.parts: dict[str, Part] = {}
        self.changes = 0
        self.refused: dict[Key, str] = {}  # what cannot be captured, and why
        self.told: set[str] = set()  # why calls were left to torch


class Engine:
    """What a fused module calls."""

    def __init__(
        self,
        fused: FusedModule,
        own_forward: Any,
        options: Options,
        programs: Programs | None = None,
    ) -> None:
        self.fused, self.own_forward, self.options = fused, own_forward, options
        self.name = type(fused).__name__  # what messages call the module
        self.programs = programs or Programs()
        self.watch = Watch(fused, options.ignored)

    @property
    def report(self) -> Report:
        """What is fused."""
        return Report(tuple(self.programs.parts.values()))

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for a call, without running it."""
        tensors, packed = self.unpacked(args, kwargs)
        self.refuse(tensors)
        state = self.watch.tensors()
        program = self.entry(self.key(tensors, packed, state), (args, kwargs)).program
        place = program.place_for(state)
        place.enter(state, place.elsewhere(state), adopts=True)

    # -- a call --------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward."""
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # by an exporter, which wants the operators
            return plain(self.fused, self.own_forward).forward(*args, **kwargs)
        try:
            tensors, packed = self.unpacked(args, kwargs)
            self.refuse(tensors)
            self.follow()
            state = self.watch.tensors()
            key = self.key(tensors, packed, state)
            entry = self.programs.entries.get(key) or self.entry(key, (args, kwargs))
        except BnfuseError as error:
            if self.options.fallback == "error":
                raise
            return self.left(str(error), args, kwargs)
        return self.run(entry, key, tensors, state)

    def left(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let torch run a call, and say why."""
        if reason not in self.programs.told:
            self.programs.told.add(reason)
            log.warning("%s: a call is left to torch: %s", self.name, reason)
        return plain(self.fused, self.own_forward).forward(*args, **kwargs)

    def run(self, entry: Entry, key: Key, tensors: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> Any:
        """Run a program, as one node of autograd where gradients are wanted."""
        program, captured = entry.program, entry.program.captured
        seed = int(torch.randint(2**31 - 1, ()).item()) if program.draws else 0
        call = Call(0, seed, state, tuple(tensors))
        if key.gradients:
            trained = [state[name] for name in captured.trainable]
            if (count := self.options.pieces or pieces_by_default()) > 1:
                results = chain.run(program, call, captured.kept, count)
            else:
                results = Fused.apply(program, call, captured.kept, *tensors, *trained)
        else:
            with torch.no_grad():
                results = program.run(call)
        return self.packed(captured, results, entry.dtypes)

    def unpacked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], str]:
        """Take the tensors out of the arguments, and say how they were packed and what else there was."""
        if not kwargs and all(isinstance(one, torch.Tensor) for one in args):
            return list(args), str(len(args))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        rest = [None if isinstance(one, torch.Tensor) else one for one in leaves]
        odd = next((one for one in rest if not is_plain(one)), None)
        if odd is not None:
            raise BnfuseError(
                f"{self.name}: takes an argument of type {type(odd).__name__}: tensors, numbers, texts, and tuples, "
                "lists and dicts of them can be captured"
            )
        return tensors, f"{spec} {rest}"

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise for what a fused forward cannot honour."""
        self.watch.refuse_hooks()
        if torch._C._functorch.maybe_current_level() is not None:
            raise BnfuseError(
                f"{self.name}: torch.func and vmap transform operators one by one: a fused module is one node. "
                "Give them the module itself"
            )
        if torch.autograd.forward_ad._current_level >= 0:
            raise BnfuseError(f"{self.name}: a fused module has no forward-mode derivative")
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                raise BnfuseError(f"{self.name}: takes a {type(tensor).__name__}: plain tensors can be captured")
            if tensor.layout != torch.strided or not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise BnfuseError(f"{self.name}: takes a tensor of {kind}: dense ones of floats can be captured")
            if not tensor.numel():
                raise BnfuseError(
                    f"{self.name}: takes an empty tensor {list(tensor.shape)}: nothing here computes with it"
                )

    def follow(self) -> None:
        """Look at the tree of modules; where it has other parts than before, begin anew."""
        if self.watch.is_whole():
            return
        log.info("%s: has other parts than when it was captured: captured anew", self.name)
        self.watch = Watch(self.fused, self.options.ignored)
        self.watch.refuse_hooks()
        self.programs = Programs()

    def key(self, tensors: Sequence[torch.Tensor], packed: str, state: Mapping[str, torch.Tensor]) -> Key:
        """Say what a program for this call has to be made for. `state` has the module's tensors."""
        flags, enabled = self.watch.flags(), torch.is_grad_enabled()
        inputs = tuple([Input(tuple(one.shape), one.dtype, enabled and one.requires_grad) for one in tensors])
        gradients = enabled and (any(flags) or any(one.differentiated for one in inputs))
        device = self.device((*state.values(), *tensors))
        kind = device.partition(":")[0]
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = Key(
            self.watch.modes(),
            flags if gradients else (),
            gradients,
            self.watch.attributes(),
            packed,
            inputs,
            device,
            autocast,
        )
        names = self.programs.baked.get(key) if self.programs.baked else None
        return dataclasses.replace(key, baked=self.values(names)) if names else key

    def values(self, names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
        """Give the values of tensors of the module, as they can be compared."""
        found = [(name, self.watch.names[name]) for name in names]
        return tuple([(name, content(held[key])) for name, (held, key) in found])

    def device(self, tensors: Sequence[torch.Tensor]) -> str:
        """Name the device of parameters, buffers and inputs, which is one."""
        places = sorted(map(str, {*map(DEVICE, tensors)}))
        if len(places) != 1 or places[0].partition(":")[0] not in ("cpu", "cuda"):
            where = ", ".join(places)
            raise BnfuseError(f"{self.name}: its tensors and inputs lie on {where}: one CPU or one GPU it must be")
        return places[0]

    def packed(
        self, captured: Captured, results: Sequence[torch.Tensor], dtypes: tuple[torch.dtype, ...] | None
    ) -> Any:
        """Pack the results as the module does."""
        if dtypes is not None:
            results = [one.to(kind) for one, kind in zip(results, dtypes, strict=True)]
        leaves = [one.constant if one.place is None else results[one.place] for one in captured.outputs]
        return pytree.tree_unflatten(leaves, captured.packed)

    # -- programs ------------------------------------------------------------------------------------------------

    def entry(self, key: Key, arguments: Arguments) -> Entry:
        """Find or make the program for a call."""
        with self.programs.lock:
            if key in self.programs.entries:
                return self.programs.entries[key]
            if key in self.programs.refused:
                raise BnfuseError(self.programs.refused[key])
            self.check_changes(key)
            try:
                entry = self.at_other_batch(key, arguments) or self.made(key, arguments)
            except BnfuseError as error:
                self.programs.refused[key] = str(error)
                raise
            if baked := entry.program.captured.baked:
                key = dataclasses.replace(key, baked=())
                self.programs.baked[key] = baked
                key = dataclasses.replace(key, baked=self.values(baked))
            self.programs.entries[key] = entry
            return entry

    def check_changes(self, key: Key) -> None:
        """Raise where an attribute changes again and again, each time with a program of its own."""
        last = next(reversed(self.programs.entries), None)
        if last is None:
            return
        what = self.other_constant(key)
        if what is None:
            if any(other.attributes == key.attributes for other in self.programs.entries):
                return
            what = self.watch.changed(last.attributes, key.attributes)
        self.programs.changes += 1
        log.info("%s: '%s' is another than when it was captured: captured anew", self.name, what)
        if self.programs.changes > MOST_CHANGES and what in self.watch.names:
            raise BnfuseError(
                f"{self.name}: '{what}' changes all the time, and is a constant of what was captured: make it an "
                "argument of forward"
            )
        if self.programs.changes > MOST_CHANGES:
            raise BnfuseError(
                f"{self.name}: '{what}' changes all the time, and each value is captured anew: if its forward does not "
                f"depend on it, say so: fuse(..., ignore=('{what}',))"
            )

    def other_constant(self, key: Key) -> str | None:
        """Name the tensor whose value is another than in the last program that is this one but for such values."""
        bare = dataclasses.replace(key, baked=())
        for other in reversed(self.programs.entries) if key.baked else ():
            if dataclasses.replace(other, baked=()) == bare:
                return next(name for (name, was), (_, now) in zip(other.baked, key.baked, strict=True) if was != now)
        return None

    def at_other_batch(self, key: Key, arguments: Arguments) -> Entry | None:
        """Compile a program that there is for another batch size too; None where none can be."""
        if not key.inputs or not key.inputs[0].shape:
            return None
        batch = key.inputs[0].shape[0]
        bare = dataclasses.replace(key, baked=())
        for other, entry in self.programs.entries.items():
            if not other.inputs[0].shape or dataclasses.replace(other.at(batch), baked=()) != bare:
                continue
            if other.baked != self.values([name for name, _ in other.baked]):
                continue
            begun = time.perf_counter()
            if traits_of(plain(self.fused, self.own_forward), arguments, self.name) != entry.program.captured.traits:
                log.info("%s: captured anew for a batch of %d, which its forward computes by", self.name, batch)
                continue
            try:
                entry.program.add(batch)
            except BnfuseError as error:
                log.info("%s: captured anew for a batch of %d: %s", self.name, batch, error)
                return None
            log.info("%s: compiled for a batch of %d in %.1f s", self.name, batch, time.perf_counter() - begun)
            return entry
        return None

    def made(self, key: Key, arguments: Arguments) -> Entry:
        """Capture and compile."""
        begun = time.perf_counter()
        module = plain(self.fused, self.own_forward)
        captured = capture(
            module,
            arguments,
            gradients=key.gradients,
            wanted_inputs=[place for place, one in enumerate(key.inputs) if one.differentiated],
            level=self.options.level,
            name=self.name,
        )
        on_gpu = key.device.startswith("cuda")
        compiling = Compiling(
            "cuda" if on_gpu else "cpu",
            precision_of(key.autocast, self.options.precision, on_gpu),
            None if on_gpu else self.options.threads or torch.get_num_threads(),
            self.options.cache,
        )
        program = Program(captured, compiling)
        if any(key.modes) or "" not in self.programs.parts:  # that of training, where there is one
            self.programs.parts[""] = Part("", captured.rewritten.report)
        log.info(
            "%s: captured and compiled in %.1f s (%s, inputs %s)",
            self.name,
            time.perf_counter() - begun,
            "training" if any(key.modes) else "evaluation",
            ", ".join(str(list(one.shape)) for one in key.inputs),
        )
        dtypes = None if key.autocast is None else autocast_types(module, arguments, key, captured)
        return Entry(program, dtypes)


def pieces_by_default() -> int:
    """Say into how many pieces backward is cut: several where processes average their gradients meanwhile."""
    distributed = torch.distributed
    many = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return PIECES if many else 1


def precision_of(autocast: torch.dtype | None, wanted: str | None, on_gpu: bool) -> str | None:
    """Name the precision: autocast's, or else what `fuse` was given; float32 where a CPU has not got that."""
    named = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    chosen = wanted if autocast is None else named.get(autocast, wanted)
    return chosen if on_gpu or chosen in CPU_PRECISIONS else None


def autocast_types(module: nn.Module, arguments: Arguments, key: Key, captured: Captured) -> tuple[torch.dtype, ...]:
    """Tell in which types torch gives the results under autocast: the module runs on tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, kind = FakeTensorMode(), key.device.partition(":")[0]
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state, (args, kwargs) = pytree.tree_map(
        lambda one: mode.from_tensor(one.detach()) if isinstance(one, torch.Tensor) else one, (named, arguments)
    )
    with mode, torch.no_grad(), torch.autocast(kind, dtype=key.autocast):
        found = torch.func.functional_call(module, state, args, kwargs)
    leaves = pytree.tree_leaves(found)
    types = {out.place: leaf.dtype for out, leaf in zip(captured.outputs, leaves, strict=True) if out.place is not None}
    return tuple(types[place] for place in range(len(captured.results)))
