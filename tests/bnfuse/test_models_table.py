"""`bnfuse models` on a narrow terminal and in a pipe."""

from typer.testing import CliRunner

from bnfuse.cli import app
from bnfuse.zoo import zoo_entries


def test_every_line_of_the_list_of_networks_is_narrow():
    lines = CliRunner().invoke(app, ["models"]).output.splitlines()
    assert max(map(len, lines)) <= 88
    said = " ".join(" ".join(lines).split())
    for entry in zoo_entries():
        assert f"{entry.name}: {entry.about}" in said
        assert all(f"{key}={value}" in said for key, value in entry.metaparameters.items())
