"""The operators of `ai.bnfuse` that are not composed of steps: whole norms, and halves of them on their own.

Operands, results and attributes of each, and what it computes; the steps are in `spec.py`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PlainOp:
    """An operator not composed of steps: a whole BN, or a half of one on maps alone or on coefficients alone."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    optional: tuple[tuple[str, int | float], ...] = ()  # attributes that a node may leave out, with what holds then

    @property
    def defaults(self) -> dict[str, int | float]:
        """Map the attributes that a node may leave out to their values then."""
        return dict(self.optional)


# What the training graph of a network has before any pass, beside standard operators and the cores alone. x, y, dy and
# dx are [N, C, ...] of any rank from 2 on, log_prob and dscores too; labels and dlosses are [N, ...] without C.
WHOLE_OPS = (
    # y = (x - mean)*inv_std*scale + bias, with the mean and the biased variance of each channel of x;
    # new_running = running*momentum + batch*(1 - momentum); where `unbiased` is 1 the running variance takes that of
    # the batch times n/(n - 1), n the elements of a channel (one alone has no such estimate and is taken as it is)
    PlainOp(
        "BatchNorm",
        ("x", "scale", "bias", "running_mean", "running_variance"),
        ("y", "new_running_mean", "new_running_variance", "mean", "inv_std"),
        ("epsilon", "momentum"),
        (("unbiased", 0),),
    ),
    # its gradients; mean and inv_std are its results
    PlainOp("BatchNormGrad", ("dy", "x", "scale", "mean", "inv_std"), ("dx", "dscale", "dbias")),
    # y = (x - mean)*inv_std*scale + bias, with the mean and the biased variance of the channels of each pixel: mean and
    # inv_std are [N, ...], of x's shape without its channels
    PlainOp("LayerNorm", ("x", "scale", "bias"), ("y", "mean", "inv_std"), ("epsilon",)),
    # its gradients; mean and inv_std are its results
    PlainOp("LayerNormGrad", ("dy", "x", "scale", "mean", "inv_std"), ("dx", "dscale", "dbias")),
    # the same by sample and group of channels: of each sample the channels are cut into `groups` equal runs, and mean
    # and biased variance are over those of a run and all its pixels; mean and inv_std are [N, C], alike in a group.
    # With one channel a group it is an InstanceNormalization.
    PlainOp("GroupNorm", ("x", "scale", "bias"), ("y", "mean", "inv_std"), ("epsilon", "groups")),
    PlainOp("GroupNormGrad", ("dy", "x", "scale", "mean", "inv_std"), ("dx", "dscale", "dbias"), ("groups",)),
    # dscores = (exp(log_prob) - onehot(labels))*dlosses; a label that is no class has no one in its row
    PlainOp("SoftmaxCrossEntropyGrad", ("dlosses", "log_prob", "labels"), ("dscores",)),
)

# Statistics from a sample ([Chen18]; docs/maths.md). A box is the elements from `offset` = (sample, row, column)
# on, int64 [3], over `extent` = (samples, rows, columns) of every channel. Points are flat indices into N, H, W, int64,
# each at most once. The gradient of a mixture has one term q*x + w for each of its parts, on that part alone.
SAMPLING_OPS = (
    # mean, biased variance of the box
    PlainOp("SampledStatistics", ("x", "offset"), ("mean", "variance"), ("extent",)),
    # mean, biased variance of the points
    PlainOp("PointStatistics", ("x", "points"), ("mean", "variance")),
    # weight*mean + (1 - weight)*mean_2, and the variances alike, each about its own mean (eq. 4)
    PlainOp(
        "MixStatistics",
        ("mean", "variance", "mean_2", "variance_2"),
        ("mixed_mean", "mixed_variance"),
        ("weight",),
    ),
    # q = -weight*gamma_term/count, w = -weight*beta_term/count - q*mean; the weight, count and mean of one part
    PlainOp("SampledGradFinalize", ("beta_term", "gamma_term", "mean"), ("q", "w"), ("count", "weight")),
    # dx = acc, plus q*x + w in the box
    PlainOp("AddSampled", ("acc", "x", "q", "w", "offset"), ("dx",), ("extent",)),
    # dx = acc, plus q*x + w at the points
    PlainOp("AddAtPoints", ("acc", "x", "q", "w", "points"), ("dx",)),
)

# Statistics over groups of `samples` consecutive samples ([Chen18], section 4.3, local): coefficients are [N/samples,
# C]. Of each group the samples [first, first + rows) count for the statistics and their gradient.
LOCAL_OPS = (
    PlainOp("LocalStatistics", ("x",), ("mean", "variance"), ("first", "rows", "samples")),
    # as BatchNormFinalize for each group; the running statistics take the means over all groups of both
    PlainOp(
        "LocalFinalize",
        ("scale", "bias", "mean", "variance", "running_mean", "running_variance"),
        ("a", "b", "inv_std", "new_running_mean", "new_running_variance"),
        ("epsilon", "momentum"),
        (("elements", 0.0),),
    ),
    # y = a*x + b, each group with its own
    PlainOp("LocalNormalize", ("x", "a", "b"), ("y",), ("samples",)),
    # dbeta = sum dz, dgamma = sum dz*(x - mean)*inv_std, over each group
    PlainOp("LocalGradReduce", ("dz", "x", "mean", "inv_std"), ("dbeta", "dgamma"), ("samples",)),
    # dx = p*dz, each group with its own
    PlainOp("LocalScale", ("dz", "p"), ("dx",), ("samples",)),
    # dx = acc, plus q*x + w in the samples [first, first + rows) of each group
    PlainOp("LocalAddSampled", ("acc", "x", "q", "w"), ("dx",), ("first", "rows", "samples")),
)

# The halves of a GroupNorm. Coefficients are [N, C].
GROUP_OPS = (
    # mean, biased variance of x over H, W
    PlainOp("GroupNormStatistics", ("x",), ("mean", "variance")),
    # group_mean and inv_std = 1/sqrt(variance + epsilon) of each channel's group, by the means and variances of its
    # channels; a = scale*inv_std, b = bias - group_mean*a
    PlainOp(
        "GroupNormFinalize",
        ("scale", "bias", "mean", "variance"),
        ("a", "b", "group_mean", "inv_std"),
        ("epsilon", "groups"),
    ),
    # dbeta = sum dz, dgamma = sum dz*(x - mean)*inv_std, over H, W
    PlainOp("GroupNormGradReduce", ("dz", "x", "mean", "inv_std"), ("dbeta", "dgamma")),
    # q = -inv_std^2*(sum of scale*dgamma)/count, w = -inv_std*(sum of scale*dbeta)/count - q*mean, the sums over the
    # channels of a group, count their elements in a sample; dscale, dbias are the sums of dgamma, dbeta over N. Where
    # `raw` is 1, dgamma is given as the sum of dz*x
    PlainOp(
        "GroupNormGradFinalize",
        ("dbeta", "dgamma", "scale", "mean", "inv_std"),
        ("q", "w", "dscale", "dbias"),
        ("count", "groups"),
        (("raw", 0),),
    ),
)

# Exchanges between the ranks of a data-parallel run, each of which calls them with its own operands. For one rank the
# results are the operands (of AllReduceTerms the channels of them that are asked for). Where `ranks` is not 0, the
# statistics are those of the first so many ranks.
RANK_OPS = (
    # mean, biased variance of the elements of all ranks, which have equally many: the mean of the means; the mean of
    # the variances and of the means' squared distances from it
    PlainOp(
        "AllReduceMoments",
        ("mean", "variance"),
        ("all_mean", "all_variance"),
        (),
        (("ranks", 0),),
    ),
    # the channels [start, stop) of both, as the mean over all ranks: as much of the gradient of the mean of the ranks'
    # losses goes back to an element of each. Where some ranks count, for them the sum over all divided by `ranks`, for
    # the others 0
    PlainOp(
        "AllReduceTerms",
        ("beta_term", "gamma_term"),
        ("all_beta_term", "all_gamma_term"),
        ("start", "stop"),
        (("ranks", 0),),
    ),
)

# The other cheap statistics that [Chen18] compares with (section 2, table 3), as estimates of the variance.
BASELINE_OPS = (
    # L1BN: variance = pi/2 * (mean of |x - mean|)^2, sign_mean = mean of sign(x - mean)
    PlainOp("L1Statistics", ("x",), ("mean", "variance", "sign_mean")),
    # q = -gamma_term*sqrt(pi/2*variance)/count, w = -beta_term/count - q*sign_mean
    PlainOp("L1GradFinalize", ("beta_term", "gamma_term", "variance", "sign_mean"), ("q", "w"), ("count",)),
    # dx = p*dz + q*sign(x - mean) + w
    PlainOp("L1GradInput", ("dz", "x", "mean", "p", "q", "w"), ("dx",)),
    # RBN: variance = ((high - low)*c)^2 with c = 1/(2*sqrt(2*ln(count))); low and high are the extremes of x, and how
    # many elements attain them (float32). A map of one element a channel has c = 0.
    PlainOp("RangeStatistics", ("x",), ("mean", "variance", "low", "high", "low_count", "high_count")),
    # q_high = -gamma_term*c^2*(high - low)/high_count, q_low = gamma_term*c^2*(high - low)/low_count,
    # w = -beta_term/count
    PlainOp(
        "RangeGradFinalize",
        ("beta_term", "gamma_term", "low", "high", "low_count", "high_count"),
        ("q_low", "q_high", "w"),
        ("count",),
    ),
    # dx = p*dz + w, plus q_low where x = low, plus q_high where x = high
    PlainOp("RangeGradInput", ("dz", "x", "low", "high", "p", "q_low", "q_high", "w"), ("dx",)),
)

PLAIN_OPS: dict[str, PlainOp] = {
    op.name: op
    for op in (
        # mean, biased variance of x over N, H, W, in one sweep
        PlainOp("BatchNormStatistics", ("x",), ("mean", "variance")),
        # inv_std = 1/sqrt(variance + epsilon), a = scale*inv_std, b = bias - mean*a,
        # new_running = running*momentum + batch*(1 - momentum); where `elements` says of how many elements a channel's
        # variance is, the running one takes it times elements/(elements - 1). Of a mixture that is no whole number.
        # They are those of one rank, times `of_ranks` (0: all) in a run of several, by AllReduceMoments; but for the
        # part `own_share` of 1/elements, which is of samples that all ranks have alike.
        PlainOp(
            "BatchNormFinalize",
            ("scale", "bias", "mean", "variance", "running_mean", "running_variance"),
            ("a", "b", "inv_std", "new_running_mean", "new_running_variance"),
            ("epsilon", "momentum"),
            (("elements", 0.0), ("of_ranks", 1), ("own_share", 0.0)),
        ),
        # dbeta = sum dz, dgamma = sum dz*(x - mean)*inv_std
        PlainOp("BatchNormGradReduce", ("dz", "x", "mean", "inv_std"), ("dbeta", "dgamma")),
        # terms of the input gradient: gamma_term = a*inv_std*dgamma, beta_term = a*dbeta
        PlainOp("BatchNormGradTerms", ("dbeta", "dgamma", "a", "inv_std"), ("beta_term", "gamma_term")),
        # the same, added to the channels [acc_start, acc_stop) of what other BNs over the same channels left
        PlainOp(
            "BatchNormGradTermsAccumulate",
            ("dbeta", "dgamma", "a", "inv_std", "beta_acc", "gamma_acc"),
            ("beta_term", "gamma_term"),
            ("acc_start", "acc_stop"),
        ),
        # q = -gamma_term[start:stop]/count, w = -beta_term[start:stop]/count - q*mean; count = N*H*W, an integer
        PlainOp("BatchNormGradFinalize", ("beta_term", "gamma_term", "mean"), ("q", "w"), ("count", "start", "stop")),
        *WHOLE_OPS,
        *SAMPLING_OPS,
        *LOCAL_OPS,
        *RANK_OPS,
        *GROUP_OPS,
        *BASELINE_OPS,
    )
}
