"""Operators around a Pointwise, and shapes (NCHW) to try them on: those of every kernel that computes them."""

FORWARD = [
    ("Pointwise", (2, 37, 3, 5)),
    ("NormalizePointwise", (1, 16, 7, 3)),
    ("ReluPointwiseStatistics", (2, 3, 5, 7)),
    ("NormalizeReluPointwiseBiasStatistics", (3, 19, 4, 5)),
    ("NormalizeClipPointwiseStoreInput", (2, 64, 3, 3)),
    ("QuickGeluAddPointwise", (1, 5, 9, 2)),
    ("NormalizeAddNormalizedReluPointwiseBiasStoreInputStatistics", (2, 33, 5, 5)),
    ("ReluAddNormalizedReluPointwise", (1, 1, 1, 1)),
]
BACKWARD = [
    ("PointwiseGrad", (1, 1, 1, 1)),
    ("BatchNormGradPointwiseGrad", (2, 20, 3, 5)),
    ("PointwiseGradReluGrad", (2, 16, 3, 5)),
    ("SlicePointwiseGradAddGradient", (2, 9, 3, 5)),
    ("NormalizePointwiseGradReluGradReduce", (2, 35, 4, 5)),
    ("NormalizePointwiseGradClipGradReduceScale", (1, 48, 5, 7)),
    ("NormalizePointwiseGradQuickGeluGradReduceAccumulate", (2, 24, 3, 3)),
    ("PointwiseGradAddGradientReluGradReduceReduceOtherReduceOther", (3, 17, 5, 5)),
    ("SliceBatchNormGradNormalizePointwiseGradBiasGradAddGradientReluGradReduceReduceOtherAccumulate", (2, 21, 4, 7)),
]
