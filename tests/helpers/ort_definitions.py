"""Gradients that onnxruntime-training lacks, registered with it as small graphs of standard operators.

A definition is fixed: it sees a node's operands and results but not its attributes. So Elu and HardSigmoid are defined
for one attribute value. The derivatives follow from the operators' formulas in the ONNX specification; at a kink the
choice is PyTorch's, and ReduceMax shares its gradient evenly among equal maxima, as torch.amax does.
"""

from __future__ import annotations

import json
from types import ModuleType

# (op, inputs, output[, float constant]); GO, I, O, GI: gradient of the output, operand, result, gradient of the operand
Step = tuple[str, list[str], str] | tuple[str, list[str], str, float]

DEFINITIONS: dict[str, list[Step]] = {
    "Elu": [  # alpha = 1: exp(min(x, 0))
        ("Neg", ["I(0)"], "negative"),
        ("Relu", ["negative"], "depth"),
        ("Neg", ["depth"], "below"),
        ("Exp", ["below"], "slope"),
        ("Mul", ["GO(0)", "slope"], "GI(0)"),
    ],
    "Softplus": [  # sigmoid(x)
        ("Sigmoid", ["I(0)"], "slope"),
        ("Mul", ["GO(0)", "slope"], "GI(0)"),
    ],
    "Mish": [  # t + x*(1 - t*t)*sigmoid(x), t = tanh(softplus(x))
        ("Softplus", ["I(0)"], "plus"),
        ("Tanh", ["plus"], "t"),
        ("Mul", ["t", "t"], "tt"),
        ("Constant", [], "one", 1.0),
        ("Sub", ["one", "tt"], "rest"),
        ("Sigmoid", ["I(0)"], "s"),
        ("Mul", ["rest", "s"], "rest_s"),
        ("Mul", ["I(0)", "rest_s"], "x_rest_s"),
        ("Add", ["t", "x_rest_s"], "slope"),
        ("Mul", ["GO(0)", "slope"], "GI(0)"),
    ],
    "HardSigmoid": [  # alpha = 1/6, beta = 1/2: 1/6 where 0 < y < 1
        ("Constant", [], "zero", 0.0),
        ("Constant", [], "one", 1.0),
        ("Greater", ["O(0)", "zero"], "above"),
        ("Less", ["O(0)", "one"], "below"),
        ("And", ["above", "below"], "inside"),
        ("Constant", [], "sixth", 1.0 / 6.0),
        ("Mul", ["GO(0)", "sixth"], "scaled"),
        ("Where", ["inside", "scaled", "zero"], "GI(0)"),
    ],
    "HardSwish": [  # 0 up to -3, 1 from 3, x/3 + 1/2 between
        ("Constant", [], "zero", 0.0),
        ("Constant", [], "half", 0.5),
        ("Constant", [], "third", 1.0 / 3.0),
        ("Constant", [], "three", 3.0),
        ("Constant", [], "minus_three", -3.0),
        ("Mul", ["I(0)", "third"], "x_third"),
        ("Add", ["x_third", "half"], "slope"),
        ("Mul", ["GO(0)", "slope"], "sloped"),
        ("Less", ["I(0)", "three"], "below"),
        ("Where", ["below", "sloped", "GO(0)"], "no_floor"),
        ("Greater", ["I(0)", "minus_three"], "above"),
        ("Where", ["above", "no_floor", "zero"], "GI(0)"),
    ],
    "ReduceMax": [  # opset 18, keepdims = 1: even shares where x equals the maximum
        ("Equal", ["I(0)", "O(0)"], "hit"),
        ("Cast", ["hit"], "mask", 1),
        ("ReduceSum", ["mask", "I(1)"], "count"),
        ("Div", ["GO(0)", "count"], "share"),
        ("Mul", ["share", "mask"], "GI(0)"),
    ],
}


def register_definitions(library: ModuleType) -> None:
    """Make the definitions known to onnxruntime, once in a process."""
    for op, steps in DEFINITIONS.items():
        library.register_gradient_definition(f"::{op}", [_definition(library, step) for step in steps])


def _definition(library, step: Step):
    node = library.GradientNodeDefinition()
    node.op_type, node.domain = step[0], ""
    node.inputs, node.outputs = step[1], [step[2]]
    node.attributes = [_attribute(library, step[0], step[3])] if len(step) == 4 else []
    return node


def _attribute(library, op: str, value: float):
    attribute = library.GradientNodeAttributeDefinition()
    if op == "Cast":
        attribute.name, attribute.dtype, attribute.is_tensor = "to", "int", False
    else:
        attribute.name, attribute.dtype, attribute.is_tensor = "value", "float", True
    attribute.value_json = json.dumps(value)
    return attribute
