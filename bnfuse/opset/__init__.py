"""The op set `ai.bnfuse`: grammar, function bodies, schemas, numpy reference, traffic (docs/ops.md)."""

from bnfuse.opset.functions import add_functions, function_for, why_not
from bnfuse.opset.spec import DOMAIN, PLAIN_OPS, VERSION, OpSpec, PlainOp, find, parse

__all__ = [
    "DOMAIN",
    "PLAIN_OPS",
    "VERSION",
    "OpSpec",
    "PlainOp",
    "add_functions",
    "find",
    "function_for",
    "parse",
    "why_not",
]
