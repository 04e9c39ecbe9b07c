"""The backward phase in pieces: each gradient is final behind the piece that names it, and bytes are about even."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from bnfuse.runtime.program import program as p
from bnfuse.runtime.program.pieces import Piece, cut, last_uses


def program_of(writes: list[list[str]], sizes: dict[str, int]) -> p.Program:
    """A program whose backward launches write these gradients, of so many elements each."""
    storages, gradients, offset = [], {}, 0
    for index, (name, elements) in enumerate(sizes.items()):
        storages.append(p.Storage(p.GRADIENTS, offset, elements))
        gradients[name] = p.Tensor(index, (elements,))
        offset += p.aligned(4 * elements)
    places = {name: index for index, name in enumerate(sizes)}
    launches = [
        p.Launch("backward", 0, f"n{i}", tuple(p.Buffer(places[name], "out") for name in names))
        for i, names in enumerate(writes)
    ]
    signature = {"data": [], "labels": [], "trainable": list(sizes)}
    regions = {p.GRADIENTS: offset}
    return p.Program(regions, storages, ["k"], launches, {}, {}, {}, gradients, {}, {}, signature, p.Report())


def test_each_gradient_is_final_behind_its_last_launch():
    program = program_of([["c"], [], ["b", "c"], ["a"]], {"a": 16, "b": 16, "c": 16, "constant": 16})
    assert last_uses(program) == {"a": 3, "b": 2, "c": 2, "constant": -1}
    assert [(piece.start, piece.stop, piece.parameters) for piece in cut(program, 2)] == [
        (0, 3, ("constant", "b", "c")),
        (3, 4, ("a",)),
    ]


def test_what_a_later_launch_reads_is_not_final():
    """Who is given a gradient changes it in place, and steps its parameter: a later piece reads neither."""
    program = program_of([["c"], ["b"], [], ["a"]], {"a": 16, "b": 16, "c": 16})
    program.storages.append(p.Storage(p.PARAMETERS, 0, 16))
    program.parameters["b"] = p.Tensor(3, (16,))
    reads = {1: 2, 2: 3}  # storages by launch: c's gradient, then the parameter b
    program.launches = [
        dataclasses.replace(one, arguments=(*one.arguments, *([p.Buffer(reads[i], "in")] if i in reads else [])))
        for i, one in enumerate(program.launches)
    ]
    assert last_uses(program) == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_pieces_are_all_launches_in_order_and_about_even_in_bytes(count):
    sizes = {f"w{i}": 16 * (1 + i % 3) for i in range(30)}
    pieces = cut(program_of([[name] for name in reversed(sizes)], sizes), count)
    assert [piece.index for piece in pieces] == list(range(count)) and {piece.count for piece in pieces} == {count}
    assert pieces[0].start == 0 and pieces[-1].stop == 30
    assert all(before.stop == after.start for before, after in itertools.pairwise(pieces))
    assert [name for piece in pieces for name in piece.parameters] == list(reversed(sizes))
    total = 4 * sum(sizes.values())
    assert sum(piece.bytes for piece in pieces) == total
    assert all(abs(piece.bytes - total / count) <= 4 * 16 * 3 for piece in pieces)


def test_there_are_no_empty_pieces():
    large = {"head": 1000, "a": 16, "b": 16}
    pieces = cut(program_of([["head"], ["a"], ["b"], []], large), 4)
    assert [piece.parameters for piece in pieces] == [("head",), ("a", "b")]
    together = cut(program_of([[], ["a", "b", "head"]], large), 4)
    assert together == (Piece(0, 1, 4, 0, 2, ("head", "a", "b"), 4 * 1032),)


def test_without_launches_there_is_one_piece():
    (piece,) = cut(program_of([], {"constant": 16}), 3)
    assert piece.parameters == ("constant",) and (piece.start, piece.stop) == (0, 0)
    (piece,) = cut(program_of([], {}), 3)
    assert piece.parameters == ()
