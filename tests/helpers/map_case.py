"""Operators around a Map, and shapes (NCHW) to try them on: those of every kernel that computes them."""

FORWARD = [
    ("Map", (2, 37, 3, 5)),
    ("NormalizeMap", (1, 16, 7, 3)),
    ("ReluMapStatistics", (2, 3, 5, 7)),
    ("NormalizeReluMapBiasStatistics", (3, 19, 4, 5)),
    ("NormalizeClipMapStoreInput", (2, 64, 3, 3)),
    ("QuickGeluAddMap", (1, 5, 9, 2)),
    ("NormalizeAddNormalizedReluMapBiasStoreInputStatistics", (2, 33, 5, 5)),
    ("ReluAddNormalizedReluMap", (1, 1, 1, 1)),
]
BACKWARD = [
    ("MapGrad", (1, 1, 1, 1)),
    ("BatchNormGradMapGrad", (2, 20, 3, 5)),
    ("MapGradReluGrad", (2, 16, 3, 5)),
    ("SliceMapGradAddGradient", (2, 9, 3, 5)),
    ("NormalizeMapGradReluGradReduce", (2, 35, 4, 5)),
    ("NormalizeMapGradClipGradReduceScale", (1, 48, 5, 7)),
    ("NormalizeMapGradQuickGeluGradReduceAccumulate", (2, 24, 3, 3)),
    ("MapGradAddGradientReluGradReduceReduceOtherReduceOther", (3, 17, 5, 5)),
    ("SliceBatchNormGradNormalizeMapGradBiasGradAddGradientReluGradReduceReduceOtherAccumulate", (2, 21, 4, 7)),
]
