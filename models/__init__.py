"""The zoo: forward graphs of the networks of the papers, authored with onnx-graphsurgeon.

from bnfuse.models import MODELS, build_forward
model = build_forward("densenet121", batch=16, image=224)
"""

from .registry import MODELS, Entry, build_forward, entry_of

__all__ = ["MODELS", "Entry", "build_forward", "entry_of"]
