"""BatchNormalization below opset 14, brought to the form that onnx's converter takes to the newer ones.

    y, mean, var, saved_mean, saved_var = BN(x, ...; spatial=1)    to    y = BN(x, ...)      and later training_mode=1

There no attribute says whether it trains. Its further results do: only where it trains it has them. Files without any
say nothing, and are meant to be trained when someone builds a training graph of them (docs/decisions.md).
"""

from __future__ import annotations

import onnx

from bnfuse.graph.protos import attributes, remove_attributes

from .graph import Forward

TRAINING_MODE = 14  # the first opset in which a BatchNormalization says that it trains
OBSOLETE = {"spatial", "is_test", "consumed_inputs"}


def simplify_old_batch_norms(forward: Forward, *, frozen: bool = False) -> set[str]:
    """Turn BatchNorms of old opsets into plain ones. Gives the results of those that train by what the file says or,
    where it says nothing of any, of all; of none, where they are meant to be `frozen`."""
    norms = [node for node in forward.graph.node if node.op_type == "BatchNormalization"]
    version = forward.opset
    if version >= TRAINING_MODE:
        return {node.output[0] for node in norms if attributes(node).get("training_mode")}
    read = set(forward.consumers()) | forward.output_names()
    trained = {node.output[0] for node in norms if any(node.output[1:])}
    for node in norms:
        _simplify(forward, node, read)
    return trained if trained or frozen else {node.output[0] for node in norms}


def _simplify(forward: Forward, node: onnx.NodeProto, read: set[str]) -> None:
    if attributes(node).get("spatial", 1) == 0:
        raise forward.error_at(node, "has spatial=0 (statistics for each pixel): export it with one for each channel.")
    if used := read.intersection(filter(None, node.output[1:])):
        raise forward.error_at(node, f"gives '{min(used)}' to others: only its first result can be used.")
    remove_attributes(node, OBSOLETE)
    del node.output[1:]
