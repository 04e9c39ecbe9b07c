"""Sizes, work and feature-map traffic of a network, layer by layer: what `bnfuse inspect` shows.

A training graph is counted as it is (training.py); a network of the zoo is counted from its forward graph, whose
backward pass follows by rules (network.py). What is counted, and how: docs/design-space.md.
"""

from bnfuse.inspecting.network import inspect_network
from bnfuse.inspecting.result import FIELDS, Inspection, Layer
from bnfuse.inspecting.training import inspect_graph

__all__ = ["FIELDS", "Inspection", "Layer", "inspect_graph", "inspect_network"]
