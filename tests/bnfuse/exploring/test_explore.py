"""Sweeps of small networks: counts, times, failures, files; the papers' sizes."""

import csv
import io
import json

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.hardware import Hardware
from bnfuse.exploring import PRESETS, explore
from bnfuse.exploring.points import Measure, Point

SLOW = Hardware("slow", "", flops=1e12, bandwidth=5e10, cache=1 << 16)
SMALL = {"batch": 2, "image": 32, "classes": 10}


@pytest.fixture(scope="module")
def swept():
    return sweep()


def sweep():
    """On hardware whose cache is too small for the maps: where all fits, fusing has little to save."""
    vary = ["squeeze=0.125,0.5", "bypass=none,simple"]
    return explore("squeezenet", vary, base={**SMALL, "image": 64, "base": 16}, hardware=SLOW)


def test_every_point_has_its_counts_and_its_times_before_and_after(swept):
    assert [p.changes for p in swept.points] == [
        {"squeeze": s, "bypass": b} for s in (0.125, 0.5) for b in ("none", "simple")
    ]
    for p in swept.points:
        assert p.error is None
        assert p.sweeps_after < p.sweeps
        assert p.moved_bytes_after < p.moved_bytes
        assert 0 < p.time_s < p.time_before_s
        assert 0 < p.norm_time_share < 1
        assert p.speedup > 1
        assert p.settings == {**SMALL, "image": 64, "base": 16, **p.changes}
        assert p.model_bytes == 4 * p.parameters
        assert 2 * p.flops_forward < p.flops < 3 * p.flops_forward


def test_more_squeeze_filters_take_more_of_everything(swept):
    less, more = swept.points[0], swept.points[2]
    for quantity in ("parameters", "flops", "output_bytes", "moved_bytes", "time_before_s", "time_s"):
        assert getattr(less, quantity) < getattr(more, quantity), quantity


def test_counts_are_those_of_the_training_graph(swept):
    counted = explore("squeezenet", ["squeeze=0.5"], base={**SMALL, "image": 64, "base": 16}, hardware=None)
    alone, full = counted.points[0], swept.points[2]
    for quantity in ("parameters", "model_bytes", "flops", "output_bytes", "sweeps", "moved_bytes", "norm_share"):
        assert getattr(alone, quantity) == getattr(full, quantity), quantity
    assert (alone.time_s, alone.sweeps_after, counted.hardware) == (None, None, None)


def test_the_front_is_marked_and_sorted_by_its_first_goal(swept):
    assert swept.front == tuple(sorted((p for p in swept.points if p.pareto), key=lambda p: p.parameters))
    fewest = min(swept.points, key=lambda p: (p.parameters, p.time_s))
    assert fewest.pareto
    assert "*  squeeze=0.125 bypass=none" in str(swept)


def test_a_sweep_is_the_same_each_time(swept):
    assert sweep() == swept


def test_a_point_that_cannot_be_built_says_why_and_the_others_go_on():
    found = explore("alexnet", ["image=4,67"], base={"batch": 1}, hardware=None)
    small, large = found.points
    assert "its input is" in small.error
    assert large.error is None
    assert large.pareto and not small.pareto
    text = str(found)
    assert "Points that could not be built (1)" in text
    assert "image=4: alexnet: node" in text


def test_a_failure_that_nobody_foresaw_is_a_row_too(monkeypatch):
    from bnfuse.exploring import run

    def measured(network: str, changes: dict, settings: dict, measure: Measure) -> Point:
        if settings["growth"] == 4:
            raise RuntimeError("out of luck")
        return Point(changes, settings, parameters=1)

    monkeypatch.setattr(run, "measured", measured)
    found = explore("densenet40", ["growth=4,8"], hardware=None)
    assert found.points[0].error == "RuntimeError: out of luck"
    assert found.points[1].parameters == 1


def test_where_no_point_can_be_built_the_first_reason_is_the_error():
    with pytest.raises(BnfuseError, match="no point could be built; the first: alexnet: node"):
        explore("alexnet", ["image=3,4"], hardware=None)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "name a network of the zoo, or a preset"),
        ({"network": "resnet20"}, "nothing varies"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "base": {"batch": 4}}, "batch is both set and varied"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "level": "max"}, "no level 'max'"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "hardware": "abacus"}, "no hardware 'abacus'"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "assume": {"luck": "1"}}, "luck"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "pareto": "beauty"}, "'beauty' is nothing to compare"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "plot": "x.txt"}, "a plot ends in"),
        ({"network": "resnet20", "vary": ["batch=1,2"], "plot": "x.png", "pareto": "time"}, "needs two quantities"),
        ({"network": "resnet20", "vary": ["batch=1:300"]}, "300 points, and 200 are the limit"),
        ({"preset_name": "everything"}, "no preset 'everything': there are squeeze-ratio"),
        ({"preset_name": "densenet-growth", "network": "resnet20"}, "no metaparameter 'growth'"),
    ],
)
def test_bad_use_is_refused_before_any_work(arguments, match, monkeypatch, tmp_path):
    from bnfuse.exploring import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "measured", lambda *_: pytest.fail("work was done"))
    with pytest.raises(BnfuseError, match=match):
        explore(**arguments)


def test_progress_hears_of_every_point():
    heard = []

    class Watching:
        def __call__(self, text: str) -> None: ...

        def bar(self, done: int, total: int, text: str = "") -> None:
            heard.append((done, total, text))

    explore("resnet20", ["batch=1,2"], hardware=None, progress=Watching())
    assert heard == [(0, 2, "batch=1"), (1, 2, "batch=2"), (2, 2, "points")]


def test_results_as_json_csv_and_picture(tmp_path):
    found = explore(
        "densenet40",
        ["depth=2,4", "image=16,16x24"],
        base={"batch": 2},
        plot=tmp_path / "p.svg",
        output=tmp_path / "p.csv",
    )
    data = json.loads(json.dumps(found.to_json()))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert [(row["depth"], row["image"]) for row in rows] == [(d, i) for d in "24" for i in ("16", "16x24")]
    assert [int(row["parameters"]) for row in rows] == [p["parameters"] for p in data["points"]]
    assert data["pareto"] == [{"quantity": "parameters", "more": False}, {"quantity": "time", "more": False}]
    picture = (tmp_path / "p.svg").read_text()
    assert "densenet40 by depth, image" in picture
    assert "estimated on h100" in picture


def test_a_result_is_not_written_over_another(tmp_path):
    with pytest.raises(BnfuseError, match="named twice"):
        explore("resnet20", ["batch=1,2"], plot=tmp_path / "a.svg", output=tmp_path / "a.svg")


def test_accuracies_are_joined_by_their_settings(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("SR,bypass,accuracy\n0.125,none,80.3\n0.125,simple,82.5\n0.9,none,1\n")
    found = explore("squeezenet", ["SR=0.125,0.5", "bypass=none,simple"], hardware=None, accuracy=table)
    assert [p.accuracy for p in found.points] == [80.3, 82.5, None, None]
    assert [str(goal) for goal in found.goals] == ["most accuracy", "least flops"]
    assert [p.pareto for p in found.points] == [False, True, False, False]  # a bypass adds no counted work
    assert "accuracy" in str(found)


def test_accuracies_may_be_of_defaults_that_are_not_varied(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("freq,squeeze,accuracy\n2,0.5,85\n3,0.5,1\n")
    found = explore("squeezenet", ["squeeze=0.125,0.5"], hardware=None, accuracy=table)
    assert [p.accuracy for p in found.points] == [None, 85.0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no column 'accuracy'"),
        ("squeeze\n0.5\n", "no column 'accuracy'"),
        ("squeeze,accuracy\n0.5,good\n", "line 2: accuracy 'good' is no number"),
        ("squeeze,accuracy\n0.5,nan\n", "line 2: accuracy 'nan' is no number"),
        ("squeeze,accuracy\n0.5\n", "line 2 has not as many cells"),
        ("squeeze,accuracy\n0.5,1,2\n", "line 2 has not as many cells"),
        ("growth,accuracy\n0.5,1\n", "line 2: squeezenet has no metaparameter 'growth'"),
    ],
)
def test_tables_of_accuracies_that_make_no_sense_are_refused(text, match, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(BnfuseError, match=match):
        explore("squeezenet", ["squeeze=0.125,0.5"], hardware=None, accuracy=tmp_path / "a.csv")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_points_that_all_can_be_built(name):
    found = explore(preset_name=name, hardware=None)
    assert len(found.points) >= 3
    assert not [p.error for p in found.points if p.error]


def test_squeeze_ratio_has_the_model_sizes_of_figure_5_3():
    found = explore("squeezenet-plain", preset_name="squeeze-ratio", hardware=None)
    sizes = {p.changes["squeeze"]: p for p in found.points}
    assert sizes[0.125].parameters == 1_248_424
    assert sizes[0.125].model_bytes / 2**20 == pytest.approx(4.8, abs=0.05)
    assert sizes[0.5].model_bytes / 2**20 == pytest.approx(13, abs=0.5)
    assert sizes[0.75].model_bytes / 1e6 == pytest.approx(19, abs=0.5)


def test_nin_changes_grow_as_papers_003_says():
    found = explore(preset_name="nin-changes", hardware=None)
    base, *changed = found.points
    assert base.flops_forward == pytest.approx(2.27e12, rel=0.005)
    assert base.model_bytes == pytest.approx(30.4e6, rel=0.005)
    computation = [round(p.flops_forward / base.flops_forward, 1) for p in changed]
    parameters = [round(p.parameters / base.parameters, 1) for p in changed]
    assert computation == [1.3, 1.1, 1.3, 1.1, 3.8, 4.3]
    assert parameters == [1.0, 1.1, 1.3, 1.4, 1.0, 1.0]


def test_a_preset_takes_further_axes_and_changes_one_at_a_time():
    found = explore(preset_name="bypass", vary=["squeeze=0.125,0.5"], separately=True, hardware=None)
    assert [p.changes for p in found.points] == [{}, {"bypass": "simple"}, {"bypass": "complex"}, {"squeeze": 0.5}]


def test_batches_are_compared_by_images_a_second():
    found = explore("resnet20", ["batch=2,4"], base={"image": 16}, pareto="throughput,moved")
    small, large = found.points
    assert large.samples_per_s == pytest.approx(4 / large.time_s)
    assert str(found.goals[0]) == "most throughput"
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["batch"] for row in rows] == ["2", "4"]
    assert float(rows[0]["samples_per_s"]) == small.samples_per_s


def test_a_network_of_shapes_has_the_time_of_its_layers_alone():
    found = explore("transformer", ["layers=1,2"], base={"batch": 2})
    assert [p.time_s for p in found.points] == [None, None]
    assert 0 < found.points[0].time_before_s < found.points[1].time_before_s
    assert [p.pareto for p in found.points] == [True, False]
