"""What the torch module that a training graph was made of calls its parameters and buffers.

The graph has the module's own names, but for tensors that the module has under several names (tied weights), which are
one in the graph. Besides, a module counts the batches of its BatchNorms (`num_batches_tracked`), and may have buffers
that are constants of the graph, and tensors that no result depends on. The metadata entry `bnfuse.module` tells.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping

import numpy as np

from bnfuse.core.errors import BnfuseError

MODULE_KEY = "bnfuse.module"
COUNT = "num_batches_tracked"


@dataclasses.dataclass(frozen=True)
class ModuleState:
    """The names of a module's `state_dict`, which this is about; without any nothing is known of a module."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the module -> of the graph
    tracked: Mapping[str, int] = dataclasses.field(default_factory=dict)  # how many batches BatchNorms have seen
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)  # buffers of a fixed value -> its digest
    unread: tuple[str, ...] = ()  # what the graph has not, because no result depends on it
    frozen: tuple[str, ...] = ()  # parameters, by the names of the graph, that the module does not train
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)  # BatchNorms that count up by more than 1
    fixed_batch: str = ""  # why the module's graph is of its batch alone

    @property
    def is_known(self) -> bool:
        """Tell whether the graph was made of a module whose names are known."""
        return bool(self.names)

    def within(self, variables: Collection[str], digests: Mapping[str, str]) -> ModuleState:
        """Give what holds of a graph that has these parameters and running statistics. Of what else the module has,
        `digests` has those that are constants now."""
        kept = {name: own for name, own in self.names.items() if own in variables}
        rest = {name: own for name, own in self.names.items() if own not in variables}
        constants = {name: digests[own] for name, own in rest.items() if own in digests}
        return dataclasses.replace(self, names=kept, constants={**self.constants, **constants})

    def to_json(self) -> str:
        """Write it as it stands in a model's metadata."""
        aliases = {name: own for name, own in self.names.items() if name != own}
        return json.dumps({**dataclasses.asdict(self), "names": list(self.names), "aliases": aliases})

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> ModuleState:
        """Read the metadata of a model; of one that tells nothing it is empty. Raises BnfuseError where the entry is
        damaged."""
        text = metadata.get(MODULE_KEY)
        if text is None:
            return cls()
        try:
            said = json.loads(text)
            names, aliases = said["names"], said["aliases"]
            lists = {key: tuple(map(_text, said[key])) for key in ("unread", "frozen")}
            tracked = {_text(name): int(count) for name, count in said["tracked"].items()}
            constants = {_text(name): _text(digest) for name, digest in said["constants"].items()}
            calls = {_text(name): int(each) for name, each in said.get("calls", {}).items()}
            own = {_text(name): _text(aliases.get(name, name)) for name in names}
            return cls(own, tracked, constants, **lists, calls=calls, fixed_batch=_text(said.get("fixed_batch", "")))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise BnfuseError(f"the model's {MODULE_KEY} metadata is damaged: build it anew") from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    return value


def digest_of(array: np.ndarray) -> str:
    """Tell arrays of different values, types or shapes apart."""
    said = f"{array.dtype.name}{list(array.shape)}".encode()
    return hashlib.sha256(said + np.ascontiguousarray(array).tobytes()).hexdigest()[:32]
