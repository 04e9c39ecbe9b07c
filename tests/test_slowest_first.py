"""The order in which workers take the tests' files."""

import types
from pathlib import Path

from slowest_first import TABLE, SlowestFirst, read, write

ROOT = Path(__file__).resolve().parents[1]


def item(nodeid: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(nodeid=nodeid)


def test_a_worker_begins_with_the_slowest_file_and_keeps_the_order_within_files(tmp_path):
    table = tmp_path / "table.txt"
    table.write_text("9 tests/b.py\n40 tests/c.py\n")
    items = [item(name) for name in ("tests/a.py::x", "tests/b.py::y", "tests/b.py::x", "tests/c.py::z")]
    SlowestFirst(table).pytest_collection_modifyitems(types.SimpleNamespace(workerinput={}), items)
    assert [i.nodeid for i in items] == ["tests/c.py::z", "tests/b.py::y", "tests/b.py::x", "tests/a.py::x"]


def test_a_single_process_keeps_the_usual_order(tmp_path):
    table = tmp_path / "table.txt"
    table.write_text("9 tests/b.py\n")
    items = [item("tests/a.py::x"), item("tests/b.py::y")]
    SlowestFirst(table).pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert [i.nodeid for i in items] == ["tests/a.py::x", "tests/b.py::y"]


def test_the_table_has_the_slow_files_of_a_run_sorted(tmp_path):
    table = tmp_path / "table.txt"
    plugin = SlowestFirst(table)
    for nodeid, duration in (("tests/a.py::x", 2.0), ("tests/a.py::y", 2.5), ("tests/b.py::x", 7.0), ("c.py::x", 0.1)):
        plugin.pytest_runtest_logreport(types.SimpleNamespace(nodeid=nodeid, duration=duration))
    write(table, plugin.seconds)
    assert read(table) == {"tests/b.py": 7.0, "tests/a.py": 4.0}
    assert [*read(table)] == ["tests/b.py", "tests/a.py"]


def test_the_table_names_files_that_there_are():
    assert [path for path in read(TABLE) if not (ROOT / path).exists()] == []
