"""The zoo: forward graphs of the networks of the papers, authored with onnx-graphsurgeon.

from bnfuse.models import MODELS, build_forward
model = build_forward("densenet121", batch=16, image=224)
"""

from .count import Counts, count
from .registry import MODELS, SHAPE_ONLY, Entry, build_forward, build_graph, count_forward, entry_of

__all__ = [
    "MODELS",
    "SHAPE_ONLY",
    "Counts",
    "Entry",
    "build_forward",
    "build_graph",
    "count",
    "count_forward",
    "entry_of",
]
