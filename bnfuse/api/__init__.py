"""The functions that `bnfuse` offers. Each takes a model in any form: a path, ModelProto, gs.Graph, onnx_ir.Model,
or what `rewrite` returned.

graphs.py     of graphs: rewrite, diff, verify, inspect, estimate, explore, bench
steps.py      of steps: compile, add_batch, open_step, export_inference
training.py   of steps and data: run, train, evaluate, search
"""

from bnfuse.api.graphs import bench, diff, estimate, explore, inspect, rewrite, verify
from bnfuse.api.steps import add_batch, compile, export_inference, open_step, optimizer
from bnfuse.api.training import evaluate, run, search, train
from bnfuse.graph.io import load, save

__all__ = [
    "add_batch",
    "bench",
    "compile",
    "diff",
    "estimate",
    "evaluate",
    "explore",
    "export_inference",
    "inspect",
    "load",
    "open_step",
    "optimizer",
    "rewrite",
    "run",
    "save",
    "search",
    "train",
    "verify",
]
