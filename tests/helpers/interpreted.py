"""The interpreter of `bnfuse verify --runtime float64`, as tests call it."""

from bnfuse.verifying.interpreter import run

__all__ = ["run"]
