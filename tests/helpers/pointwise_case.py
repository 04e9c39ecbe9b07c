"""Operators around a Pointwise, and shapes (NCHW) to try them on: those of every kernel that computes them."""

from bnfuse.opset.activations import ACTIVATIONS

# of all activations: their defaults, but bounds that values reach
ATTRIBUTES = {**dict(given for each in ACTIVATIONS.values() for given in each.defaults), "min": -0.5, "max": 0.75}
ATTRIBUTES |= {"start_1": 0, "start_2": 0}

# one operator for each activation, forward and backward
EACH = [
    *((f"Normalize{name}Pointwise", (2, 5, 3, 3)) for name in ACTIVATIONS),
    *((f"NormalizePointwiseGrad{name}GradReduce", (2, 5, 3, 3)) for name in ACTIVATIONS),
]
FORWARD = [
    ("Pointwise", (2, 37, 3, 5)),
    ("NormalizePointwise", (1, 16, 7, 3)),
    ("ReluPointwiseStatistics", (2, 3, 5, 7)),
    ("NormalizeReluPointwiseBiasStatistics", (3, 19, 4, 5)),
    ("NormalizeClipPointwiseStoreInput", (2, 64, 3, 3)),
    ("NormalizePointwiseBiasReluStatistics", (2, 21, 3, 5)),
    ("QuickGeluAddPointwise", (1, 5, 9, 2)),
    ("GeluAddNormalizedReluPointwise", (1, 19, 3, 2)),
    ("NormalizeAddNormalizedReluPointwiseBiasStoreInputStatistics", (2, 33, 5, 5)),
    ("ReluAddNormalizedReluPointwise", (1, 1, 1, 1)),
    ("NormalizeWhereReluPointwise", (2, 37, 3, 5)),
    ("NormalizeGateAddNormalizedReluPointwiseStatistics", (3, 19, 4, 5)),
    ("NormalizeReluGateSkipReluSkipGateAddNormalizedPointwise", (3, 19, 4, 5)),
    ("GatePointwise", (2, 37, 3, 5)),
    ("WhereQuickGeluAddPointwiseStatistics", (2, 21, 4, 3)),
    ("NormalizeSkipHardSwishAddPointwiseStatistics", (2, 9, 3, 4)),
    ("NormalizeSkipGeluAddNormalizedReluPointwise", (1, 21, 5, 3)),
    ("NormalizeReluAddNormalizedPlusNormalizedPlusPlusNormalizedReluPointwiseStatistics", (2, 13, 3, 4)),
    ("NormalizeGateSkipReluAddPlusPlusPointwise", (2, 9, 4, 3)),
]
BACKWARD = [
    ("PointwiseGrad", (1, 1, 1, 1)),
    ("BatchNormGradPointwiseGrad", (2, 20, 3, 5)),
    ("PointwiseGradReluGrad", (2, 16, 3, 5)),
    ("SlicePointwiseGradAddGradient", (2, 9, 3, 5)),
    ("NormalizePointwiseGradReluGradReduce", (2, 35, 4, 5)),
    ("NormalizePointwiseGradClipGradReduceScale", (1, 48, 5, 7)),
    ("NormalizePointwiseGradQuickGeluGradReduceAccumulate", (2, 24, 3, 3)),
    ("NormalizePointwiseGradGeluGradReduceScale", (2, 19, 3, 3)),
    ("NormalizePointwiseGradWhereReluGradReduce", (2, 35, 4, 5)),
    ("NormalizePointwiseGradAddGradientWhereQuickGeluGradReduce", (2, 19, 3, 3)),
    ("PointwiseGradAddGradientReluGradReduceReduceOtherReduceOther", (3, 17, 5, 5)),
    ("NormalizeGatePointwiseGradClipGradReduceOther", (3, 20, 3, 5)),
    ("GateGradBatchNormGradPointwiseGradAddGatedGradient", (3, 20, 3, 5)),
    ("PointwiseGradAddGatedGradientReluGradReduceReduceGatedReduceOtherReduceGated", (3, 17, 5, 5)),
    ("BatchNormGradPointwiseGradAddGradientAddBatchNormGradReluGradReduceOther", (2, 18, 3, 5)),
    ("LeakyReluGradBatchNormGradPointwiseGradAddGradientReduceLeakyReluGradReduceOther", (2, 17, 3, 5)),
    ("GateGradReluGradBatchNormGradGeluGradPointwiseGradReduceMishGrad", (2, 9, 4, 3)),
    ("AddGradReluGradBatchNormGradPointwiseGradReduceAddedReluGrad", (2, 19, 4, 3)),
    ("NormalizePointwiseGradReluGradReducePartReduceOtherReduceOther", (3, 17, 5, 5)),
    ("PointwiseGradReduceReluGradPartReduceMishGradScale", (2, 19, 4, 3)),
    ("NormalizePointwiseGradReluGradAddSkipGradientReduceReduceOther", (2, 11, 4, 3)),
    ("SliceBatchNormGradNormalizePointwiseGradBiasGradAddGradientReluGradReduceReduceOtherAccumulate", (2, 21, 4, 7)),
]
