"""Pictures of estimates: what is drawn is what was estimated."""

from __future__ import annotations

import dataclasses

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating import figures, plots
from bnfuse.estimating.estimate import estimate
from bnfuse.estimating.hardware import MIB, profile
from bnfuse.estimating.layerwise import forward_workload
from bnfuse.estimating.reuse import reuse
from bnfuse.estimating.roofline import roofline
from bnfuse.estimating.sweep import sweep
from bnfuse.models import build_graph

pytest.importorskip("matplotlib")

SLOW = profile("rtx2080ti")
FAST = dataclasses.replace(SLOW, flops=2 * SLOW.flops)
WIDE = dataclasses.replace(SLOW, bandwidth=2 * SLOW.bandwidth)
CACHES = [MIB, 2 * MIB, 4 * MIB, 8 * MIB]


def make(batch: int):
    return forward_workload(build_graph("resnet20", batch=batch))


@pytest.fixture(scope="module")
def net():
    return make(4)


@pytest.fixture(scope="module")
def small(net):
    return sweep(net, SLOW, "cache", CACHES)


def drawn(panel) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in panel.get_lines() if len(line.get_xdata()) == 4}


def panels_of(figure) -> list:
    return [panel for panel in figure.axes if panel.get_visible()]


def test_the_roofline_has_each_layer_at_its_reuse_frequency(net):
    found = roofline(net, SLOW)
    (panel,) = panels_of(figures.roofline_figure([found]))
    points = {tuple(point) for each in panel.collections for point in each.get_offsets()}
    expected = {(p.reuse_frequency, p.attainable / 1e9) for p in found.points if p.reuse_frequency}
    assert points == expected
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {
        p.type for p in found.points if p.reuse_frequency
    }


def test_the_dashed_line_parts_the_two_types():
    found = roofline(make(64), SLOW)
    line = figures.parting_line(found)
    assert line is not None
    assert all(point.reuse_frequency < line for point in found.points if not point.dense)
    assert all(point.reuse_frequency > line for point in found.points if point.dense)


def test_traffic_is_drawn_in_and_out(small):
    (panel,) = panels_of(figures.traffic_figure([small]))
    lines = drawn(panel)
    unit = 1e6 if "MB)" in panel.get_ylabel() else 1e9
    assert lines["in"] == [point.traffic_in_bytes / unit for point in small.points]
    assert lines["out"] == [point.traffic_out_bytes / unit for point in small.points]
    assert list(panel.get_lines()[0].get_xdata()) == [1, 2, 4, 8]


def test_times_and_their_ratio_are_drawn_on_two_axes(net, small):
    fast = sweep(net, FAST, "cache", CACHES)
    left, right = panels_of(figures.time_figure([figures.Pair(small, fast)]))
    times = list(drawn(left).values())
    assert times == [[1000 * p.time_s for p in small.points], [1000 * p.time_s for p in fast.points]]
    ratio = [a.time_s / b.time_s for a, b in zip(small.points, fast.points, strict=True)]
    assert drawn(right)["speed-up"] == pytest.approx(ratio)
    assert right.get_lines()[0].get_ydata()[0] == 2  # the bound


def test_bandwidths_of_two_memories(net, small):
    wide = sweep(net, WIDE, "cache", CACHES)
    (panel,) = panels_of(figures.bandwidth_figure([figures.Pair(small, wide)]))
    lines = drawn(panel)
    assert list(lines) == ["memory of 616 GB/s", "memory of 1232 GB/s"]
    assert lines["memory of 616 GB/s"] == [point.average_bandwidth / 1e9 for point in small.points]


def test_bars_by_type_add_up_to_the_time(small):
    (panel,) = panels_of(figures.breakdown_figure([small]))
    heights = [0.0] * 4
    for bar in panel.patches:
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights == pytest.approx([1000 * point.time_s for point in small.points])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1 MB", "2 MB", "4 MB", "8 MB"]


def test_throughput_over_the_batch_has_an_axis_for_each_cache():
    pair = figures.Pair(
        *(sweep(make, dataclasses.replace(SLOW, cache=size), "batch", [2, 4]) for size in (CACHES[0], CACHES[-1]))
    )
    left, right = panels_of(figures.batch_figure([pair]))
    for panel, found in ((left, pair.slow), (right, pair.fast)):
        assert [bar.get_height() for bar in panel.patches] == [point.samples_per_s for point in found.points]
    assert "1 MB" in left.get_ylabel() and "8 MB" in right.get_ylabel()


def test_scopes_are_stacked_to_what_is_saved(net):
    found = reuse(net, CACHES)
    (panel,) = panels_of(figures.reuse_figure([found]))
    top = max(path.vertices[:, 1].max() for each in panel.collections for path in each.get_paths())
    saved = sum(found.caches[-1].saved.values())
    small_scopes = sum(v for v in found.possible.saved.values() if v <= plots.LEAST_SHARE * saved)
    unit = 1e6 if "(MB)" in panel.get_ylabel() else 1e9
    assert top * unit == pytest.approx(saved, abs=small_scopes + 1)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_estimates_and_sweeps_are_written_as_pictures(net, small, tmp_path, ending):
    plots.plot_estimate(estimate(net, SLOW), tmp_path / f"one.{ending}")
    plots.plot_sweep(small, tmp_path / f"many.{ending}")
    for name in ("one", "many"):
        start = (tmp_path / f"{name}.{ending}").read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if ending == "png" else b"<svg" in start or b"<?xml" in start
    with pytest.raises(BnfuseError, match="a plot ends in"):
        plots.plot_estimate(estimate(net, SLOW), tmp_path / "one.txt")


def test_every_axis_of_a_sweep_can_be_drawn(net, tmp_path):
    for axis, values in (("bandwidth", [1e11, 2e11]), ("flops", [1e12, 2e12])):
        plots.plot_sweep(sweep(net, SLOW, axis, values), tmp_path / f"{axis}.png")
    plots.plot_sweep(sweep(make, SLOW, "batch", [2, 4]), tmp_path / "batch.png")
    assert len(list(tmp_path.iterdir())) == 3


def test_every_type_of_layer_has_a_colour():
    from bnfuse.estimating.operations import TYPES

    assert {*TYPES.values(), "Conv2D", "DepthwiseConv2D", "Other"} <= {*plots.COLOURS}


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_figure_is_the_same_file(tmp_path, ending, monkeypatch):
    from bnfuse.core.figures import pyplot_figure, save_figure

    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    files = []
    for name in ("a", "b"):
        figure = pyplot_figure()()
        figure.subplots().plot([1, 2], [3, 4], label="line")
        save_figure(figure, tmp_path / f"{name}.{ending}")
        files.append((tmp_path / f"{name}.{ending}").read_bytes())
    assert files[0] == files[1]
    assert b"CreationDate" not in files[0] and b"<dc:date>" not in files[0]


def test_a_name_is_no_formula(tmp_path):
    from bnfuse.core.figures import pyplot_figure, save_figure

    figure = pyplot_figure()()
    axis = figure.subplots()
    axis.bar([0, 1], [1, 2])
    axis.set_xticks([0, 1], ["stem_{conv}$$", "a$x$b"])
    axis.set_title("net$$")
    axis.set_yscale("log")
    save_figure(figure, tmp_path / "names.svg")
    assert "stem_{conv}$$" in (tmp_path / "names.svg").read_text()
