"""Graph passes: BatchNorm fission and fusion, forward and backward. One pass a file; `pipeline` puts them in order."""

from bnfuse.passes.pipeline import LEVELS, PassReport, Report, Rewritten, rewrite

__all__ = ["LEVELS", "PassReport", "Report", "Rewritten", "rewrite"]
