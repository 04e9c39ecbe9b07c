"""Matrix products, quotients and softmaxes."""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.graph.microsoft.source import Dims, Source


def fused_matmul(source: Source) -> None:
    """FusedMatMul(a, b): alpha times a product, of matrices that may be turned; of two matrices a Gemm."""
    a, b = source.operand(0), source.operand(1)
    alpha = float(source.attribute("alpha", 1.0))
    turned = [bool(source.attribute(name, 0)) for name in ("transA", "transB")]
    if any(source.attribute(name, 0) for name in ("transBatchA", "transBatchB")):
        raise source.error("turns batches of matrices: write it by Transpose and MatMul.")
    shape = None if source.node.outputs[0].shape is None else source.dims(source.node.outputs[0])
    if source.rank(a) == 2 and source.rank(b) == 2:
        given = {"alpha": alpha, "transA": int(turned[0]), "transB": int(turned[1])}
        source.give(0, source.node_of("Gemm", [a, b], [(shape, source.dtype(a))], given)[0])
        return
    if turned[0]:
        a = _turned(source, a)
    if turned[1]:
        b = _turned(source, b)
    product = source.node_of("MatMul", [a, b], [(shape, source.dtype(a))])[0]
    if alpha != 1:
        product = source.op("Mul", product, source.number(alpha, a, "alpha"))
    source.give(0, product)


def _turned(source: Source, value: ir.Value) -> ir.Value:
    dims: Dims = source.dims(value)
    if len(dims) < 2:
        return value
    order = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
    return source.op("Transpose", value, shape=[dims[i] for i in order], perm=order)


def div_grad(source: Source) -> None:
    """DivGrad(dy, a, b): dy/b, and -dy*a/(b*b), summed where an operand was broadcast."""
    dy, a, b = (source.operand(place) for place in range(3))
    if source.result(0) is not None:
        source.give(0, source.fit(source.calculate("Div", dy, b), a))
    if source.result(1) is not None:
        slope = source.calculate("Div", source.op("Neg", a), source.calculate("Mul", b, b))
        source.give(1, source.fit(source.calculate("Mul", dy, slope), b))


def softmax_grad(source: Source) -> None:
    """SoftmaxGrad_13(dy, y): y*(dy - sum of dy*y along the axis)."""
    dy, y = source.operand(0), source.operand(1)
    total = source.sum(source.op("Mul", dy, y), [_axis(source, y)], keepdims=True)
    source.give(0, source.op("Mul", y, source.op("Sub", dy, total)))


def log_softmax_grad(source: Source) -> None:
    """LogSoftmaxGrad_13(dy, y): dy - exp(y)*(sum of dy along the axis)."""
    dy, y = source.operand(0), source.operand(1)
    total = source.sum(dy, [_axis(source, y)], keepdims=True)
    source.give(0, source.op("Sub", dy, source.op("Mul", source.op("Exp", y), total)))


def _axis(source: Source, y: ir.Value) -> int:
    return int(source.attribute("axis", -1)) % source.rank(y)


CONVERSIONS = {
    "FusedMatMul": fused_matmul,
    "DivGrad": div_grad,
    "SoftmaxGrad_13": softmax_grad,
    "LogSoftmaxGrad_13": log_softmax_grad,
}
