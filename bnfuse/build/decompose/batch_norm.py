"""BatchNormalizations that no pass takes apart.

frozen: y = a*x + b    a = scale / sqrt(running variance + epsilon), b = bias - running mean * a;
                       of a map a NormalizePointwise, which the passes move into what reads y
of a weight            weight standardisation through batch_norm (timm): by the mean and variance of the weight
"""

from __future__ import annotations

from bnfuse.opset.spec import OpSpec

from .writer import Writer

NORMALIZE = OpSpec(("Normalize",), "Pointwise")


def batch_normalization(write: Writer) -> None:
    """Write a frozen BatchNormalization, or one of what does not depend on the data; a training one stays."""
    node = write.node
    x, scale, bias, mean, variance = node.input
    shape = write.shape(x)
    aligned = [shape[1], *[1] * (len(shape) - 2)]
    epsilon = write.number("epsilon", float(write.given.get("epsilon", 1e-5)))
    if not write.given.get("training_mode"):
        a = write.add("Div", [scale, write.add("Sqrt", [write.add("Add", [variance, epsilon])])])
        b = write.add("Sub", [bias, write.add("Mul", [mean, a])])
        if len(shape) == 4 and x in write.around.from_data:
            write.own(NORMALIZE, [x, a, b])
            return
        scaled = write.add("Mul", [x, write.reshape(a, aligned)])
        write.give(write.add("Add", [scaled, write.reshape(b, aligned)]))
    elif x not in write.around.from_data:
        axes = [axis for axis in range(len(shape)) if axis != 1]
        centred = write.add("Sub", [x, write.reduce("ReduceMean", x, axes)])
        own = write.reduce("ReduceMean", write.add("Mul", [centred, centred]), axes)
        deviation = write.add("Sqrt", [write.add("Add", [own, epsilon])])
        y = write.add("Mul", [centred, write.add("Div", [write.number("one", 1.0), deviation])])
        if not write.is_all(scale, 1.0):
            y = write.add("Mul", [y, write.reshape(scale, aligned)])
        if not write.is_all(bias, 0.0):
            y = write.add("Add", [y, write.reshape(bias, aligned)])
        write.give(y)
