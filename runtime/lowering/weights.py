"""Weights of convolutions on a GPU: one launch at the start of the step packs all that its kernels read.

Each kernel asks for the form that it reads (kernels/cuda/weights.py), which gets a place at once; where all places lie,
and the launch that fills them, is settled when every node is lowered. A weight that is no parameter is packed by a
launch of its own, where it is first asked for.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.opset.spec import WEIGHT_GRADS
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.sides import TOWARDS_INPUT, TOWARDS_OUTPUT
from bnfuse.runtime.kernels.cuda.merging import merged_groups
from bnfuse.runtime.kernels.cuda.weights import BACKWARD, FORWARD, LINE, Member, is_packed, packed_elements
from bnfuse.runtime.kernels.cuda.weights import table as table_of
from bnfuse.runtime.lowering.state import Lowering, Ref
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import CudaTarget

FORMS = {
    **dict.fromkeys(TOWARDS_OUTPUT, FORWARD),
    **dict.fromkeys((core for core in TOWARDS_INPUT if core not in WEIGHT_GRADS), BACKWARD),
}


def weight_ref(low: Lowering, core: str, value: ir.Value, group: int) -> Ref:
    """Give the weight as the kernel of a convolution reads it."""
    if not low.target.packs_weights or core not in FORMS or not is_packed(low.shape(value), core, group):
        return low.dense(value)
    return packed_weight(low, value, group, FORMS[core])


def merged_in(low: Lowering, shape: tuple[int, ...], group: int) -> int:
    """Count the groups that kernels multiply as one."""
    assert isinstance(low.target, CudaTarget)
    return merged_groups(shape, group, low.target)


def packed_weight(low: Lowering, value: ir.Value, group: int, form: str) -> int:
    """Give the storage of a packed weight."""
    source, shape = low.dense(value), low.shape(value)
    key = source, shape, group, form
    if key not in low.packed:
        held, merged = low.storages[source], merged_in(low, shape, group)
        low.packed[key] = low.storage(packed_elements(shape, group, form, merged), low.target.map_dtype)
        if held.region != p.PARAMETERS:
            pack(low, (Member(shape, group, form, 0, 0, merged),), source, low.packed[key])
    return low.packed[key]


def pack_parameters(low: Lowering) -> None:
    """Put the launch that packs what was asked for in front of all others, and its results into one storage."""
    wanted = {key: part for key, part in low.packed.items() if low.storages[key[0]].region == p.PARAMETERS}
    if not wanted:
        return
    members, end = [], 0
    for (source, shape, group, form), part in wanted.items():
        offset = low.storages[source].offset // np.dtype(np.float32).itemsize
        members.append(Member(shape, group, form, offset, end, merged_in(low, shape, group)))
        end += math.ceil(low.storages[part].elements / LINE) * LINE
    if end >= 2**31:
        raise BnfuseError(f"the weights have {end} elements, more than int32 can index: use a smaller network")
    base = low.storage(end, low.target.map_dtype)
    for member, part in zip(members, wanted.values(), strict=True):
        low.parts[part] = base, member.target * np.dtype(low.target.map_dtype).itemsize
    low.phase, low.node = "forward", "weights"
    elements = low.regions[p.PARAMETERS] // np.dtype(np.float32).itemsize
    pack(low, tuple(members), low.storage(elements, region=p.PARAMETERS, offset=0), base)
    low.launches.insert(0, low.launches.pop())


def pack(low: Lowering, members: tuple[Member, ...], source: int, packed: int) -> None:
    """Launch the kernel that packs weights, all of `members` at once."""
    arguments = members, low.storages[source].elements, low.storages[packed].elements, low.target
    refs: dict[str, Ref] = {"parameters": source, "packed": packed, "table": low.constant_storage(table_of(members))}
    low.launch(registry.PACK_WEIGHTS, arguments, refs)
    low.copies.append(f"{low.node}: {len(members)} packed weights")
