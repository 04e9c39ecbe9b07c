"""What a cgroup leaves of the memory that the system has."""

from __future__ import annotations

from bnfuse.core import memory, processors


def test_a_limit_bounds_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(processors, "CGROUPS", tmp_path)
    monkeypatch.setattr(processors, "OWN_CGROUPS", tmp_path / "own")
    assert memory.free_memory() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert memory.free_memory() == 5000 << 10
    (tmp_path / "own").write_text("0::/user/session\n")
    (tmp_path / "user" / "session").mkdir(parents=True)
    (tmp_path / "user" / "session" / "memory.max").write_text("max\n")
    assert memory.free_memory() == 5000 << 10
    for name, text in (("max", "3000000"), ("current", "2500000"), ("stat", "anon 5\ninactive_file 400000\n")):
        (tmp_path / "user" / f"memory.{name}").write_text(text)
    assert memory.free_memory() == 900_000
    (tmp_path / "user" / "memory.current").write_text("9000000")
    assert memory.free_memory() == 0
