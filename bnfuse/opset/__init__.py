"""The op set `ai.bnfuse`: grammar, function bodies, schemas, numpy reference, traffic (docs/ops.md)."""

from bnfuse.opset.functions import add_functions, function_for, why_not
from bnfuse.opset.plain import PLAIN_OPS, PlainOp
from bnfuse.opset.reference import run
from bnfuse.opset.schemas import check_model, infer_shapes, register, register_training_ops
from bnfuse.opset.shapes import result_shapes
from bnfuse.opset.spec import DOMAIN, VERSION, OpSpec, find, parse
from bnfuse.opset.traffic import maps_touched

__all__ = [
    "DOMAIN",
    "PLAIN_OPS",
    "VERSION",
    "OpSpec",
    "PlainOp",
    "add_functions",
    "check_model",
    "find",
    "function_for",
    "infer_shapes",
    "maps_touched",
    "parse",
    "register",
    "register_training_ops",
    "result_shapes",
    "run",
    "why_not",
]
