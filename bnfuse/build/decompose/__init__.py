"""Operators written by others, forward by forward, exactly: what is left has a gradient and kernels.

    operators that ONNX defines by others      functions.py
    normalisations, recurrences, Einsum, ...   a file a family; each function writes one node anew

Decompositions are applied in rounds, for what one writes another may take further. Parameters stay as the file has
them: a weight of another form is computed from it in the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx

from ..forward import Constants, fold_constants, infer_shapes, raise_opset, settle_shapes
from ..graph import Forward
from . import normalization, rearranging, reductions, sampled_maps, windows
from .batch_norm import batch_normalization
from .einsum import einsum
from .flat_maps import keep_flat
from .frozen import fold_frozen
from .functions import EXPANDED, expand
from .group_norms import join_group_norms
from .into_weights import fold_into_weights
from .opsets import lower_opset
from .pixels import keep_channels_first
from .random import bernoulli
from .recurrent import recurrent
from .writer import Surroundings, Writer

__all__ = ["DECOMPOSITIONS", "decompose"]

DECOMPOSITIONS: dict[str, Callable[[Writer], None]] = {
    **dict.fromkeys(EXPANDED, expand),
    "AffineGrid": rearranging.affine_grid,
    "AveragePool": windows.pool,
    "BatchNormalization": batch_normalization,
    "Bernoulli": bernoulli,
    "CastLike": rearranging.cast_like,
    "Col2Im": rearranging.col2im,
    "Conv": windows.conv,
    "ConvTranspose": windows.conv_transpose,
    "CumProd": rearranging.cumulative_product,
    "DeformConv": sampled_maps.deform_conv,
    "DepthToSpace": rearranging.depth_to_space,
    "Einsum": einsum,
    "GRU": recurrent,
    "GlobalAveragePool": windows.global_pool,
    "GlobalLpPool": windows.global_lp_pool,
    "GlobalMaxPool": windows.global_pool,
    "GridSample": sampled_maps.grid_sample,
    "GroupNormalization": normalization.group_normalization,
    "InstanceNormalization": normalization.instance_normalization,
    "LRN": normalization.local_response_normalization,
    "LSTM": recurrent,
    "LayerNormalization": normalization.layer_normalization,
    "LpNormalization": normalization.lp_normalization,
    "LpPool": windows.lp_pool,
    "MaxPool": windows.pool,
    "MeanVarianceNormalization": normalization.mean_variance_normalization,
    "RMSNormalization": normalization.rms_normalization,
    "RNN": recurrent,
    "ReduceL1": reductions.reduce_l1,
    "ReduceL2": reductions.reduce_l2,
    "ReduceLogSum": reductions.reduce_log_sum,
    "ReduceLogSumExp": reductions.reduce_log_sum_exp,
    "ReduceMax": reductions.reduce_extreme,
    "ReduceMean": reductions.reduce_mean,
    "ReduceMin": reductions.reduce_extreme,
    "ReduceSum": reductions.reduce_sum,
    "ReduceSumSquare": reductions.reduce_sum_square,
    "SpaceToDepth": rearranging.space_to_depth,
}
WINDOWED = ("Conv", "ConvTranspose", "MaxPool", "AveragePool")
SILENT = (
    "BatchNormalization",
    "CastLike",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceSum",
)  # written otherwise, and still what they were
OPERAND_AXES = 18  # since when these take their axes as an operand
REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin")
DILATED_AVERAGES = 19


def decompose(
    forward: Forward,
    constants: Constants,
    variables: frozenset[str] = frozenset(),
    fixed: frozenset[str] = frozenset(),
) -> Constants:
    """Apply DECOMPOSITIONS until nothing is left to write otherwise, and bring newer opsets down.

    Shapes must be known, and are afterwards. `variables` are the parameters and statistics of the network, which stay
    initializers under their names; those that are `fixed` no step changes. Returns the constants with those that were
    added.
    """
    forward.variables = variables
    constants.variables |= variables
    constants.names.update(set(forward.initializers()) - variables)
    constants = settle_shapes(forward, constants)
    constants = _read_group_norms(forward, constants)
    constants = _fold_frozen(forward, constants, fixed)
    keep_channels_first(forward, constants)
    constants = _fold_into_weights(forward, constants, fixed)
    counts: dict[str, int] = {}
    while True:
        around = Surroundings(forward, variables)
        nodes, written = _one_round(around)
        if not written:
            break
        needed = max(map(_opset_of, nodes))
        if forward.opset < needed:
            raise_opset(forward, needed)
            constants |= fold_constants(forward, constants)  # the converter writes axes as Constant nodes
            infer_shapes(forward)
            continue  # with other nodes than before
        for op in written:
            counts[op] = counts.get(op, 0) + 1
        constants = _replace(around, nodes, constants)
    around = Surroundings(forward, variables)
    if counts.keys() & {*WINDOWED} and keep_flat(around):
        constants.names.update(tensor.name for tensor in around.added)
        constants = settle_shapes(forward, constants)
    lower_opset(forward)
    for op, number in sorted(counts.items()):
        if op not in SILENT:
            forward.note(f"wrote {number} {op} nodes by operators that have a gradient")
    return constants


def _one_round(around: Surroundings) -> tuple[list[onnx.NodeProto], list[str]]:
    """Give the nodes anew, and the operators of those that were written otherwise. The graph stays as it is."""
    nodes: list[onnx.NodeProto] = []
    written: list[str] = []
    for node in around.forward.graph.node:
        known = node.domain in ("", "ai.onnx")
        decomposition = DECOMPOSITIONS.get(node.op_type) if known else None
        if decomposition is not None:
            write = Writer(around, node)
            decomposition(write)
            if write.nodes:
                nodes += write.nodes
                written.append(node.op_type)
                continue
        nodes.append(node)
    return nodes, written


def _opset_of(node: onnx.NodeProto) -> int:
    if node.op_type in REDUCTIONS and len(node.input) > 1:
        return OPERAND_AXES
    dilated = node.op_type == "AveragePool" and any(attr.name == "dilations" for attr in node.attribute)
    return DILATED_AVERAGES if dilated else 1


def _replace(around: Surroundings, nodes: list[onnx.NodeProto], constants: Constants) -> Constants:
    forward = around.forward
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del forward.graph.node[:]
    forward.graph.node.extend(copies)
    forward.graph.initializer.extend(around.added)
    constants.names.update(tensor.name for tensor in around.added)
    return settle_shapes(forward, constants)


def _read_group_norms(forward: Forward, constants: Constants) -> Constants:
    around = Surroundings(forward, constants.variables)
    if join_group_norms(around):
        forward.graph.initializer.extend(around.added)
        constants.names.update(tensor.name for tensor in around.added)
        forward.remove_dead_nodes()
    return constants


def _fold_frozen(forward: Forward, constants: Constants, fixed: frozenset[str]) -> Constants:
    around = Surroundings(forward, constants.variables)
    nodes = fold_frozen(around, fixed)
    return constants if nodes is None else _replace(around, nodes, constants)


def _fold_into_weights(forward: Forward, constants: Constants, fixed: frozenset[str]) -> Constants:
    while True:
        around = Surroundings(forward, constants.variables)
        nodes = fold_into_weights(around, fixed)
        if nodes is None:
            return constants
        constants = _replace(around, nodes, constants)
