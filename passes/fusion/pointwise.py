"""RCF and BNFF forward: what happens to a map elementwise moves into the operators that read the result.

    z = NormalizePointwise(x, a, b)
    y = ReluPointwise(z)                  ->   u = NormalizeReluConv(x, w, a, b)
    u = Conv(y, w)                             dy, dw = NormalizeReluConvGrad(du, x, w, a, b)
    dy, dw = ConvGrad(du, y, w)

Neither z nor y is stored ([Jung19], section 3.2: RCF moves the Relu, BNFF the normalise half as well). A normalised
map goes into an Add as one of its operands, with its own coefficients and activation; the Relu after an Add goes into
the Add. A gate behind a normalised map goes with it: NormalizeReluGateConv, and NormalizeReluGateConvGrad for the
weight's gradient. Where the sum is stored anyway, because its mask or a skip reads it, the activation goes into what
reads its result, so that this is not stored beside it:

    s = NormalizeAddPointwise(x, a, b, skip)             s = NormalizeAddPointwise(x, a, b, skip)
    y = QuickGeluPointwise(s)                     ->     u = QuickGeluConv(s, w)
    u = Conv(y, w);  t = Add(v, y)                       t = QuickGeluAddPointwise(s, v)

So it is of a map that a convolution stores without a BatchNorm, which the mask reads (ConvNeXt's Gelu): it goes into
the one convolution behind it, and into that one's gradient, which takes the mask on its way out.

Moves into every reader that has room for the steps; readers that have none (a Concat, a Reshape, ...) keep the stored
map alive, and the refusal names them. RCF alone (`ReluConvFusion`) is all or nothing: it refuses a Relu whose result
is an output or has a reader that is not a convolution, because then the map must exist anyway.
"""

from __future__ import annotations

import onnx_ir as ir

from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.spec import ACTIVATION_GRADS, CONV_GRADS, CONVS, OF_GRADIENT, OpSpec, skip_activation
from bnfuse.passes.dialect.source_ops import forward_of, read
from bnfuse.passes.dialect.steps import try_spec
from bnfuse.passes.fusion.mask import fuse_mask
from bnfuse.passes.rewriter import Editor, FusionResult, Op

SUMS = {"Add", "AddNormalized"}
OF_TERMS = ("a", "b", "active", "gate", "skip", "skip_a", "skip_b", "skip_gate")


class ReluConvFusion(ir.passes.InPlacePass):
    """Move the ReLU alone, into convolutions alone: RCF ([Jung19], section 3.2)."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "rcf")
        for node in list(model.graph):
            relu = read(node)
            if relu is None or relu.spec != OpSpec(("Relu",), "Pointwise"):
                continue
            if reason := why_not_conv(relu):
                editor.refuse(node, reason)
                continue
            move_into_readers(editor, relu)
            for mask in [use.node for use in relu.operands["x"].uses() if _is_mask(use.node)]:
                if (op := read(mask)) is not None:
                    fuse_mask(editor, op)
        return editor.result()


def why_not_conv(relu: Op) -> str | None:
    """Tell why a Relu cannot move into its readers, or None: its map is an output, or not only convolutions read it."""
    y = relu.results["y"]
    if y.is_graph_output():
        return f"{y.name} is a graph output"
    readers = [read(use.node) for use in y.uses()]
    others = {
        use.node.op_type
        for use, op in zip(y.uses(), readers, strict=True)
        if op is None
        or not isinstance(op.spec, OpSpec)
        or (op.spec.core not in (*CONVS, *CONV_GRADS) and not _is_mask(op.node))
    }
    return f"{y.name} is also read by {', '.join(sorted(others))}" if others else None


def _is_mask(node: ir.Node) -> bool:
    op = read(node)
    return op is not None and op.spec == OpSpec((), "PointwiseGrad", ("ReluGrad",))


class PointwiseFusion(ir.passes.InPlacePass):
    """Move normalise halves and what follows them into whatever reads them: BNFF forward ([Jung19], section 3.2)."""

    def call(self, model: ir.Model) -> FusionResult:
        """Rewrite the model in place; gives what was fused and what was refused, by node names."""
        editor = Editor(model, "bnff")
        pending = list(model.graph)
        while pending:
            node = pending.pop(0)
            op = read(node) if node.graph is not None else None
            if op is None or not isinstance(op.spec, OpSpec) or op.spec.core != "Pointwise" or op.spec.epilogue:
                continue
            if (
                ("Normalize" in op.spec.prologue and not SUMS & {*op.spec.prologue})
                or is_of_stored_sum(op)
                or is_of_stored_product(op)
            ):
                pending += move_into_readers(editor, op)
            elif SUMS & {*op.spec.prologue} and op.spec.prologue[-1] not in ACTIVATIONS:
                pending += merge_activation(editor, op)
        return editor.result()


def move_into_readers(editor: Editor, source: Op) -> list[ir.Node]:
    """Move a Pointwise's steps into every reader with room for them; it goes where no reader is left.

    Gives the new Pointwise operators.
    """
    y = source.results["y"]
    made = []
    for reader in dict.fromkeys(use.node for use in y.uses()):
        op = read(reader)
        new = absorb(editor, source, op) if op is not None and isinstance(op.spec, OpSpec) else None
        if new is None:
            editor.refuse(source.node, f"{reader.op_type} '{reader.name}' reads {y.name} and has no room for its steps")
        elif new.steps.core == "Pointwise":
            made.append(new.node)
    editor.remove_dead([source.node])
    return made


def absorb(editor: Editor, source: Op, reader: Op) -> Op | None:
    """Put the source's steps into the reader's prologue, in the graph already; None where it has no room."""
    found = absorbed(source, reader)
    if found is None:
        return None
    spec, operands = found
    return editor.replace(reader, spec, [source.node], operands=operands, attributes=source.attributes)


def has_room_for(source: Op, node: ir.Node) -> bool:
    """Tell whether a reader of the source's result has room for the source's steps."""
    reader = read(node)
    return reader is not None and isinstance(reader.spec, OpSpec) and absorbed(source, reader) is not None


def absorbed(source: Op, reader: Op) -> tuple[OpSpec, dict[str, ir.Value]] | None:
    """Compose the reader's operator with the source's steps in its prologue, and its operands that change; None where
    it has no room."""
    y, steps = source.results["y"], source.steps.prologue
    names = [name for name, value in reader.operands.items() if value is y]
    if names == ["skip"]:
        return absorbed_skip(source, reader)
    if names != ["x"] or "Reduce" in reader.steps.epilogue:
        return None  # a reduction is over x itself
    if "Normalize" in reader.steps.prologue and "Normalize" in steps:
        return None  # x is the input of another BN there
    prologue = (*steps, *reader.steps.prologue)
    if reader.steps.is_gradient and reader.steps.core not in CONV_GRADS:
        # only convolutions need the activated map itself; a mask needs z, and a pooling's gradient the shape
        masked = [step for step in reader.steps.epilogue if step in ACTIVATION_GRADS]
        if masked and "Gate" in steps and source.steps.activations:
            return None
        front = tuple(step for step in steps if step in ("Normalize", "Gate")) if masked else ()
        if masked and source.steps.activations and (source.steps.activations, masked) != (("Relu",), ["ReluGrad"]):
            return None  # a Relu's result has the sign of its input; no other activation's result tells its mask
        prologue = (*(s for s in reader.steps.prologue if s in OF_GRADIENT), *front)
        if masked and "Normalize" not in steps:
            prologue = reader.steps.prologue
    elif reader.steps.is_gradient:
        own = [step for step in reader.steps.prologue if step in OF_GRADIENT]
        prologue = (*own, *steps, *reader.steps.prologue[len(own) :])
    spec = try_spec(prologue, reader.steps.core, reader.steps.epilogue)
    if spec is None or not attributes_agree(source, reader):
        return None
    operands = {"x": source.operands["x"]}
    operands |= {name: source.operands[name] for name in OF_TERMS if name in source.operands}
    return spec, operands


def absorbed_skip(source: Op, reader: Op) -> tuple[OpSpec, dict[str, ir.Value]] | None:
    """Compose an Add with the steps of its second operand: with its own coefficients and activation, or in place of the
    first operand, which becomes the second one; None where it has no room."""
    prologue, leaving = reader.steps.prologue, (reader.steps.core, reader.steps.epilogue)
    if prologue[0] == "Add":
        spec = try_spec((*source.steps.prologue, *prologue), *leaving)
        operands = {**source.operands, "skip": reader.operands["x"]}
    else:
        gated = "SkipGate" in prologue
        if "Add" not in prologue or skip_activation(prologue) or (gated and "Gate" in source.steps.prologue):
            return None
        place = prologue.index("Add")
        front, rest = prologue[: place - gated], prologue[place + 1 :]
        if own := steps_of_skip((*source.steps.prologue, *(["Gate"] if gated else []))):
            spec, operands = try_spec((*front, *own, *rest), *leaving), as_skip(source.operands)
        elif not gated and (own := steps_of_skip(front)):
            spec = try_spec((*source.steps.prologue, *own, *rest), *leaving)
            operands = {**source.operands, **as_skip(reader.operands)}
        else:
            return None
    return None if spec is None or not attributes_agree(source, reader) else (spec, operands)


def steps_of_skip(steps: tuple[str, ...]) -> tuple[str, ...] | None:
    """Give the steps that add a skip which goes through `steps`; None where they are more than a skip can have."""
    normalized = steps[:1] == ("Normalize",)
    gated = steps[-1:] == ("Gate",)
    kinds = steps[normalized : len(steps) - gated]
    if len(kinds) > 1 or not {*kinds} <= {*ACTIVATIONS}:
        return None
    gate = ("SkipGate",) if gated else ()
    return (*(f"Skip{kind}" for kind in kinds), *gate, "AddNormalized" if normalized else "Add")


def as_skip(operands: dict[str, ir.Value]) -> dict[str, ir.Value]:
    """Name the operands of a normalised, perhaps gated map as those of the second one of a sum."""
    names = {"x": "skip", "a": "skip_a", "b": "skip_b", "gate": "skip_gate"}
    return {name: operands[own] for own, name in names.items() if own in operands}


def is_of_stored_sum(op: Op) -> bool:
    """Tell whether an operator activates a sum that is stored anyway, because others read it too."""
    x = op.operands["x"]
    summed = forward_of(x)
    is_sum = summed is not None and summed.steps.core == "Pointwise" and bool(SUMS & {*summed.steps.prologue})
    return _is_activation(op) and is_sum and (x.is_graph_output() or len(x.uses()) > 1)


def is_of_stored_product(op: Op) -> bool:
    """Tell whether an operator activates what a convolution stores for its mask, and one other convolution and its
    gradient read the result.

    That one is of a single group: its kernels activate an element where they pack it, not for each tap. Further readers
    would each compute the activation anew.
    """
    x, y = op.operands["x"], op.results["y"]
    maker = forward_of(x)
    if not _is_activation(op) or op.steps.prologue == ("Relu",) or maker is None or maker.steps.core not in CONVS:
        return False
    masks = [reader for use in x.uses() if (reader := read(use.node)) is not None and _masks(reader, x)]
    readers = list(dict.fromkeys(use.node for use in y.uses()))
    if not masks or y.is_graph_output() or not all(is_dense(node) and has_room_for(op, node) for node in readers):
        return False
    return sum(reader.steps.core in CONVS for node in readers if (reader := read(node)) is not None) == 1


def is_dense(node: ir.Node) -> bool:
    """Tell whether a node is a convolution of a single group, or a gradient of one."""
    op = read(node)
    if op is None or not isinstance(op.spec, OpSpec) or op.spec.core not in (*CONVS, *CONV_GRADS):
        return False
    return bool(op.attributes["group"] == 1)


def _masks(op: Op, x: ir.Value) -> bool:
    """Tell whether a PointwiseGrad multiplies by the slope of an activation at x."""
    is_grad = isinstance(op.spec, OpSpec) and op.spec.core == "PointwiseGrad" and op.operands.get("x") is x
    return is_grad and bool({*op.steps.epilogue} & {*ACTIVATION_GRADS})


def merge_activation(editor: Editor, add: Op) -> list[ir.Node]:
    """Move the activation after an Add into it, where the sum itself has no other use.

    A ReluGrad that holds the sum reads the Relu's result instead, which has the same sign.
    """
    total = add.results["y"]
    readers = {use.node: read(use.node) for use in total.uses()}
    activations = [op for op in readers.values() if op is not None and _is_activation(op)]
    masks = [op for op in readers.values() if op is not None and _is_mask(op.node) and op.operands["dy"] is not total]
    if total.is_graph_output() or len(activations) != 1 or len(activations) + len(masks) != len(readers):
        return []
    activation = activations[0]
    if masks and activation.steps.prologue != ("Relu",):
        return []
    y = activation.results["y"]
    for mask in masks:
        mask.node.replace_input_with(1, y)
    spec = try_spec((*add.steps.prologue, *activation.steps.prologue), "Pointwise", ())
    if spec is None or not attributes_agree(add, activation):
        return []
    merged = editor.replace(
        activation, spec, [add.node], operands=add.operands, attributes={**add.attributes, **activation.attributes}
    )
    return [merged.node]


def _is_activation(op: Op) -> bool:
    return (
        isinstance(op.spec, OpSpec)
        and op.spec.core == "Pointwise"
        and op.spec.prologue[0] in ACTIVATIONS
        and len(op.spec.prologue) == 1
    )


def attributes_agree(source: Op, reader: Op) -> bool:
    """Tell whether the attributes that both have agree: steps of one kind share an operator's attributes."""
    return all(reader.attributes.get(key, value) == value for key, value in source.attributes.items())
