"""What a rewrite did to a graph: nodes, edges, BatchNorms, and the feature maps read and written.

The package is named for what it holds so that `bnfuse.diff` can be the function.
"""

from bnfuse.diffing.compare import diff_graphs
from bnfuse.diffing.report import Diff

__all__ = ["Diff", "diff_graphs"]
