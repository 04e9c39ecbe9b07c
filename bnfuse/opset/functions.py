"""The function bodies of `ai.bnfuse` operators: standard ONNX, generated from the steps of the name.

A rewritten file carries one model-local function per operator it uses, so that any runtime executes it. Bodies
import the model's own opset and use operators that did not change between opsets 13 and 21. Maps are float32 NCHW of
any shape, coefficients [C], or [N, C] where each sample has its own.
Attributes of the node reach the body by reference, and as tensors through Constant.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.body import Body, reference
from bnfuse.opset.functions_conv import input_gradient, transposed, transposed_input_gradient, weight_gradient
from bnfuse.opset.functions_group import GROUP
from bnfuse.opset.functions_sampling import SAMPLING
from bnfuse.opset.functions_whole import WHOLE, running, unbiased
from bnfuse.opset.plain import PlainOp
from bnfuse.opset.spec import (
    ACTIVATION_GRADS,
    ADDED_REDUCTIONS,
    CONV_GRADS,
    DOMAIN,
    FORWARD_CORES,
    IMAGE_GATES,
    MASKED_REDUCTIONS,
    PLUS,
    SHARED,
    TRANSPOSED,
    VERSION,
    WEIGHT_GRADS,
    OpSpec,
    applied,
    around_batch_norm_grad,
    find,
    further_terms,
    masks_gated,
    of_skip,
    parts_of,
    skip_activation,
)

OLDEST_OPSET = 13  # ReduceSum has its axes as an input from here on
TURNED = ir.AttrInt64s("perm", [1, 0])
SCATTER_ADD_OPSET = 16  # ScatterElements can add from here on


def why_not(op: OpSpec | PlainOp, opset_version: int) -> str | None:
    """Why an operator has no body in this opset, or None where it has one."""
    if opset_version < OLDEST_OPSET:
        return f"the model's opset is {opset_version}: {DOMAIN} needs {OLDEST_OPSET} or later"
    if isinstance(op, OpSpec) and op.core == "MaxPoolGrad" and opset_version < SCATTER_ADD_OPSET:
        return f"the model's opset is {opset_version}: the gradient of MaxPool needs {SCATTER_ADD_OPSET} or later"
    return None


def function_for(op: OpSpec | PlainOp, opset_version: int) -> ir.Function:
    """Give the model-local function of an operator, in the given version of the standard opset."""
    if reason := why_not(op, opset_version):
        raise BnfuseError(f"{DOMAIN}::{op.name} has no function body: {reason}. Convert the model to a later opset.")
    body = Body(op)
    if isinstance(op, PlainOp):
        results = dict(zip(op.results, PLAIN[op.name](body), strict=True))
    else:
        results = (backward if op.is_gradient else forward)(op, body)
    outputs = body.results([results[name] for name in op.results])
    operands, imports = list(body.operands.values()), {"": opset_version}
    graph = ir.Graph(operands, outputs, nodes=body.nodes, name=op.name, opset_imports=imports)
    attributes = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in op.attributes]
    if isinstance(op, PlainOp):
        attributes += [ir.convenience.convert_attribute(name, value) for name, value in op.optional]
    return ir.Function(DOMAIN, op.name, graph=graph, attributes=attributes)


def add_functions(model: ir.Model) -> None:
    """Make the functions and opset imports of a model those that its `ai.bnfuse` nodes need, in its own opset."""
    for identifier in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[identifier]
    for name, node in {node.op_type: node for node in model.graph if node.domain == DOMAIN}.items():
        function = function_for(_known(name, node), model.opset_imports[""])
        model.functions[function.identifier()] = function
    _import_domains(model)


def _known(name: str, node: ir.Node) -> OpSpec | PlainOp:
    op = find(name)
    if op is None:
        raise at_node(node.name or "", f"{DOMAIN}::{name}", "is no operator of this op set. See docs/ops.md.")
    return op


def _import_domains(model: ir.Model) -> None:
    if any(node.domain == DOMAIN for node in model.graph):
        model.opset_imports[DOMAIN] = VERSION
    else:
        model.opset_imports.pop(DOMAIN, None)


# Forward


def forward(op: OpSpec, body: Body) -> dict[str, ir.Value]:
    """Write the body of a forward operator; gives its results by name."""
    x = body["x"]
    for step, of_some in applied(op.prologue):
        made = prologue_step(step, x, body, op.prologue)
        x = chosen("active", made, x, body) if of_some else made
    results = {"stored": x}
    attributes = {name: reference(name) for name in FORWARD_CORES[op.core]}
    if op.core == "Conv":
        y = body("Conv", x, body["weight"], **attributes)
    elif op.core == "ConvTranspose":
        y = transposed(x, body)
    elif op.core == "MaxPool":
        y, results["indices"] = body.node("MaxPool", [x], dict(attributes), wanted=(True, True))
    elif op.core == "Resample":
        y = body("MatMul", body("MatMul", body["rows"], x), body("Transpose", body["columns"], perm=TURNED))
    elif op.core == "Pointwise":
        y = x
    else:
        y = body(op.core, x, **attributes)
    if "Bias" in op.epilogue:
        y = body("Add", y, body.per_channel("bias"))
    if "Relu" in op.epilogue:
        y = activation("Relu", y, body)
    if "Statistics" in op.epilogue:
        results["mean"], results["variance"] = statistics(y, body)
    if "ImageStatistics" in op.epilogue:
        results["image_mean"], results["image_variance"] = image_statistics(y, body)
    return {**results, "y": y}


def prologue_step(step: str, x: ir.Value, body: Body, prologue: tuple[str, ...]) -> ir.Value:
    """Write one step of a prologue, on the map that the core reads."""
    if step == "Normalize":
        return affine(x, "a", "b", body)
    if step == "Gate":
        return body("Mul", body["gate"], x)
    if step in ("Add", "AddNormalized"):
        skip = body["skip"] if step == "Add" else affine(body["skip"], "skip_a", "skip_b", body)
        kind = skip_activation(prologue)
        skip = activation(kind, skip, body) if kind else skip
        x = body("Add", x, body("Mul", body["skip_gate"], skip) if "SkipGate" in prologue else skip)
        for name, a, b in further_terms(body.operands):
            x = body("Add", x, affine(body[name], a, b, body) if a in body.operands else body[name])
        return x
    return x if step in ("SkipGate", *PLUS) or of_skip(step) else activation(step, x, body)


def chosen(channels: str, made: ir.Value, kept: ir.Value, body: Body) -> ir.Value:
    """Write what is made in the channels where the operand, [C], is positive, and what is kept in the others."""
    return body("Where", body("Greater", body.per_channel(channels), body.constant(0.0)), made, kept)


def affine(x: ir.Value, factor: str, shift: str, body: Body) -> ir.Value:
    """Write factor*x + shift, both [C] or [N, C]."""
    return body("Add", body("Mul", body.coefficient(factor), x), body.coefficient(shift))


def activation(kind: str, z: ir.Value, body: Body) -> ir.Value:
    """Write an activation of z."""
    return body.formula(ACTIVATIONS[kind].value, z=z)


def statistics(y: ir.Value, body: Body) -> tuple[ir.Value, ir.Value]:
    """Mean and biased variance in two passes (a difference of raw sums would cancel where |mean| is large)."""
    total = body("ReduceSum", y, body.constant([0, 2, 3]), keepdims=1)
    count = body("Cast", body("Div", body("Size", y), body("Size", total)), to=int(ir.DataType.FLOAT))
    mean = body("Div", total, count)
    centred = body("Sub", y, mean)
    variance = body("Div", body.sum(body("Mul", centred, centred)), count)
    return body("Reshape", mean, body.constant([-1])), variance


def image_statistics(y: ir.Value, body: Body) -> tuple[ir.Value, ir.Value]:
    """Mean and biased variance of each image and channel, [N, C], in two passes."""
    total = body("ReduceSum", y, body.constant([2, 3]), keepdims=1)
    count = body("Cast", body("Div", body("Size", y), body("Size", total)), to=int(ir.DataType.FLOAT))
    centred = body("Sub", y, body("Div", total, count))
    variance = body("Div", image_sum(body("Mul", centred, centred), body), count)
    return body("Div", image_sum(y, body), count), variance


def image_sum(x: ir.Value, body: Body) -> ir.Value:
    """Sum over H and W, [N, C]."""
    return body("ReduceSum", x, body.constant([2, 3]), keepdims=0)


# Backward


def backward(op: OpSpec, body: Body) -> dict[str, ir.Value]:
    """Write the body of a gradient; gives its results by name."""
    dy = body["dy"]
    if "Slice" in op.prologue:
        dy = body.slice(dy, body.attribute("grad_start"), body.attribute("grad_stop"), axis=1)
    if "GateGrad" in op.prologue:
        dy = body("Mul", body["grad_gate"], dy)
    if "BatchNormGrad" in op.prologue:
        dy = own_batch_norm_grad(op, dy, body)
    results: dict[str, ir.Value] = {}
    if "BiasGrad" in op.epilogue:
        results["dbias"] = body.sum(dy)
    masked = bool({*ACTIVATION_GRADS} & {*op.epilogue})
    z = act = body["x"] if op.reads_x else dy
    if "Normalize" in op.prologue and (masked or op.weighs):
        z = act = affine(z, "a", "b", body)
    if masks_gated(op.prologue) and (masked or op.weighs):
        z = act = body("Mul", body["gate"], z)
    if op.weighs:
        for kind in op.activations:
            act = activation(kind, z, body)
        if "Where" in op.prologue:
            act = chosen("active", act, z, body)
        if "Gate" in op.prologue and not masks_gated(op.prologue):
            act = body("Mul", body["gate"], act)
        for step in op.prologue:
            act = prologue_step(step, act, body, op.prologue) if step in ("Add", "AddNormalized") else act
        ends = (act, dy) if op.is_transposed else (dy, act)
        results["dweight"] = weight_gradient(*ends, body)
    if op.core in WEIGHT_GRADS:
        return results
    return {**results, **epilogue(op, core_grad(op.core, dy, body), z, body)}


def own_batch_norm_grad(op: OpSpec, dy: ir.Value, body: Body) -> ir.Value:
    """Write dy behind BatchNormGrad and the gradients of activations around it."""
    before, behind = around_batch_norm_grad(op.prologue)
    x = body["grad_x"]
    if "AddGrad" in op.prologue:
        dy = body("Add", dy, body["grad_other"])
    if before:
        dy = body.formula(GRADIENTS[before].gradient, z=affine(x, "grad_a", "grad_b", body), d=dy)
    if behind is None:
        return batch_norm_grad(dy, "grad_", body)
    dy = batch_norm_grad(dy, "grad_", body, activation(behind.removesuffix("Grad"), x, body))
    return body.formula(GRADIENTS[behind].gradient, z=x, d=dy)


def batch_norm_grad(dz: ir.Value, prefix: str, body: Body, x: ir.Value | None = None) -> ir.Value:
    """Write the input gradient of a BN, p*dz + q*x + w; the names of the other operands begin with `prefix`."""
    own = affine(body[f"{prefix}x"] if x is None else x, f"{prefix}q", f"{prefix}w", body)
    return body("Add", own, body("Mul", body.coefficient(f"{prefix}p"), dz))


def core_grad(core: str, dy: ir.Value, body: Body) -> ir.Value:
    """Write the gradient at what the core read."""
    if core in TRANSPOSED:
        return transposed_input_gradient(dy, body)
    if core in CONV_GRADS:
        return input_gradient(dy, body)
    if core == "ResampleGrad":
        return body("MatMul", body("MatMul", body("Transpose", body["rows"], perm=TURNED), dy), body["columns"])
    if core == "MaxPoolGrad":
        return max_pool_grad(dy, body)
    if core == "AveragePoolGrad":
        return average_pool_grad(dy, body)
    if core == "GlobalAveragePoolGrad":
        x = body["x"]
        count = body("Cast", body("Div", body("Size", x), body("Size", dy)), to=int(ir.DataType.FLOAT))
        return body("Expand", body("Div", dy, count), body("Shape", x))
    return dy


def max_pool_grad(dy: ir.Value, body: Body) -> ir.Value:
    """Give the gradients are added up at the flat indices of the maxima."""
    everything, shape = body.constant([-1]), body("Shape", body["x"])
    zeros = body("ConstantOfShape", body("Reshape", body("Size", body["x"]), body.constant([1])))
    indices = body("Reshape", body["indices"], everything)
    flat = body("ScatterElements", zeros, indices, body("Reshape", dy, everything), axis=0, reduction="add")
    return body("Reshape", flat, shape)


def average_pool_grad(dy: ir.Value, body: Body) -> ir.Value:
    """Each gradient, divided by the elements of its window, is spread over the window by a ConvTranspose with ones.

    The windows reach over (outputs - 1)*stride + kernel rows of the padded map, which may be fewer than it has (the
    last rows are read by no window) or more (ceil_mode), so what they cover is padded or cut to size. How many
    elements a window averages is the convolution of ones over a map that holds 1 inside, count_include_pad in the
    padding and 0 beyond it.
    """
    two, first, last = body.constant([1, 1]), body.constant([0]), body.constant([4])
    middle = body.constant([2])
    shape = body("Shape", body["x"])
    extent = body.slice(shape, middle, last, axis=0)
    out = body.slice(body("Shape", dy), middle, last, axis=0)
    before = body.slice(body.attribute("pads"), first, middle, axis=0)
    after = body.slice(body.attribute("pads"), middle, last, axis=0)
    kernel = body.attribute("kernel_shape")
    strides = reference("strides")
    reach = body("Add", body("Mul", body("Sub", out, two), body.attribute("strides")), kernel)

    ones = _filled(body("Concat", two, kernel, axis=0), body)
    inside = _filled(body("Concat", two, extent, axis=0), body)
    include = body("Cast", body.attribute("count_include_pad"), to=int(ir.DataType.FLOAT))
    include = body("Reshape", include, body("Constant", value=ir.AttrTensor("value", ir.tensor(np.zeros(0, np.int64)))))
    padded = _pad(inside, before, after, include, body)
    padded_extent = body("Add", extent, body("Add", before, after))
    none = body("Sub", before, before)
    covered = _pad(padded, none, body("Sub", reach, padded_extent), body.constant(0.0), body)
    count = body("Conv", covered, ones, strides=strides)

    share = body("Reshape", body("Div", dy, count), body("Concat", body.constant([-1, 1]), out, axis=0))
    spread = body("ConvTranspose", share, ones, strides=strides)
    missing = body("Sub", body("Add", extent, before), reach)
    dx = _pad(spread, body("Neg", before), missing, body.constant(0.0), body)
    return body("Reshape", dx, shape)


def _filled(shape: ir.Value, body: Body) -> ir.Value:
    """Ones of a shape that is known at run time only."""
    one = ir.AttrTensor("value", ir.tensor(np.ones(1, np.float32)))
    return body("ConstantOfShape", shape, value=one)


def _pad(x: ir.Value, before: ir.Value, after: ir.Value, fill: ir.Value, body: Body) -> ir.Value:
    """Pad rows and columns; negative pads cut."""
    none = body.constant([0, 0])
    return body("Pad", x, body("Concat", none, before, none, after, axis=0), fill)


def epilogue(op: OpSpec, dx: ir.Value, z: ir.Value, body: Body) -> dict[str, ir.Value]:
    """Write the steps of a gradient on its way out; gives dx and what they sum, by name."""
    results: dict[str, ir.Value] = {}
    other = 0
    for step in op.epilogue:
        if step == "AddGradient":
            dx = body("Add", dx, body["other"])
        elif step == "AddGatedGradient":
            dx = body("Add", dx, body("Mul", body["other_gate"], body["other"]))
        elif step == "AddBatchNormGrad":
            dx = body("Add", dx, batch_norm_grad(body["other_dy"], "other_", body))
        elif step == "AddSkipGradient":
            dx = body("Add", dx, body["skip_grad"])
        elif step in ACTIVATION_GRADS:
            masked = body.formula(GRADIENTS[step].gradient, z=z, d=dx)
            dx = chosen("masked", masked, dx, body) if "Where" in op.epilogue else masked
        elif step == "Reduce":
            results["dbeta"], results["dgamma"] = reduce(dx, body["x"], ("mean", "inv_std"), body)
        elif step in SHARED:
            other += 1
            x = body[f"x_{other}"]
            if other in parts_of(op.epilogue):
                x = extended(x, f"start_{other}", f"part_{other}", body)
            shared = body("Mul", body[f"gate_{other}"], dx) if step == "ReduceGated" else dx
            if step in MASKED_REDUCTIONS:
                behind = affine(x, f"a_{other}", f"b_{other}", body)
                whole = body("Add", dx, body[f"other_{other}"]) if step in ADDED_REDUCTIONS else dx
                shared = body.formula(GRADIENTS[MASKED_REDUCTIONS[step]].gradient, z=behind, d=whole)
            if other in parts_of(op.epilogue):
                shared = chosen(f"part_{other}", shared, body.constant(0.0), body)
            sums = reduce(shared, x, (f"mean_{other}", f"inv_std_{other}"), body)
            results[f"dbeta_{other}"], results[f"dgamma_{other}"] = sums
        elif step == "Scale":
            dx = body("Mul", body.per_channel("acc_p"), dx)
        elif step == "Accumulate":
            written = body.slice(body["acc"], body.attribute("acc_start"), body.attribute("acc_stop"), axis=1)
            dx = body("Add", written, body("Mul", body.per_channel("acc_p"), dx))
        elif step in ("ImageReduce", "ImageReduceOther"):
            read = body["x" if step == "ImageReduce" else "reduced_x"]
            results["image_sum"], results["image_dot"] = image_sum(dx, body), image_sum(body("Mul", dx, read), body)
        elif step in IMAGE_GATES:
            results |= image_gate(IMAGE_GATES[step], dx, body)
    return {"dx": dx, **results}


def image_gate(kind: str | None, dx: ir.Value, body: Body) -> dict[str, ir.Value]:
    """Write what the gradient of a gate and of the BatchNorm before it sum over each image, [N, C] each."""
    x = body["gated_x"]
    z = affine(x, "gated_a", "gated_b", body)
    normalised = body("Mul", body("Sub", x, body.per_channel("gated_mean")), body.per_channel("gated_inv_std"))
    ones = body("Expand", body.constant(1.0), body("Shape", x))
    value = activation(kind, z, body) if kind else z
    slope = body.formula(GRADIENTS[f"{kind}Grad"].gradient, z=z, d=ones) if kind else ones
    sloped = body("Mul", dx, slope)
    summed = {
        "image_gate": body("Mul", dx, value),
        "image_beta": sloped,
        "image_gamma": body("Mul", sloped, normalised),
        "image_slope": slope,
        "image_tilt": body("Mul", slope, normalised),
    }
    return {name: image_sum(each, body) for name, each in summed.items()}


def extended(x: ir.Value, start: str, channels: str, body: Body) -> ir.Value:
    """Write zeros around the channels of a map: from the attribute `start` on, in as many as an operand has."""
    none, before = body.constant([0]), body.attribute(start)
    count = body.slice(body("Shape", x), body.constant([1]), body.constant([2]), axis=0)
    after = body("Sub", body("Sub", body("Shape", body[channels]), before), count)
    pads = body("Concat", none, before, body.constant([0, 0]), none, after, body.constant([0, 0]), axis=0)
    return body("Pad", x, pads, body.constant(0.0))


def reduce(dz: ir.Value, x: ir.Value, names: tuple[str, str], body: Body) -> tuple[ir.Value, ir.Value]:
    """Write dbeta and dgamma, [C], of dz and x; `names` are mean and inv_std."""
    mean, inv_std = names
    centred = body("Sub", x, body.per_channel(mean))
    normalised = body("Mul", centred, body.per_channel(inv_std))
    return body.sum(dz), body.sum(body("Mul", dz, normalised))


# Operators that are not composed of steps


def _finalize(body: Body) -> tuple[ir.Value, ...]:
    inv_std = body.power(body("Add", body["variance"], body.attribute("epsilon")), -0.5)
    a = body("Mul", body["scale"], inv_std)
    b = body("Sub", body["bias"], body("Mul", body["mean"], a))
    estimate = unbiased(body["variance"], body.attribute("elements"), body)
    return a, b, inv_std, running("mean", body["mean"], body), running("variance", estimate, body)


def _terms(body: Body) -> tuple[ir.Value, ir.Value]:
    beta_term = body("Mul", body["a"], body["dbeta"])
    return beta_term, body("Mul", body("Mul", body["a"], body["inv_std"]), body["dgamma"])


def _terms_accumulate(body: Body) -> tuple[ir.Value, ir.Value]:
    start, stop = body.attribute("acc_start"), body.attribute("acc_stop")
    beta_term, gamma_term = _terms(body)
    return (
        body("Add", body.slice(body["beta_acc"], start, stop, axis=0), beta_term),
        body("Add", body.slice(body["gamma_acc"], start, stop, axis=0), gamma_term),
    )


def _grad_finalize(body: Body) -> tuple[ir.Value, ir.Value]:
    start, stop = body.attribute("start"), body.attribute("stop")
    count = body("Neg", body("Cast", body.attribute("count"), to=int(ir.DataType.FLOAT)))
    q = body("Div", body.slice(body["gamma_term"], start, stop, axis=0), count)
    w = body("Div", body.slice(body["beta_term"], start, stop, axis=0), count)
    return q, body("Sub", w, body("Mul", q, body["mean"]))


def _all_terms(body: Body) -> tuple[ir.Value, ir.Value]:
    start, stop = body.attribute("start"), body.attribute("stop")
    return body.slice(body["beta_term"], start, stop, axis=0), body.slice(body["gamma_term"], start, stop, axis=0)


PLAIN = {
    "BatchNormStatistics": lambda body: statistics(body["x"], body),
    "BatchNormFinalize": _finalize,
    "BatchNormGradReduce": lambda body: reduce(body["dz"], body["x"], ("mean", "inv_std"), body),
    "BatchNormGradTerms": _terms,
    "BatchNormGradTermsAccumulate": _terms_accumulate,
    "BatchNormGradFinalize": _grad_finalize,
    **WHOLE,
    **SAMPLING,
    **GROUP,
    "AllReduceMoments": lambda body: (body["mean"], body["variance"]),
    "AllReduceTerms": _all_terms,
}
