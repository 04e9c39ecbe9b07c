"""A command whose options are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from bnfuse.commands.derived import taking
from bnfuse.core.options import option


@dataclasses.dataclass(frozen=True)
class Wanted:
    place: str
    size: str | float | None = option(None, "How large.", metavar="B")
    deep: bool = option(False, "How deep.")
    order: Literal["file", "dfs"] = option("file", "Which order.")
    part: float = option(0.5, "Which part.", low=0, high=1)
    level_names: Sequence[str] = option((), "Which levels.", flag="--level")
    assume: Mapping[str, object] = option(None, "What else.", metavar="KEY=VALUE", factory=dict)
    left_out: int = 3


WORDS = ("here", "--size=24MB", "--deep", "--order=dfs", "--part=1", "--level=a", "--level=b", "--assume=x=1")


@pytest.fixture
def run():
    """What the command made of some arguments; its text where it ends with a complaint."""
    made: list[Wanted] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @taking(Wanted)
    def command(place: str, *, loud: bool = False, **asked: Any) -> None:
        made.append(Wanted(place, **asked, left_out=int(loud)))

    def invoked(*arguments: str) -> Wanted | str:
        result = CliRunner().invoke(app, arguments)
        return made.pop() if result.exit_code == 0 and made else result.output

    return invoked


def test_what_is_not_given_is_as_the_dataclass_says(run):
    assert run("here") == Wanted("here", left_out=0)


def test_what_is_given_has_the_type_of_its_field(run):
    found = run(
        *[
            "here",
            "--size",
            "24MB",
            "--deep",
            "--order",
            "dfs",
            "--part",
            "1",
            "--level",
            "a",
            "--level",
            "b",
            "--assume",
            "x=1",
            "--loud",
        ]
    )
    assert found == Wanted("here", "24MB", True, "dfs", 1.0, ["a", "b"], {"x": "1"}, 1)
    assert type(found.order) is str


@pytest.mark.parametrize("given", ["--order random", "--part 2", "--assume x", "--left-out 4"])
def test_what_no_field_takes_is_refused(run, given):
    assert not isinstance(run("here", *given.split()), Wanted)


def test_the_help_is_the_dataclasses(run):
    text = " ".join(run("--help").split())
    assert "--level" in text and "Which levels." in text and "[default: 0.5; 0<=x<=1]" in text
    assert "--left-out" not in text
