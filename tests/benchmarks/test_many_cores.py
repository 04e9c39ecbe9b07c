"""benchmarks/many_cores.py without measuring: the table of what a run wrote."""

import pathlib

from source_files import load

script = load(pathlib.Path(__file__).parents[2] / "benchmarks" / "many_cores.py")


def line(threads, ours, rate, **torchs):
    steps = {"icf fp32": ours, **{name.replace("_", "-") + " fp32": value for name, value in torchs.items()}}
    steps["torch-cl bf16"] = 1e-3  # of another precision: no peer
    return {
        "network": "resnet20",
        "threads": threads,
        "flops_per_s": rate,
        "steps": {name: {"min": value, "median": 2 * value} for name, value in steps.items()},
    }


def test_the_table_has_ratios_and_efficiencies():
    lines = [line(4, 0.3, 3e11, torch_cl=0.5, torch_compile=0.45), line(1, 0.9, 1e11, torch_cl=1.8, torch_compile=2.0)]
    _, one, four = script.table(lines)
    assert one.split() == ["resnet20", "1", "fp32", "900.0", "1800.0", "torch-cl", "2.00x", "1.00", "1.00"]
    assert four.split() == ["resnet20", "4", "fp32", "300.0", "450.0", "torch-compile", "1.50x", "0.75", "0.75"]


def test_without_one_thread_and_peers_there_is_the_time_alone():
    _, row = script.table([line(8, 0.3, 3e11)])
    assert row.split() == ["resnet20", "8", "fp32", "300.0"]
