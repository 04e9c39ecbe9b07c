"""What docs/ops.md says of each operator and step: its formula and what there is to know (pages.py writes the page)."""

from __future__ import annotations

import dataclasses

from bnfuse.opset.activations import ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class Text:
    """A step's formula and what there is to know about it."""

    formula: str
    about: str


PROLOGUE = {
    "Slice": Text(
        "dy <- dy[:, grad_start : grad_stop]",
        "Reads a range of the channels of dy: the gradient of a Concat's result serves each producer without a Split. "
        "What follows (grad_x among it) has the channels of the range.",
    ),
    "GateGrad": Text(
        "dy <- grad_gate*dy",
        "dy is the gradient behind a gate that needs none of its own, such as a drop path's; grad_gate is like gate.",
    ),
    "AddGrad": Text(
        "dy <- dy + grad_other",
        "The gradient of another reader, where the sum is not stored: both are needed as they are, too. What a pooling "
        "over each image passes back has one pixel, [N, C, 1, 1].",
    ),
    "BatchNormGrad": Text(
        "dy <- grad_p*dy + grad_q*grad_x + grad_w",
        "The input gradient of the BatchNorm that follows the core in the forward graph, computed where it is read. "
        "grad_x is that BatchNorm's input, a map like dy; grad_p, grad_q, grad_w come from BatchNormFinalize (its a) "
        "and BatchNormGradFinalize. The gradient of an activation may stand before it, of the activation behind the "
        "BatchNorm: dy <- dy*f'(z) with z = grad_a*grad_x + grad_b, [C] each; or behind it, of the activation before "
        "the BatchNorm: dy <- (grad_p*dy + grad_q*f(grad_x) + grad_w)*f'(grad_x).",
    ),
    "Normalize": Text(
        "x <- a*x + b",
        "The normalise half of a BatchNorm, with a and b from BatchNormFinalize. Gradients recompute it from x.",
    ),
    **{name: Text(each.formula, each.about) for name, each in ACTIVATIONS.items()},
    "Where": Text(
        "x <- active > 0 ? f(x) : x, with the activation f after it",
        "The activation holds in some channels: behind a Concat, in those of the operands that had one.",
    ),
    "Gate": Text(
        "x <- gate*x",
        "A factor for each sample and channel, [N, C, 1, 1], as squeeze-excitation and drop paths have it, or for each "
        "channel, [1, C, 1, 1]. A map like x serves too: GateGlobalAveragePool is the mean of a product of two maps. "
        "Of gradients those of convolutions take it, for the weight's; dx is that of the gated map. An activation "
        "stands in front of it or behind it, and then z, which masks read, is gate*(a*x + b).",
    ),
    "Add": Text(
        "x <- x + skip",
        "A residual sum. skip has the shape of x. Of gradients ConvGrad and those of weights alone take it, unmasked.",
    ),
    "AddNormalized": Text(
        "x <- x + (skip_a*skip + skip_b)", "A residual sum whose second operand has a BatchNorm of its own."
    ),
    "Plus": Text(
        "x <- x + plus_i",
        "A further term of a residual sum, of a Pointwise alone: RepVGG's three branches are one sweep. Repeatable, "
        "beside PlusNormalized: i = 1, 2, ...",
    ),
    "PlusNormalized": Text(
        "x <- x + (plus_a_i*plus_i + plus_b_i)", "The same for a term with a BatchNorm of its own, numbered with those."
    ),
    "SkipGate": Text(
        "x <- x + skip_gate*skip or x + skip_gate*(skip_a*skip + skip_b)",
        "The second operand of the Add or AddNormalized behind it, normalised and activated, is multiplied by a gate.",
    ),
    "SkipActivation": Text(
        "x <- x + f(skip) or x + f(skip_a*skip + skip_b)",
        "The second operand of the Add or AddNormalized behind it goes through an activation: SkipRelu, SkipHardSwish, "
        "and so on, with the activation's attributes. One that others of the operator share has them in common.",
    ),
}

CORES = {
    "Conv": Text("y = Conv(x, weight)", "As in ONNX, without its bias. Padding is zero after the prologue."),
    "ConvTranspose": Text(
        "y = ConvTranspose(x, weight)",
        "As in ONNX, without its bias; weight is [C, M/group, kH, kW]. It is the input gradient of the convolution "
        "that makes maps of x's size of those of y's.",
    ),
    "MaxPool": Text("y, indices = MaxPool(x)", "indices are flat positions in x (NCHW), the first of equal maxima."),
    "AveragePool": Text("y = AveragePool(x)", "As in ONNX."),
    "GlobalAveragePool": Text("y = mean of x over H, W", "y has the shape [N, C, 1, 1]."),
    "Resample": Text(
        "y = rows x columns^T",
        "A linear map along rows and columns: a Resize in any mode, a Pad that repeats or reflects what is there. "
        "rows is [OH, H] and columns [OW, W], constants of few entries a row.",
    ),
    "Pointwise": Text("y = x", "No core: stores what the prologue made, or takes statistics of it."),
    "ConvGrad": Text(
        "dx, dweight = gradients of Conv",
        "dweight reads the activated x. dx is the gradient at what the convolution read, before the epilogue.",
    ),
    "ConvGradInput": Text(
        "dx = input gradient of Conv",
        "x gives the shape, and is read where an epilogue step needs it.",
    ),
    "ConvGradWeight": Text("dweight = weight gradient of Conv", "BiasGrad is the only epilogue step it takes."),
    "ConvTransposeGradInput": Text(
        "dx = Conv(dy, weight)",
        "The input gradient of ConvTranspose, a convolution. x is read where an epilogue step needs it.",
    ),
    "ConvTransposeGradWeight": Text(
        "dweight = weight gradient of ConvTranspose",
        "That of the convolution whose result's gradient is the activated x, and whose input is dy. BiasGrad is the "
        "only epilogue step it takes.",
    ),
    "MaxPoolGrad": Text(
        "dx = 0, then dx[indices] += dy", "indices are the forward operator's. The function body needs opset 16."
    ),
    "AveragePoolGrad": Text("dx = each dy, shared out over its window", "Exact for every pad, stride and ceil_mode."),
    "GlobalAveragePoolGrad": Text("dx = dy/(H*W), everywhere", "x gives the shape."),
    "ResampleGrad": Text("dx = rows^T dy columns", "x gives the shape, and is read where an epilogue step needs it."),
    "PointwiseGrad": Text("dx = dy", "No core. x is an operand only where an epilogue step reads it."),
}

IMAGE_GATE = "ImageGateActivation"  # stands for ImageGate, ImageGateRelu and their like
MASKED = "ReduceActivationGrad"  # stands for ReduceReluGrad and its like

EPILOGUE = {
    "Bias": Text("y <- y + bias", "The bias of a convolution."),
    "Relu": Text(
        "y <- max(y, 0)",
        "The activation in front of a BatchNorm, whose statistics are then those of its result. Relu alone: its "
        "gradient is told by what it makes, so nothing needs the map as it was before.",
    ),
    "StoreInput": Text(
        "stored = x", "The x that the core read is also written, for a second reader. It has x's shape."
    ),
    "Statistics": Text(
        "mean, variance = those of y over N, H, W",
        "The statistics half of the BatchNorm that reads y. The variance is biased, never a difference of raw sums: it "
        "is right to 1e-5 where the mean is a thousand standard deviations.",
    ),
    "ImageStatistics": Text(
        "image_mean, image_variance = those of y over H, W",
        "The same of each image and channel, [N, C]: what statistics of samples and groups of channels are made of.",
    ),
    "BiasGrad": Text("dbias = sum of dy over N, H, W", "dy as it is after the prologue."),
    "AddGradient": Text("dx <- dx + other", "The gradient of another reader of the same map, added before the mask."),
    "Where": Text(
        "dx <- masked > 0 ? dx*f'(z) : dx, with the activation's gradient after it",
        "The mask is of some channels: behind a Concat, of the operands that nothing else reads.",
    ),
    "AddGatedGradient": Text(
        "dx <- dx + other_gate*other", "The same for a reader behind a gate: other is the gradient of the gated map."
    ),
    "AddBatchNormGrad": Text(
        "dx <- dx + (other_p*other_dy + other_q*other_x + other_w)",
        "The input gradient of a BatchNorm that reads the same map beside the core, as an identity branch does. "
        "other_x is that BatchNorm's input, and the coefficients are as in BatchNormGrad.",
    ),
    **{f"{name}Grad": Text(each.gradient_formula, each.gradient_about) for name, each in ACTIVATIONS.items()},
    "AddSkipGradient": Text(
        "dx <- dx + skip_grad",
        "The gradient of a reader that takes the map as it is before the activation, as a skip past it does. It needs "
        "the mask before it: without one it would be AddGradient.",
    ),
    "Reduce": Text(
        "dbeta = sum of dx, dgamma = sum of dx*(x - mean)*inv_std, over N, H, W",
        "The reduction half of a BatchNorm's gradient. It reads dx after the mask.",
    ),
    "ReduceOther": Text(
        "dbeta_i = sum of dx, dgamma_i = sum of dx*(x_i - mean_i)*inv_std_i",
        "The same for another BatchNorm that shares dx, as the two of a residual sum do. Repeatable: i = 1, 2, ...",
    ),
    "ReduceGated": Text(
        "dbeta_i = sum of gate_i*dx, dgamma_i = sum of gate_i*dx*(x_i - mean_i)*inv_std_i",
        "ReduceOther for a BatchNorm behind a gate (a drop path in front of a residual sum), numbered with those.",
    ),
    MASKED: Text(
        "dbeta_i = sum of d, dgamma_i = sum of d*(x_i - mean_i)*inv_std_i; d = dx*f'(a_i*x_i + b_i)",
        "ReduceOther for a BatchNorm and the activation behind it, where dx is needed as it is, too: behind a residual "
        "sum. ReduceReluGrad, ReduceHardSwishGrad, and so on, with the activation's attributes. ReduceAddedReluGrad "
        "and its like have an operand other_i, a map like dx, behind b_i: d = (dx + other_i)*f'(a_i*x_i + b_i).",
    ),
    "ImageReduce": Text(
        "image_sum = sum of dx, image_dot = sum of dx*x, over H, W",
        "The sums of each image and channel, [N, C], that the gradient of what ImageStatistics serve takes.",
    ),
    "ImageReduceOther": Text(
        "image_sum = sum of dx, image_dot = sum of dx*reduced_x, over H, W",
        "The same with another map than the one that the operator reads, such as that in front of a residual sum.",
    ),
    IMAGE_GATE: Text(
        "z = gated_a*gated_x + gated_b; image_gate = sum of dx*f(z); image_beta = sum of dx*f'(z); "
        "image_gamma = sum of dx*f'(z)*(gated_x - gated_mean)*gated_inv_std; image_slope = sum of f'(z); "
        "image_tilt = sum of f'(z)*(gated_x - gated_mean)*gated_inv_std; all over H, W",
        "dx is the gradient of gate*f(z), where gate is made of the mean of f(z) over each image. image_gate is the "
        "gate's gradient; of the others and the gate follow those of the BatchNorm that made z, when the gate's own "
        "is known, without another sweep. ImageGateRelu, ImageGateHardSwish, and so on, with the activation's "
        "attributes; ImageGate alone is f(z) = z.",
    ),
    "Part": Text(
        "dbeta_i = 0, dgamma_i = 0 in the channels where part_i <= 0",
        "In front of one of the reductions before: it is of some channels alone. x_i has those from start_i on, and is "
        "taken for 0 in the others; mean_i, inv_std_i and so on are of all channels of dx. So the gradient of a Concat "
        "is reduced for a BatchNorm behind one of its operands (a residual sum in a cross-stage part).",
    ),
    "Scale": Text("dx <- acc_p*dx", "The first term of a gradient that BatchNorms over the same channels add up."),
    "Accumulate": Text(
        "dx <- acc[:, acc_start : acc_stop] + acc_p*dx",
        "A later term of that gradient. The range has as many channels as dx; a runtime may update acc in place.",
    ),
}

PLAIN = {
    "BatchNormStatistics": Text(
        "mean, variance = those of x over N, H, W", "For a BatchNorm whose input no operator of ours writes."
    ),
    "BatchNormFinalize": Text(
        "inv_std = 1/sqrt(variance + epsilon); a = scale*inv_std; b = bias - mean*a; "
        "new_running = running*momentum + batch*(1 - momentum)",
        "From statistics to the coefficients of Normalize, and the running statistics. The running variance takes the "
        "biased variance, as ONNX defines it; where `elements` says of how many elements a channel that is, it takes "
        "variance*elements/(elements - 1), as torch does. Of a mixture that is no whole number; 1 changes nothing. The "
        "elements are those of one rank: in a data-parallel run they are taken `of_ranks` times (1; 0 for all ranks), "
        "but for the part `own_share` of 1/elements, which is of samples that all ranks have alike.",
    ),
    "BatchNormGradReduce": Text(
        "dbeta = sum of dz, dgamma = sum of dz*(x - mean)*inv_std, over N, H, W",
        "For a gradient dz that no operator of ours writes.",
    ),
    "BatchNormGradTerms": Text(
        "beta_term = a*dbeta; gamma_term = a*inv_std*dgamma",
        "What one BatchNorm contributes to the input gradient of its channels.",
    ),
    "BatchNormGradTermsAccumulate": Text(
        "beta_term = beta_acc[acc_start : acc_stop] + a*dbeta; "
        "gamma_term = gamma_acc[acc_start : acc_stop] + a*inv_std*dgamma",
        "The same, added to what other BatchNorms over these channels contributed.",
    ),
    "BatchNormGradFinalize": Text(
        "q = -gamma_term[start : stop]/count; w = -beta_term[start : stop]/count - q*mean",
        "The coefficients of BatchNormGrad for the channels of one producer; count is N*H*W. With one BatchNorm the "
        "factor p is its a; where the factors were applied in Scale and Accumulate, p is one.",
    ),
}

WHOLE = {
    "BatchNorm": Text(
        "y = (x - mean)*inv_std*scale + bias; inv_std = 1/sqrt(variance + epsilon); "
        "new_running = running*momentum + batch*(1 - momentum)",
        "A BatchNorm in training, with the mean and the variance of each channel of x. The variance is biased, in the "
        "running statistics too unless `unbiased` is 1: then the running variance takes variance*n/(n - 1), with the n "
        "elements of a channel. One element has no such estimate: its variance is taken as it is.",
    ),
    "BatchNormGrad": Text(
        "dbias = sum of dy; dscale = sum of dy*(x - mean)*inv_std; "
        "dx = scale*inv_std*(dy - dbias/count - (x - mean)*inv_std*dscale/count)",
        "Its gradients; mean and inv_std are its results, count the elements of a channel.",
    ),
    "LayerNorm": Text(
        "y = (x - mean)*inv_std*scale + bias; inv_std = 1/sqrt(variance + epsilon)",
        "A LayerNorm over the channels of each pixel, with their mean and biased variance: mean and inv_std have the "
        "shape of x without its channels. What LayerNormalization does along the last axis is this, of [M, C].",
    ),
    "LayerNormGrad": Text(
        "g = dy*scale; x_hat = (x - mean)*inv_std; dscale = sum of dy*x_hat; dbias = sum of dy; "
        "dx = inv_std*(g - mean of g - x_hat*(mean of g*x_hat))",
        "Its gradients; the means are over the channels of a pixel, the sums over all pixels.",
    ),
    "GroupNorm": Text(
        "y = (x - mean)*inv_std*scale + bias; inv_std = 1/sqrt(variance + epsilon)",
        "The channels of each sample in `groups` equal runs, with the mean and the biased variance of all elements of "
        "a run; mean and inv_std are alike in a group. With one channel a group it is an InstanceNormalization.",
    ),
    "GroupNormGrad": Text(
        "dbias = sum of dy; dscale = sum of dy*(x - mean)*inv_std; "
        "dx = inv_std*(scale*dy - (sum of scale*dy)/count "
        "- (x - mean)*inv_std*(sum of scale*dy*(x - mean)*inv_std)/count)",
        "Its gradients; mean and inv_std are its results. The sums within dx are over the elements of a group in a "
        "sample, of which there are `count`.",
    ),
    "SoftmaxCrossEntropyGrad": Text(
        "dscores = (exp(log_prob) - onehot(labels))*dlosses",
        "The gradient of each row's cross-entropy, along axis 1: mean or sum, weights and an ignored label are in "
        "dlosses. A label that is no class has no one in its row: with dlosses of 0 its dscores are 0.",
    ),
}

SAMPLED = {
    "SampledStatistics": Text(
        "mean, variance = those of x[n0 : n0 + n, :, h0 : h0 + h, w0 : w0 + w]; (n0, h0, w0) = offset; "
        "(n, h, w) = extent",
        "The statistics of a box of x: its samples, rows and columns from `offset` on, which is data and changes once "
        "an epoch. Nothing but the box is read.",
    ),
    "PointStatistics": Text(
        "mean, variance = those of x at the points",
        "Points are flat indices into N, H, W, each at most once; every channel has the same ones.",
    ),
    "MixStatistics": Text(
        "mixed_mean = weight*mean + (1 - weight)*mean_2; mixed_variance = weight*variance + (1 - weight)*variance_2",
        "Statistics of two parts of a batch, each about its own mean.",
    ),
    "SampledGradFinalize": Text(
        "q = -weight*gamma_term/count; w = -weight*beta_term/count - q*mean",
        "The coefficients of AddSampled for one part: its weight in the mixture (1 where there is one part), its "
        "elements per channel, and its own mean.",
    ),
    "AddSampled": Text(
        "dx = acc; dx[box] += q*x[box] + w",
        "The box is that of SampledStatistics. A runtime adds in place where nothing else reads acc.",
    ),
    "AddAtPoints": Text("dx = acc; dx[points] += q*x[points] + w", "The same for points."),
}

LOCAL = {
    "LocalStatistics": Text(
        "mean, variance = those of x over the samples [first, first + rows) of each group, and H, W",
        "A group is `samples` consecutive samples.",
    ),
    "LocalFinalize": Text(
        "inv_std = 1/sqrt(variance + epsilon); a = scale*inv_std; b = bias - mean*a; "
        "new_running = running*momentum + (mean over groups of batch)*(1 - momentum)",
        "As BatchNormFinalize, for each group; `elements` are those of a group's statistics.",
    ),
    "LocalNormalize": Text("y = a*x + b", "Each group with its own a and b."),
    "LocalGradReduce": Text(
        "dbeta = sum of dz, dgamma = sum of dz*(x - mean)*inv_std, over each group, H, W",
        "The gradients of scale and bias are the sums of these over the groups.",
    ),
    "LocalScale": Text("dx = p*dz", "Each group with its own p."),
    "LocalAddSampled": Text(
        "dx = acc; dx[sample] += q*x[sample] + w",
        "The sample is that of LocalStatistics: the samples [first, first + rows) of each group.",
    ),
}

RANKS = {
    "AllReduceMoments": Text(
        "all_mean = mean over ranks of mean; all_variance = mean over ranks of variance + (mean - all_mean)^2",
        "In a data-parallel run, mean and biased variance of the elements of all ranks, which have equally many each; "
        "in a run of one rank, and in the function body, those of its own. Where `ranks` is not 0, the "
        "first so many ranks count.",
    ),
    "AllReduceTerms": Text(
        "all_beta_term = mean over ranks of beta_term[start : stop]; all_gamma_term = that of gamma_term[start : stop]",
        "What all ranks contribute to the input gradient of the channels of one producer, with the count of one rank's "
        "elements. Where `ranks` is not 0, the sum over all ranks divided by `ranks` for those that count, and 0 for "
        "the others, of whose elements the statistics are not.",
    ),
}

GROUPS = {
    "GroupNormStatistics": Text("mean, variance = those of x over H, W", "Of each sample and channel; biased."),
    "GroupNormFinalize": Text(
        "group_mean, variance = those of each channel's group; inv_std = 1/sqrt(variance + epsilon); "
        "a = scale*inv_std; b = bias - group_mean*a",
        "A group's variance is the mean of its channels' variances and of their means' squared distances from its "
        "mean.",
    ),
    "GroupNormGradReduce": Text("dbeta = sum of dz, dgamma = sum of dz*(x - mean)*inv_std, over H, W", "By sample."),
    "GroupNormGradFinalize": Text(
        "q = -inv_std^2*(sum of scale*dgamma)/count; w = -inv_std*(sum of scale*dbeta)/count - q*mean; "
        "dscale, dbias = sums of dgamma, dbeta over N",
        "The coefficients of BatchNormGrad, whose p is a of GroupNormFinalize. The sums are over the channels of a "
        "group, `count` are its elements in a sample. Where `raw` is 1, dgamma is given as the sum of dz*x, as "
        "ImageReduce gives it.",
    ),
}

BASELINES = {
    "L1Statistics": Text(
        "variance = pi/2*(mean of |x - mean|)^2; sign_mean = mean of sign(x - mean)",
        "The mean absolute deviation, as an estimate of the variance of normal values.",
    ),
    "L1GradFinalize": Text(
        "q = -gamma_term*sqrt(pi/2*variance)/count; w = -beta_term/count - q*sign_mean",
        "The coefficients of L1GradInput.",
    ),
    "L1GradInput": Text("dx = p*dz + q*sign(x - mean) + w", "The sign of 0 is 0."),
    "RangeStatistics": Text(
        "variance = ((high - low)*c)^2; c = 1/(2*sqrt(2*ln(N*H*W)))",
        "The range of the values, as an estimate of the variance of normal values. low and high are the extremes of x, "
        "low_count and high_count how many elements attain them. With one element a channel c is 0.",
    ),
    "RangeGradFinalize": Text(
        "q_low = gamma_term*c^2*(high - low)/low_count; q_high = -gamma_term*c^2*(high - low)/high_count; "
        "w = -beta_term/count",
        "The coefficients of RangeGradInput.",
    ),
    "RangeGradInput": Text(
        "dx = p*dz + w; dx[x = low] += q_low; dx[x = high] += q_high",
        "Only the extremes carry the variance's gradient.",
    ),
}

PLAIN_SECTIONS = {
    "Operators of training graphs before any pass": WHOLE,
    "Operators that are not composed of steps": PLAIN,
    "Statistics of a sample": SAMPLED,
    "Statistics of groups": LOCAL,
    "Exchanges between ranks": RANKS,
    "Halves of a GroupNorm": GROUPS,
    "Other estimates of the variance": BASELINES,
}
