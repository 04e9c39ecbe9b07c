"""Each loss as standard ONNX over the scores of a network and its labels, as torch.nn.functional defines it.

Scores are [N, C, ...] float32 where labels are classes (int64 [N, ...]), and of any shape where labels have the shape
of the scores (float32). All losses are means: over the labels that are not ignored (weighted by their class weights),
over N and the places of a map for soft labels, over all elements otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bnfuse.core.errors import BnfuseError

Options = Mapping[str, "float | np.ndarray"]


class Formula:
    """The nodes of one loss under construction, with names below the loss's own."""

    def __init__(self, prefix: str, fresh: Callable[[str], str], scores: Sequence[int]) -> None:
        self.prefix, self.fresh, self.scores = prefix, fresh, tuple(scores)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; gives its result."""
        return self.several(op, inputs, 1, **attributes)[0]

    def several(self, op: str, inputs: Sequence[str], results: int, **attributes: Any) -> list[str]:
        """Add a node of several results."""
        name = self.fresh(f"{self.prefix}/{op.lower()}")
        names = [name, *(self.fresh(f"{name}_{place}") for place in range(1, results))]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=name, **attributes))
        return names

    def constant(self, values: object, kind: type = np.float32) -> str:
        """Add a constant; gives its name."""
        name = self.fresh(f"{self.prefix}/constant")
        self.constants.append(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def ints(self, *values: int) -> str:
        """Add a constant int64 vector."""
        return self.constant(values, np.int64)

    def mean(self, x: str) -> str:
        """Give the mean over all elements, a scalar."""
        return self("ReduceMean", x, keepdims=0)

    def total(self, x: str) -> str:
        """Give the sum over all elements, a scalar."""
        return self("ReduceSum", x, keepdims=0)


@dataclasses.dataclass(frozen=True)
class LossKind:
    """A loss: its formula of scores and labels, what its labels are, and its options with their least and most.

    `activation` names the operators at the end of a network that the loss has in it already.
    """

    about: str
    formula: Callable[[Formula, str, str, Options], str]
    classes: bool  # labels are classes, of a rank less than the scores; else floats of the scores' shape
    options: Mapping[str, tuple[float, float] | None] = dataclasses.field(default_factory=dict)  # None: a vector
    activation: tuple[str, ...] = ()

    def label_type(self, scores: Sequence[int]) -> tuple[int, list[int]]:
        """Give onnx's element type and the shape of the labels."""
        if self.classes:
            return TensorProto.INT64, [scores[0], *scores[2:]]
        return TensorProto.FLOAT, list(scores)

    def check(self, options: Options) -> None:
        """Raise BnfuseError for an option out of its range, or of the wrong kind."""
        for name, value in options.items():
            bounds = self.options[name]
            if bounds is None:
                if np.ndim(value) != 1 or not np.all(np.isfinite(value)) or not np.all(np.asarray(value) >= 0):
                    raise BnfuseError(f"loss option {name} must be a vector of numbers that are not negative")
            elif np.ndim(value) or not bounds[0] <= float(value) <= bounds[1]:
                raise BnfuseError(f"loss option {name}={value} is out of range: {bounds[0]:g} to {bounds[1]:g}")


def cross_entropy(f: Formula, scores: str, labels: str, options: Options) -> str:
    """(1 - s)*nll + s*(mean over the classes of -log p); both means are over the labels that count."""
    given: dict[str, object] = {"reduction": "mean"}
    if "ignore_index" in options:
        given["ignore_index"] = int(_scalar(options, "ignore_index"))
    inputs = [scores, labels]
    if "class_weights" in options:
        weights = _class_weights(f, options)
        inputs.append(f.constant(weights))
    loss, log_prob = f.several("SoftmaxCrossEntropyLoss", inputs, 2, **given)
    smoothing = _scalar(options, "label_smoothing")
    if not smoothing:
        return loss
    if "class_weights" in options:
        log_prob = f("Mul", log_prob, f.constant(weights.reshape(1, -1, *[1] * (len(f.scores) - 2))))
    spread = f("Neg", f("ReduceSum", log_prob, f.ints(1), keepdims=0))
    smooth = _counted_mean(f, spread, labels, options)
    rest = f("Mul", loss, f.constant(1 - smoothing))
    return f("Add", rest, f("Mul", smooth, f.constant(smoothing / f.scores[1])))


def _counted_mean(f: Formula, values: str, labels: str, options: Options) -> str:
    """Sum what is not ignored, divided by how many there are, or by the sum of their class weights."""
    counts = None
    if "ignore_index" in options:
        ignored = f("Equal", labels, f.constant(int(_scalar(options, "ignore_index")), np.int64))
        values = f("Where", ignored, f.constant(0.0), values)
        counts = f("Cast", f("Not", ignored), to=TensorProto.FLOAT)
    if "class_weights" in options:
        known = f("Where", ignored, f.constant(0, np.int64), labels) if counts is not None else labels
        own = f("Gather", f.constant(_class_weights(f, options)), known)
        counts = own if counts is None else f("Mul", own, counts)
    return f.mean(values) if counts is None else f("Div", f.total(values), f.total(counts))


def _class_weights(f: Formula, options: Options) -> np.ndarray:
    weights = np.asarray(options["class_weights"], np.float32)
    if len(f.scores) < 2 or weights.shape != (f.scores[1],):
        raise BnfuseError(f"class_weights has {weights.size} values: the network has {f.scores[1]} classes")
    return weights


def soft_cross_entropy(f: Formula, scores: str, labels: str, options: Options) -> str:
    """-sum over the classes of labels * log p, its mean over samples and places (mixup, distillation)."""
    log_prob = f("LogSoftmax", scores, axis=1)
    own = f("Neg", f("ReduceSum", f("Mul", labels, log_prob), f.ints(1), keepdims=0))
    return f.mean(own)


def binary_cross_entropy(f: Formula, scores: str, labels: str, options: Options) -> str:
    """softplus(x) - x*y; with positive weights p (1 - y)*x + (1 + (p - 1)*y)*softplus(-x)."""
    if "pos_weight" not in options:
        return f.mean(f("Sub", f("Softplus", scores), f("Mul", scores, labels)))
    weight = np.asarray(options["pos_weight"], np.float32)
    if len(f.scores) < 2 or weight.shape != (f.scores[1],):
        raise BnfuseError(f"pos_weight has {weight.size} values: the network has {f.scores[1]} classes")
    more = f.constant((weight - 1).reshape(-1, *[1] * (len(f.scores) - 2)))
    factor = f("Add", f("Mul", labels, more), f.constant(1.0))
    negative = f("Mul", f("Sub", f.constant(1.0), labels), scores)
    return f.mean(f("Add", negative, f("Mul", factor, f("Softplus", f("Neg", scores)))))


def squared(f: Formula, scores: str, labels: str, options: Options) -> str:
    """(x - y)^2."""
    difference = f("Sub", scores, labels)
    return f.mean(f("Mul", difference, difference))


def absolute(f: Formula, scores: str, labels: str, options: Options) -> str:
    """|x - y|."""
    return f.mean(f("Abs", f("Sub", scores, labels)))


def huber(f: Formula, scores: str, labels: str, options: Options) -> str:
    """With c = min(|x - y|, delta): c*(|x - y| - c/2), which is half a square inside and a line outside."""
    return f.mean(_huber(f, scores, labels, _scalar(options, "delta", 1.0)))


def smooth_absolute(f: Formula, scores: str, labels: str, options: Options) -> str:
    """Huber's loss divided by its beta."""
    beta = _scalar(options, "beta", 1.0)
    return f.mean(f("Div", _huber(f, scores, labels, beta), f.constant(beta)))


def _huber(f: Formula, scores: str, labels: str, delta: float) -> str:
    distance = f("Abs", f("Sub", scores, labels))
    inside = f("Min", distance, f.constant(delta))
    return f("Mul", inside, f("Sub", distance, f("Mul", inside, f.constant(0.5))))


def focal(f: Formula, scores: str, labels: str, options: Options) -> str:
    """alpha*(1 - p)^gamma * -log p of the label's probability p, over a softmax (Lin and others, Focal Loss, 2017)."""
    loss = f("SoftmaxCrossEntropyLoss", scores, labels, reduction="none")
    wrong = f("Sub", f.constant(1.0), f("Exp", f("Neg", loss)))
    weighed = f("Mul", f("Pow", wrong, f.constant(_scalar(options, "gamma", 2.0))), loss)
    return f("Mul", f.mean(weighed), f.constant(_scalar(options, "alpha", 1.0)))


def sigmoid_focal(f: Formula, scores: str, labels: str, options: Options) -> str:
    """Focal loss of each element's sigmoid, with alpha for positives and 1 - alpha for negatives."""
    alpha, gamma = _scalar(options, "alpha", 0.25), _scalar(options, "gamma", 2.0)
    loss = f("Sub", f("Softplus", scores), f("Mul", scores, labels))
    p, one = f("Sigmoid", scores), f.constant(1.0)
    wrong = f("Sub", f("Add", p, labels), f("Mul", f.constant(2.0), f("Mul", p, labels)))  # p + y - 2py = 1 - p_t
    weighed = f("Mul", f("Pow", wrong, f.constant(gamma)), loss)
    balance = f("Add", f("Mul", labels, f.constant(2 * alpha - 1)), f("Sub", one, f.constant(alpha)))
    return f.mean(f("Mul", balance, weighed))


def _scalar(options: Options, name: str, default: float = 0.0) -> float:
    return float(options.get(name, default))  # type: ignore[arg-type]


_POSITIVE = (1e-6, math.inf)
LOSSES: dict[str, LossKind] = {
    "cross-entropy": LossKind(
        "classes; torch's cross_entropy",
        cross_entropy,
        True,
        {"ignore_index": (-(2**31), 2**31), "label_smoothing": (0.0, 1.0), "class_weights": None},
        ("Softmax", "LogSoftmax"),
    ),
    "soft-cross-entropy": LossKind(
        "probabilities of classes (mixup)", soft_cross_entropy, False, {}, ("Softmax", "LogSoftmax")
    ),
    "bce": LossKind(
        "0 to 1 for each score; binary_cross_entropy_with_logits",
        binary_cross_entropy,
        False,
        {"pos_weight": None},
        ("Sigmoid",),
    ),
    "mse": LossKind("numbers", squared, False),
    "l1": LossKind("numbers", absolute, False),
    "huber": LossKind("numbers", huber, False, {"delta": _POSITIVE}),
    "smooth-l1": LossKind("numbers", smooth_absolute, False, {"beta": _POSITIVE}),
    "focal": LossKind(
        "classes", focal, True, {"gamma": (0.0, 100.0), "alpha": (0.0, math.inf)}, ("Softmax", "LogSoftmax")
    ),
    "sigmoid-focal": LossKind(
        "0 or 1 for each score; torchvision's sigmoid_focal_loss",
        sigmoid_focal,
        False,
        {"gamma": (0.0, 100.0), "alpha": (0.0, 1.0)},
        ("Sigmoid",),
    ),
}
