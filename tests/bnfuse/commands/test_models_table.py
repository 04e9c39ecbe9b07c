"""`bnfuse models` on a narrow terminal and in a pipe."""

from bnfuse.build.zoo import zoo_entries
from bnfuse.cli import main


def test_every_line_of_the_list_of_networks_is_narrow(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 88
    said = " ".join(" ".join(lines).split())
    for entry in zoo_entries():
        assert f"{entry.name}: {entry.about}" in said
        assert all(f"{key}={value}" in said for key, value in entry.metaparameters.items())
