"""What the inputs and outputs of a training graph are for (docs/training-file.md).

Kept in the model's metadata under `bnfuse.roles` as JSON; inferred for files that others wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError

METADATA_KEY = "bnfuse.roles"
BATCH_NORMS = ("BatchNorm", "BatchNormalization", "BatchNormFinalize")
PARAMETERS = {
    **dict.fromkeys(("Conv", "Gemm"), (1, 2)),
    "BatchNorm": (1, 2, 3, 4),
    "GroupNorm": (1, 2),
    "PRelu": (1,),
}
LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


@dataclasses.dataclass(frozen=True)
class GraphSignature:
    """Names of graph inputs and outputs by purpose. Every graph input is in exactly one of the input roles."""

    data: tuple[str, ...]  # inputs fed each step
    labels: tuple[str, ...]
    trainable: tuple[str, ...]  # inputs with an initializer of the same name, updated by the optimiser
    frozen: tuple[str, ...]  # inputs with an initializer of the same name, never changed
    running: dict[str, str]  # running statistics: input -> output that replaces it after the step
    gradients: dict[str, str]  # trainable input -> output that is its gradient
    loss: str | None = None
    logits: str | None = None
    offsets: tuple[str, ...] = ()  # int64 inputs of the sampling passes, drawn once an epoch (sampling.py)
    virtual: tuple[str, ...] = ()  # inputs of virtual samples (VDN), drawn each step
    output_gradients: dict[str, str] = dataclasses.field(default_factory=dict)  # without a loss: output -> input with
    # the gradient there, which somebody else computes
    input_gradients: dict[str, str] = dataclasses.field(default_factory=dict)  # data input -> output that is its
    # gradient, where that is wanted

    @property
    def backward_results(self) -> set[str]:
        """Outputs that the backward phase is for: the gradients of parameters, and of data where they are wanted."""
        return {*self.gradients.values(), *self.input_gradients.values()}

    @property
    def results(self) -> tuple[str, ...]:
        """What the forward phase is for: the loss, or without one the outputs whose gradients come in."""
        return tuple(self.output_gradients) if self.loss is None else (self.loss,)

    def to_json(self) -> str:
        """Write it as it stands in a model's metadata."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GraphSignature:
        """Read what `to_json` wrote. Raises ValueError where the text is something else."""
        try:
            fields = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        known = {field.name: field for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) - set(known):
            raise ValueError("not the roles of a training graph")
        for name, value in fields.items():
            fields[name] = _checked(name, value)
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from None


def _checked(name: str, value: object) -> object:
    if name in ("running", "gradients", "output_gradients", "input_gradients"):
        if isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
            return value
    elif name in ("loss", "logits"):
        if isinstance(value, str) or value is None:
            return value
    elif isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise ValueError(f"{name} is malformed")


def signature_of(
    model: ir.Model, *, data_input: str | Iterable[str] | None = None, labels_input: str | Iterable[str] | None = None
) -> GraphSignature:
    """Read the roles that the model's metadata states, or else infer them from its structure.

    Inferred for foreign files: an output `<input>_grad` is the gradient of that input; the third and fourth operands of
    a BN are running statistics; the loss is the scalar output that a loss node gives, and that node's integer operand
    the labels; the input without a value that is left is the data. `data_input` and `labels_input` overrule.
    """
    stated = model.metadata_props.get(METADATA_KEY)
    if stated is not None:
        try:
            signature = GraphSignature.from_json(stated)
        except ValueError as error:
            raise BnfuseError(
                f"{_file(model)}: its {METADATA_KEY} metadata is damaged ({error}): build it anew"
            ) from None
    else:
        signature = _inferred(model, _names(data_input), _names(labels_input))
    if stated is not None and (data_input is not None or labels_input is not None):
        signature = dataclasses.replace(
            signature, data=_names(data_input) or signature.data, labels=_names(labels_input) or signature.labels
        )
    _check_against(model, signature)
    return signature


def _file(model: ir.Model) -> str:
    return str(model.meta.get("bnfuse.file") or model.graph.name or "model")


def _names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _inferred(model: ir.Model, data: tuple[str, ...], labels: tuple[str, ...]) -> GraphSignature:
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs if value.name}
    outputs = [value.name for value in graph.outputs if value.name]
    gradients = {name[: -len("_grad")]: name for name in outputs if name.endswith("_grad")}
    gradients = {name: gradient for name, gradient in gradients.items() if name in inputs}
    if not gradients:
        raise BnfuseError(
            f"{_file(model)}: is not a training graph: no output is the gradient of an input. Run `bnfuse build`."
        )
    for name in (*data, *labels):
        if name not in inputs:
            raise BnfuseError(f"{_file(model)}: has no input '{name}': there are {', '.join(list(inputs)[:5])}, ...")
    running = _running(graph, inputs)
    loss, loss_node = _loss(model, outputs)
    labels = labels or tuple(name for name in _labels(loss_node) if name in inputs)
    given = {*gradients, *running, *labels, *data}
    frozen = tuple(name for name in inputs if name not in given and _is_variable(graph, inputs[name]))
    rest = tuple(name for name in inputs if name not in {*given, *frozen})
    logits = loss_node.inputs[0].name if loss_node is not None and loss_node.inputs[0] is not None else None
    if loss_node is None:  # the one result that is neither the loss, nor a gradient, nor a statistic
        others = [name for name in outputs if name not in {loss, *gradients.values(), *running.values()}]
        logits = others[0] if len(others) == 1 else None
        if logits is not None and not labels:  # what the loss reads beside the scores, and not for them
            read = _inputs_of(next(value for value in graph.outputs if value.name == logits))
            labels = tuple(name for name in rest if name not in read and name not in data)
            rest = tuple(name for name in rest if name not in labels)
    data = data or tuple(name for name in rest if inputs[name].dtype == ir.DataType.FLOAT and _rank(inputs[name]) >= 2)
    _complain_of_gaps(model, data, labels, [name for name in rest if name not in data])
    return GraphSignature(
        data=data,
        labels=labels,
        trainable=tuple(gradients),
        frozen=frozen,
        running=running,
        gradients=gradients,
        loss=loss,
        logits=logits if logits in outputs else None,
    )


def _running(graph: ir.Graph, inputs: dict[str, ir.Value]) -> dict[str, str]:
    """Map each running statistic to its successor, where that is a graph output."""
    found: dict[str, str] = {}
    outputs = {value.name for value in graph.outputs}
    for node in graph:
        if node.op_type not in BATCH_NORMS or len(node.inputs) < 5:
            continue
        for old, new in zip(node.inputs[3:5], node.outputs[1:3], strict=False):
            if old is not None and old.name in inputs and new.name in outputs:
                found[str(old.name)] = str(new.name)
    return found


def _loss(model: ir.Model, outputs: list[str]) -> tuple[str, ir.Node | None]:
    for node in model.graph:
        if node.op_type in LOSSES and node.outputs[0].name in outputs:
            return str(node.outputs[0].name), node
    scalars = [v.name for v in model.graph.outputs if v.shape is not None and len(v.shape) == 0]
    if len(scalars) != 1 or scalars[0] is None:
        raise BnfuseError(f"{_file(model)}: is not a training graph: it has no loss among its outputs")
    return scalars[0], None


def _inputs_of(value: ir.Value) -> set[str]:
    """List the inputs of the graph that a value is computed of."""
    found: set[str] = set()
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        maker = current.producer()
        if maker is None:
            found.add(str(current.name))
            continue
        new = {operand for operand in maker.inputs if operand is not None} - seen
        seen |= new
        pending += new
    return found


def _labels(loss: ir.Node | None) -> list[str]:
    return [] if loss is None or len(loss.inputs) < 2 or loss.inputs[1] is None else [str(loss.inputs[1].name)]


def _is_variable(graph: ir.Graph, value: ir.Value) -> bool:
    """Whether the input has a value, or is read only where an operator has its parameters."""
    if (known := graph.initializers.get(value.name or "")) is not None and known.const_value is not None:
        return True
    forward = [use for use in value.uses() if use.node.op_type in PARAMETERS]
    return bool(forward) and all(use.idx in PARAMETERS[use.node.op_type] for use in forward)


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _complain_of_gaps(model: ir.Model, data: tuple[str, ...], labels: tuple[str, ...], rest: list[str]) -> None:
    if not data:
        raise BnfuseError(f"{_file(model)}: which input is the data cannot be told: pass --data-input NAME")
    if not labels:
        raise BnfuseError(f"{_file(model)}: which input holds the labels cannot be told: pass --labels-input NAME")
    if rest:
        raise BnfuseError(f"{_file(model)}: what input '{rest[0]}' is for cannot be told: it has no value and no role")


def _check_against(model: ir.Model, signature: GraphSignature) -> None:
    """Every name of the roles is in the graph, every input has one role, labels are of a type that a loss takes."""
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name for value in model.graph.outputs}
    state = (*signature.trainable, *signature.frozen, *signature.running)
    named = [*signature.data, *signature.labels, *state, *signature.offsets, *signature.virtual]
    named += signature.output_gradients.values()
    if (signature.loss is None) == (not signature.output_gradients):
        raise BnfuseError(f"{_file(model)}: its roles must name a loss, or else inputs with gradients of outputs")
    for name in named:
        if name not in inputs:
            raise BnfuseError(f"{_file(model)}: has no input '{name}', which its roles name")
    wanted = [
        *signature.backward_results,
        *signature.running.values(),
        *signature.output_gradients,
        *filter(None, [signature.loss, signature.logits]),
    ]
    for name in wanted:
        if name not in outputs:
            raise BnfuseError(f"{_file(model)}: has no output '{name}', which its roles name")
    shapes = {
        value.name: value.shape for value in (*model.graph.inputs, *model.graph.outputs) if value.shape is not None
    }
    for name, output in (*signature.gradients.items(), *signature.running.items()):
        ours, theirs = shapes.get(name), shapes.get(output)
        if ours is not None and theirs is not None and ours.is_static() and theirs.is_static() and ours != theirs:
            raise BnfuseError(f"{_file(model)}: output '{output}' is {theirs}, the input '{name}' that it is of {ours}")
    if len(set(named)) < len(named) or set(inputs) - set(named):
        odd = sorted(set(map(str, inputs)) - set(named)) or sorted({name for name in named if named.count(name) > 1})
        raise BnfuseError(f"{_file(model)}: input '{odd[0]}' must have exactly one role")
    for name in signature.labels:
        counted = any(use.node.op_type in LOSSES for use in inputs[name].uses())
        kinds = INTEGERS if counted else (*INTEGERS, ir.DataType.FLOAT)
        if inputs[name].dtype not in kinds:
            accepted = "int64" if counted else "int64 or float32"
            raise BnfuseError(f"{_file(model)}: labels input '{name}' is {inputs[name].dtype}: it must be {accepted}")
