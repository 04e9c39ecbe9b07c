"""Einsum by ReduceSum, Transpose, Reshape, Mul and MatMul, an operand after the other.

    bhqd,bhkd->bhqk      MatMul of [b*h, q, d] and [b*h, d, k]
    bchw,bc->bchw        Mul of [b, c, h, w] and [b, c, 1, 1]: nothing is summed

What an ellipsis stands for gets labels of its own, "0", "1", ... from its last axis on.
"""

from __future__ import annotations

import dataclasses
import math

from .writer import Writer


@dataclasses.dataclass(frozen=True)
class Term:
    """A tensor with a label for each axis."""

    name: str
    labels: tuple[str, ...]
    shape: tuple[int, ...] = ()  # of what is written here


def einsum(write: Writer) -> None:
    """Write Einsum."""
    terms, wanted = _parse(write)
    sizes: dict[str, int] = {}
    for term in terms:
        for label, size in zip(term.labels, write.shape(term.name), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    terms = [_without_ones(write, _diagonal(write, term), sizes) for term in terms]
    total, *others = terms
    for index, other in enumerate(others):
        later = {*wanted}.union(*(term.labels for term in others[index + 1 :]))
        total = _product(write, total, other, later, sizes)
    total = _summed(write, total, {*wanted})
    missing = [label for label in wanted if label not in total.labels]  # of size 1, or broadcast from nothing
    name = write.transpose(total.name, [total.labels.index(label) for label in wanted if label in total.labels])
    shape = [1 if label in missing else sizes[label] for label in wanted]
    write.give(write.add("Reshape", [name, write.ints("shape", shape)]) if missing else name)


def _parse(write: Writer) -> tuple[list[Term], tuple[str, ...]]:
    equation = write.given["equation"].decode().replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = []
    for name, text in zip(write.node.input, left.split(","), strict=True):
        terms.append(Term(name, _labels(text, len(write.shape(name)))))
    every = [label for term in terms for label in term.labels]
    spread = sorted({label for label in every if label.isdigit()}, key=int, reverse=True)
    if not arrow:
        once = sorted(label for label in set(every) if every.count(label) == 1 and not label.isdigit())
        return terms, (*spread, *once)
    before, dots, after = right.partition("...")
    return terms, (*before, *(spread if dots else ()), *after)


def _labels(text: str, rank: int) -> tuple[str, ...]:
    before, dots, after = text.partition("...")
    spread = [str(axis) for axis in reversed(range(rank - len(before) - len(after)))] if dots else []
    return (*before, *spread, *after)


def _diagonal(write: Writer, term: Term) -> Term:
    """Take the diagonal of axes that have one label: every n + 1st element of both as one axis."""
    labels, name, shape = list(term.labels), term.name, write.shape(term.name)
    while len(set(labels)) < len(labels):
        label = next(label for label in labels if labels.count(label) > 1)
        first = labels.index(label)
        second = labels.index(label, first + 1)
        others = [axis for axis in range(len(labels)) if axis not in (first, second)]
        size, rest = shape[first], [shape[axis] for axis in others]
        if shape[second] != size:
            raise write.error(
                f"takes the diagonal '{label}' of axes of {size} and {shape[second]}: they must be equal."
            )
        flat = write.transpose(name, [*others, first, second])
        flat = write.add("Reshape", [flat, write.ints("shape", [*rest, size * size])])
        name = write.slice(flat, len(rest), 0, size * size, size + 1)
        labels, shape = [*(labels[axis] for axis in others), label], [*rest, size]
    return Term(name, tuple(labels), tuple(shape)) if name != term.name else term


def _without_ones(write: Writer, term: Term, sizes: dict[str, int]) -> Term:
    """Drop axes of size 1 where another operand has more: they broadcast."""
    shape = term.shape or write.shape(term.name)
    kept = [i for i, label in enumerate(term.labels) if shape[i] == sizes[label]]
    if len(kept) == len(shape):
        return term
    return Term(write.reshape(term.name, [shape[i] for i in kept]), tuple(term.labels[i] for i in kept))


def _summed(write: Writer, term: Term, needed: set[str]) -> Term:
    axes = [axis for axis, label in enumerate(term.labels) if label not in needed]
    if not axes:
        return term
    name = write.reduce("ReduceSum", term.name, axes, keepdims=False)
    return Term(name, tuple(label for label in term.labels if label in needed))


def _product(write: Writer, a: Term, b: Term, later: set[str], sizes: dict[str, int]) -> Term:
    a, b = _summed(write, a, later | {*b.labels}), _summed(write, b, later | {*a.labels})
    both = [label for label in a.labels if label in b.labels]
    batch, contracted = [x for x in both if x in later], [x for x in both if x not in later]
    rows, columns = [x for x in a.labels if x not in both], [x for x in b.labels if x not in both]

    def arranged(term: Term, groups: list[list[str]], shape: list[int]) -> str:
        name = write.transpose(term.name, [term.labels.index(label) for group in groups for label in group])
        return write.add("Reshape", [name, write.ints("shape", shape)])

    def count(labels: list[str]) -> int:
        return math.prod(sizes[label] for label in labels)

    result = (*batch, *rows, *columns)
    if not contracted:
        left = arranged(a, [batch, rows], [sizes[x] for x in (*batch, *rows)] + [1] * len(columns))
        right = arranged(b, [batch, columns], [sizes[x] if x not in rows else 1 for x in result])
        return Term(write.add("Mul", [left, right]), result)
    stack = [count(batch)] if batch else []
    left = arranged(a, [batch, rows, contracted], [*stack, count(rows), count(contracted)])
    right = arranged(b, [batch, contracted, columns], [*stack, count(contracted), count(columns)])
    product = write.add("MatMul", [left, right])
    return Term(write.add("Reshape", [product, write.ints("shape", [sizes[x] for x in result])]), result)
