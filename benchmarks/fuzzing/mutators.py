"""What mutations of ONNX models share: the list of them, and what they choose from.

A mutator takes a ModelProto and a source of chance, and changes one thing in place. It is added by writing it under
`@mutator`; it may find nothing to change, and then leaves the model alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, TensorProto

Mutator = Callable[[onnx.ModelProto, random.Random], None]
MUTATORS: list[Mutator] = []
LARGEST, SMALLEST = 2**63 - 1, -(2**63)
INTEGERS = (-1, 0, 1, 2, 3, 64, -5, 2**31 - 1, 2**31, 2**40, LARGEST, SMALLEST)


def mutator(function: Mutator) -> Mutator:
    MUTATORS.append(function)
    return function


def all_tensors(model: onnx.ModelProto) -> list[TensorProto]:
    inner = [a.t for node in model.graph.node for a in node.attribute if a.type == AttributeProto.TENSOR]
    return [*model.graph.initializer, *inner]


def value_names(model: onnx.ModelProto) -> list[str]:
    named = [item.name for item in (*model.graph.input, *model.graph.initializer)]
    return [*named, *(name for node in model.graph.node for name in node.output)] or ["nothing"]
