"""Losses that build puts behind a network: what can be asked for, and each as standard ONNX."""

from .formulas import LOSSES, Formula
from .terms import Term, parse_loss, with_options

__all__ = ["LOSSES", "Formula", "Term", "parse_loss", "with_options"]
