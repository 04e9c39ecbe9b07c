"""The page's data for its JavaScript: nodes by index, -1 where there is none (graph.js says what it does with each)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bnfuse.diffing.page.gather import Page
from bnfuse.diffing.page.nodes import Node
from bnfuse.diffing.page.norms import HALVES, PLACES, STATUSES, Norm, first_index


def data_of(page: Page) -> dict[str, Any]:
    """Give the data of the page: sides (before, after), rows (before, after), home and into (by node before), partner
    (by node after), norms; and what they are called."""
    alignment = page.alignment
    sources, places = first_index(page.before), first_index(page.after)
    return {
        "sides": [
            {"name": "before", "nodes": [node_data(node, {}) for node in page.before]},
            {"name": "after", "nodes": [node_data(node, sources) for node in page.after]},
        ],
        "rows": [[index_or(b), index_or(a)] for b, a in alignment.rows],
        "home": [alignment.home.get(i, -1) for i in range(len(page.before))],
        "into": [list(alignment.into[i]) for i in range(len(page.before))],
        "partner": [alignment.partner.get(i, -1) for i in range(len(page.after))],
        "changed": {places[n.name]: shown(n.attributes) for n in page.diff.changed if n.name in places},
        "norms": [norm_data(norm, places) for norm in page.norms],
        "words": {"halves": HALVES, "places": PLACES, "statuses": STATUSES},
    }


def shown(attributes: Mapping[str, tuple[Any, Any]]) -> dict[str, list[str]]:
    """Give attributes before and after, as texts: their values may be anything that ONNX has."""
    return {name: ["absent" if value is None else str(value) for value in both] for name, both in attributes.items()}


def index_or(i: int | None) -> int:
    """Give the index, -1 where there is none."""
    return -1 if i is None else i


def node_data(node: Node, sources: Mapping[str, int]) -> dict[str, Any]:
    """Give a node as the script reads it. Sources are indices of nodes before, or names where there is no such node."""
    found: dict[str, Any] = {
        "name": node.key,
        "op": node.op,
        "domain": node.domain,
        "forward": int(node.forward),
        "inputs": [[index_or(read.producer), read.name, read.bytes] for read in node.inputs],
        "outputs": [[output.name, output.type] for output in node.outputs],
        "sweeps": node.sweeps,
        "bytes": node.bytes,
    }
    if node.made_by:
        found["pass"] = node.made_by
    if node.sources:
        found["sources"] = [sources.get(name, name) for name in node.sources]
    return found


def norm_data(norm: Norm, places: Mapping[str, int]) -> dict[str, Any]:
    """Give a BatchNorm as the script reads it."""
    return {
        "name": norm.fate.name,
        "channels": norm.fate.channels,
        "status": norm.status,
        "nodes": list(norm.nodes),
        "homes": list(norm.homes),
        "own": costs(norm.own_before, norm.own_after),
        "around": costs(norm.around_before, norm.around_after),
        "reasons": list(norm.reasons),
        "halves": {
            half: [[places.get(place.node, -1), place.where] for place in getattr(norm.fate, half)] for half in HALVES
        },
    }


def costs(*both: Any) -> list[Sequence[int]]:
    """Give costs as lists of numbers."""
    return [dataclasses.astuple(cost) for cost in both]
