"""What of a program that torch.export made depends on the batch, beyond the sizes of shapes.

Sizes are numbers in an exported program. Those of shapes (a view, an expansion) are followed to another batch
(bnfuse/graph/batches.py); `x / x.shape[0]`, `x[: x.shape[0] // 2]` and a branch by the batch are not. So a module is
exported at two batches, and the programs are one where they differ in sizes of shapes alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

FOLLOWED = frozenset(  # their sizes
    (
        *("view", "reshape", "_unsafe_view", "expand", "broadcast_to", "unflatten", "repeat", "tile"),
        *("zeros", "new_zeros", "empty", "new_empty", "rand", "randn"),
    )
)


def traits(program: Any) -> str:
    """Write down a program without the sizes of shapes: the same text at two batches, the same computation."""
    lines = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            is_followed = str(node.target).removeprefix("aten.").partition(".")[0] in FOLLOWED
            args, kwargs = (without_sizes(node.args), {}) if is_followed else (node.args, node.kwargs)
            lines.append(f"{node.name} = {node.target} {args} {kwargs}")
        else:
            lines.append(f"{node.name} {node.op} {node.args if node.op == 'output' else node.target}")
    for key, tensor in program.constants.items():
        if hasattr(tensor, "detach"):
            elements = tensor.detach().cpu().contiguous().numpy()
            lines.append(f"{key} {elements.dtype} {elements.shape} {hashlib.sha256(elements.tobytes()).hexdigest()}")
    return "\n".join(lines)


def without_sizes(value: Any) -> Any:
    """Leave the numbers out of operands."""
    if isinstance(value, list | tuple):
        return [without_sizes(one) for one in value]
    return None if isinstance(value, int) else value
