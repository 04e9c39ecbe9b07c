"""Lowering of Resample and ResampleGrad: one launch, or two where a pixel would mix very many, or compute too much.

Of two, the first has the way in and goes along the axis that makes less, the second has the way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from bnfuse.opset.spec import OF_GRADIENT, OpSpec
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.common.resample import AXES, Tables, is_one_launch, tables_of
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.lowering.layout import MapRef
from bnfuse.runtime.lowering.state import Lowering, Ref

MATRICES = ("rows", "columns")
Matrix = npt.NDArray[np.float32]
Described = tuple[dict[str, Any], Tables]  # what a problem says of an axis, and what its kernel reads


def launch(
    low: Lowering, node: ir.Node, problem: Problem, refs: Mapping[str, Ref], operands: Mapping[str, ir.Value]
) -> None:
    """Launch an operator whose problem knows nothing of its matrices yet. Raises BnfuseError where they vary."""
    matrices = [matrix_of(low, node, operands[name], transposed=problem.spec.is_gradient) for name in MATRICES]
    described = [tables_of(matrix, name) for matrix, name in zip(matrices, AXES, strict=True)]
    taps = [said[f"{name}_taps"] for (said, _), name in zip(described, AXES, strict=True)]
    if is_one_launch(problem, taps):
        _launch(low, problem, described, refs)
        return
    unchanged: list[Described] = [({f"{name}_taps": 0, f"{name}_weighted": False}, {}) for name in AXES]
    growth = [len(matrix) / matrix.shape[1] for matrix in matrices]
    early = 0 if growth[0] <= growth[1] else 1
    first, second, between = halves(low, problem, refs, early)
    into = [described[i] if i == early else unchanged[i] for i in (0, 1)]
    out = [unchanged[i] if i == early else described[i] for i in (0, 1)]
    source, made = ("dy", "dx") if problem.spec.is_gradient else ("x", "y")
    of_shape = {"x": between} if problem.spec.is_gradient else {}  # any map of what it makes will do
    _launch(low, first, into, {**refs, **of_shape, made: between})
    _launch(low, second, out, {**refs, source: between})


def matrix_of(low: Lowering, node: ir.Node, value: ir.Value, *, transposed: bool) -> Matrix:
    """Give a matrix as [out, in] of what is computed; a gradient has the transposed one."""
    constant = low.constant(value)
    if constant is None:
        raise low.error(node, f"reads its matrix '{value.name}', which is not constant: rewrite the source graph anew")
    return constant.T if transposed else constant


def halves(low: Lowering, problem: Problem, refs: Mapping[str, Ref], early: int) -> tuple[Problem, Problem, MapRef]:
    """Divide an operator: its way in with one axis, then its way out with the other; and the map between them."""
    spec, maps = problem.spec, dict(problem.maps)
    source, made = ("dy", "dx") if spec.is_gradient else ("x", "y")
    into, out = maps[source], maps[made]
    h, w = (out.h, into.w) if early == 0 else (into.h, out.w)
    between = _new_map(low, into.n, into.c, h, w)
    own = tuple(step for step in spec.prologue if not spec.is_gradient or step in OF_GRADIENT)
    ways = (OpSpec(own, spec.core), OpSpec(tuple(s for s in spec.prologue if s not in own), spec.core, spec.epilogue))

    def part(way: OpSpec, changed: Mapping[str, MapType]) -> Problem:
        names = {*way.operands, *way.results}
        kinds = {**{name: kind for name, kind in maps.items() if name in names}, **changed}
        if "x" in names and way.is_gradient and "x" not in kinds:
            kinds["x"] = kinds["dx"]
        return dataclasses.replace(problem, op=way.name, maps=tuple(kinds.items()))

    first = part(ways[0], {made: between.type, **({"x": between.type} if spec.is_gradient else {})})
    return first, part(ways[1], {source: between.type}), between


def _new_map(low: Lowering, n: int, c: int, h: int, w: int) -> MapRef:
    kind = low.map_type((n, c, h, w), "float32")
    return MapRef(low.storage(kind.elements, kind.dtype), 0, kind)


def _launch(low: Lowering, problem: Problem, described: list[Described], refs: Mapping[str, Ref]) -> None:
    said = {name: value for attributes, _ in described for name, value in attributes.items()}
    problem = dataclasses.replace(problem, attributes=(*problem.attributes, *said.items()))
    names = {*problem.spec.operands, *problem.spec.results} - {*MATRICES}
    given: dict[str, Ref] = {name: ref for name, ref in refs.items() if name in names}
    if "x" in names and "x" not in dict(refs):
        given["x"] = given["dx"]
    for _, tables in described:
        given |= {name: low.constant_storage(table) for name, table in tables.items()}
    kind = registry.RESAMPLE_BACKWARD if problem.spec.is_gradient else registry.RESAMPLE_FORWARD
    low.launch(kind, (problem, low.target), given)
