"""Which BatchNorms of a training graph to take out: lists in words, the published placements, what each BN costs.

    1,4,7               by number, from 1, in the order in which the graph runs them (in VGG: of its convolution)
    3-6                 a range
    stage1/*            globs of node names
    all                 every one
    all-except:5,8      all but a list of the forms above
    paper               all but the placements that [Joardar22] (section V-C) publishes, by convolution

The published placements are of vgg11, vgg16, vgg19 and resnet18, which are known by how many BatchNorms, convolutions
and residual Adds they have. resnet18's C1 to C17 are the convolutions of its main path; the three of its shortcuts have
no number there, and no BatchNorm.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from bnfuse.core.errors import BnfuseError
from bnfuse.passes.dialect.source_ops import is_batch_norm

Selection = str | Iterable[int]

FORMS = "write numbers (1,4,7), ranges (3-6), globs of node names, all, all-except:LIST or paper"


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """A BatchNorm of a source graph. `index` counts from 1 in forward order; `elements` is the size of its map."""

    index: int
    node: str
    channels: int
    elements: int

    @property
    def bytes(self) -> int:
        """Size of the float32 map: what each sweep over it reads, so a measure of what the BatchNorm costs."""
        return 4 * self.elements


def batch_norm_list(model: ir.Model) -> tuple[BatchNorm, ...]:
    """List the BatchNorms of a source graph as they run; the search's variables and their costs.

    Raises BnfuseError where a map has no fixed shape.
    """
    return tuple(_described(index, node) for index, node in enumerate(nodes_of(model), 1))


def nodes_of(model: ir.Model) -> list[ir.Node]:
    """List the BatchNorm nodes of a source graph in forward order."""
    return [node for node in model.graph if is_batch_norm(node)]


def _described(index: int, node: ir.Node) -> BatchNorm:
    x = node.inputs[0]
    if x is None or x.shape is None or not all(isinstance(size, int) for size in x.shape):
        raise BnfuseError(f"node '{node.name}' ({node.op_type}): its map has no fixed shape. Build with --batch.")
    sizes = [int(size) for size in x.shape]  # type: ignore[arg-type]
    return BatchNorm(index, node.name or "", sizes[1], math.prod(sizes))


def select(model: ir.Model, which: Selection) -> tuple[BatchNorm, ...]:
    """Select the BatchNorms that a list names, in forward order. Raises BnfuseError, in one line, for a wrong list."""
    norms = batch_norm_list(model)
    if not norms:
        raise BnfuseError("there is no BatchNorm to remove. Rewrite what `bnfuse build` wrote")
    chosen = _in_words(model, norms, which) if isinstance(which, str) else {_checked(i, norms) for i in which}
    return tuple(norm for norm in norms if norm.index in chosen)


def _in_words(model: ir.Model, norms: Sequence[BatchNorm], text: str) -> set[int]:
    everything = {norm.index for norm in norms}
    if text == "all":
        return everything
    if text == "paper":
        return everything - published(model, norms)
    if text.startswith("all-except:"):
        return everything - _listed(norms, text.removeprefix("all-except:"))
    return _listed(norms, text)


def _listed(norms: Sequence[BatchNorm], text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        found |= _part(norms, part.strip())
    return found


def _part(norms: Sequence[BatchNorm], part: str) -> set[int]:
    if not part:
        raise BnfuseError(f"the list of BatchNorms has an empty entry: {FORMS}")
    if match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII):
        first, last = _checked(int(match[1]), norms), _checked(int(match[2] or match[1]), norms)
        if last < first:
            raise BnfuseError(f"the range {part} of BatchNorms runs backwards: write it as {last}-{first}")
        return {*range(first, last + 1)}
    named = {norm.index for norm in norms if fnmatch.fnmatchcase(norm.node, part)}
    if not named:
        raise BnfuseError(f"no BatchNorm is named '{part}' (the first is '{norms[0].node}'): {FORMS}")
    return named


def _checked(index: int, norms: Sequence[BatchNorm]) -> int:
    if not 1 <= index <= len(norms):
        raise BnfuseError(f"there is no BatchNorm {index}: the graph has {len(norms)}, numbered from 1")
    return index


@dataclasses.dataclass(frozen=True)
class Placement:
    """A network by its counts, and the convolutions (1-based, main path) that keep their BatchNorm."""

    name: str
    norms: int
    adds: int
    keep: tuple[int, ...]


PUBLISHED = (
    Placement("vgg11", 8, 0, (5, 7)),
    Placement("vgg16", 13, 0, (5, 7, 8, 13)),
    Placement("vgg19", 16, 0, (5, 8, 11, 16)),
    Placement("resnet18", 20, 8, (3, 6, 7, *range(9, 18))),
)


def published(model: ir.Model, norms: Sequence[BatchNorm]) -> set[int]:
    """Find the indices of the BatchNorms that stay in the published placement of this network."""
    convolutions = [_convolution(node) for node in nodes_of(model)]
    main = [
        norm for norm, conv in zip(norms, convolutions, strict=True) if conv is not None and not _is_pointwise(conv)
    ]
    adds = residual_adds(model)
    found = next((p for p in PUBLISHED if (p.norms, p.adds) == (len(norms), adds)), None)
    if found is None or len(main) != (17 if found.adds else found.norms):
        names = ", ".join(p.name for p in PUBLISHED)
        raise BnfuseError(
            f"[Joardar22] places BatchNorms in {names}; this network, of {len(norms)} BatchNorms and {adds} residual"
            " Adds, is none of them: list the ones to remove by number"
        )
    return {main[position - 1].index for position in found.keep}


def residual_adds(model: ir.Model) -> int:
    """Count the Adds of two maps of one shape."""
    return sum(node.op_type == "Add" and _is_residual(node) for node in model.graph)


def _is_residual(node: ir.Node) -> bool:
    shapes = [value.shape for value in node.inputs if value is not None]
    return len(shapes) == 2 and shapes[0] is not None and len(shapes[0]) == 4 and shapes[0] == shapes[1]


def _convolution(norm: ir.Node) -> ir.Node | None:
    """Find the convolution that a BatchNorm follows."""
    producer = norm.inputs[0].producer() if norm.inputs[0] is not None else None
    return producer if producer is not None and producer.op_type == "Conv" else None


def _is_pointwise(conv: ir.Node) -> bool:
    weight = conv.inputs[1]
    return weight is not None and weight.shape is not None and tuple(weight.shape[2:]) == (1, 1)
