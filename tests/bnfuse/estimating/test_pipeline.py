"""The ReRAM and GPU pipeline: stages by hand, sharing of crossbars and tiles, the claims of [Joardar22]."""

import csv
import importlib.util
import io
import json
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.reram.assumptions import ReramAssumptions, Stack, stack
from bnfuse.estimating.reram.layers import Matrix, Network, Norm, network_of
from bnfuse.estimating.reram.pipeline import Job, conventional_s, pipeline, replicate
from bnfuse.estimating.reram.plot import plot
from bnfuse.estimating.reram.tiles import balanced, in_turns, own
from bnfuse.estimating.settings import settle
from bnfuse.graph.training_graph import open_graph
from bnfuse.models import build_graph

ROOT = Path(__file__).resolve().parents[3]

CIFAR = {
    "vgg11": {"hidden": 512},
    "vgg16": {"hidden": 512},
    "vgg19": {"hidden": 512},
    "resnet18": {"stem": "small"},
}


def assume(**given):
    return settle(given, ReramAssumptions())[0]


def cifar(name, remove=None):
    return network_of(build_graph(name, batch=2, image=32, classes=10, **CIFAR[name]), remove)


def conv(name, channels_in, channels_out, side, kernel=3):
    rows, pixels = channels_in * kernel**2, side * side
    return Matrix(
        name,
        "Conv",
        groups=1,
        rows=rows,
        columns=channels_out,
        vectors=pixels,
        error_rows=channels_out * kernel**2,
        error_columns=channels_in,
        error_vectors=pixels,
        inputs=channels_in * pixels,
        outputs=channels_out * pixels,
    )


def test_a_vector_takes_sixteen_reads_at_ten_megahertz():
    alone = Network("one", (conv("c", 64, 64, 8),))
    (stage,) = pipeline(alone, "3r1g", assume(replication="none")).stages
    assert stage.time_s == pytest.approx(64 * 16 / 10e6)
    assert stage.crossbars == 24  # 5 x 4 crossbars of 128 rows and 16 weights of 16 bits a row, by groups of 8


def test_copies_make_the_longest_stage_as_short_as_the_crossbars_allow():
    two = Network("two", (conv("a", 64, 64, 8), conv("b", 64, 64, 4)))  # 24 crossbars each; vectors 64, 16, 16
    small = assume(tiles=1, crossbars=24 * 6, buffers=False)
    found = pipeline(two, "1r3g", small)
    assert [(x.name, x.phase, x.copies) for x in found.stages] == [
        ("a", "forward", 4),
        ("b", "forward", 1),
        ("b", "error", 1),
    ]
    assert found.reram_s == pytest.approx(16 * 1.6e-6)
    assert found.used_crossbars == 24 * 6
    assert pipeline(two, "1r3g", assume(tiles=1, crossbars=24 * 6 - 1, buffers=False)).reram_s > found.reram_s


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(0, 3000),
    st.sampled_from(["balanced", "uniform"]),
)
def test_no_other_copies_within_the_budget_are_faster(sizes, spare, rule):
    jobs = [Job(str(i), "forward", vectors, crossbars) for i, (vectors, crossbars) in enumerate(sizes)]
    budget = sum(job.crossbars for job in jobs) + spare
    copies = replicate(jobs, budget, assume(replication=rule))
    assert sum(job.crossbars * n for job, n in zip(jobs, copies, strict=True)) <= budget
    longest = max(-(-job.vectors // n) for job, n in zip(jobs, copies, strict=True))
    if rule == "balanced":
        faster = sum(job.crossbars * -(-job.vectors // (longest - 1)) for job in jobs) if longest > 1 else None
    else:
        more = max(copies) + 1
        faster = sum(job.crossbars * min(more, job.vectors) for job in jobs) if longest > 1 else None
    assert faster is None or faster > budget


def test_uniform_replication_gives_every_layer_as_many_copies():
    two = Network("two", (conv("a", 64, 64, 8), conv("b", 64, 64, 4)))
    found = pipeline(two, "1r3g", assume(tiles=1, crossbars=24 * 6, buffers=False, replication="uniform"))
    assert [x.copies for x in found.stages] == [2, 2, 2]


def test_one_set_of_weights_serves_both_directions_in_turns():
    two = Network("two", (conv("a", 64, 64, 8), conv("b", 64, 64, 4)))
    found = pipeline(two, "3r1g", assume(error_weights=False, replication="none"))
    assert [(x.phase, x.work) for x in found.stages] == [("forward", 64), ("both", 32)]


def test_weight_gradients_on_reram_are_stages_of_their_own():
    two = Network("two", (conv("a", 64, 64, 8), conv("b", 64, 64, 4)))
    work = {}
    for kind in ("outer", "mapped"):
        found = pipeline(two, "3r1g", assume(gradients=kind))
        work[kind] = [x.work for x in found.stages if x.phase == "gradient"]
    assert work == {"outer": [16, 64], "mapped": [64, 64]}  # backward order; pixels, or output channels


def test_earlier_layers_keep_maps_of_more_images():
    two = Network("two", (conv("a", 64, 64, 8), conv("b", 64, 64, 4)))
    kept = pipeline(two, "3r1g").kept_crossbars
    assert kept == -(-(3 * 64 * 64 + 64 * 16) // 2048)
    with_norm = Network("three", (two.layers[0], Norm("n", 64, 4096), two.layers[1]))
    assert pipeline(with_norm, "3r1g").kept_crossbars == kept
    longer = pipeline(with_norm, "3r1g", assume(norm_stages=True)).kept_crossbars
    assert longer == -(-(5 * 64 * 64 + 64 * 16) // 2048)


def test_a_batch_norm_takes_the_longer_of_memory_and_instructions():
    network = Network("n", (conv("c", 64, 64, 8), Norm("bn", 64, 4096)))
    by_memory = pipeline(network, "3r1g").gpu_s
    assert by_memory == pytest.approx(4096 * 8 * 4 / (177.4e9 / 15) / 16)
    by_issue = pipeline(network, "3r1g", assume(norm_instructions=1000)).gpu_s
    assert by_issue == pytest.approx(4096 * 1020 / (32 * 700e6) / 16)


@pytest.mark.parametrize("share", [own, balanced, in_turns])
@pytest.mark.parametrize("loads", [[5.0], [8.0, 4.0, 2.0, 1.0], [3.0] * 9, [100.0, *[1.0] * 20], []])
def test_tiles_are_enough_for_what_they_are_given(share, loads):
    if not loads and share is in_turns:
        loads = [1.0]
    tiles, times = share(loads, 8)
    assert sum(tiles) <= 8 + 1e-9
    assert all(time >= load / n - 1e-9 for load, n, time in zip(loads, tiles, times, strict=True))


def test_sharing_small_ones_leaves_more_tiles_to_the_large():
    loads = [16.0, 8.0, 1.0, 1.0, 1.0, 1.0]
    assert max(in_turns(loads, 6)[1]) <= max(balanced(loads, 6)[1]) < max(own(loads, 6)[1])


def test_a_training_graph_and_its_forward_graph_have_the_same_stages():
    built = build_model("resnet18", zoo={"batch": 2, "image": 32, "classes": 10, "stem": "small"})
    trained, forward = network_of(open_graph(built.model), "paper"), cifar("resnet18", "paper")
    assert set(trained.layers) == set(forward.layers)
    assert len(forward.norms) == 12


def test_what_papers_002_claims_holds_without_calibration():
    lower, fewer = [], []
    for name in CIFAR:
        full, few = cifar(name), cifar(name, "paper")
        found = {(c, n): pipeline(x, c) for c in ("2r2g", "3r1g") for n, x in (("all", full), ("few", few))}
        best = min(x.period_s for x in found.values())
        assert found["3r1g", "few"].period_s == best, name
        assert all(x.period_s < conventional_s(full, x.assumptions) for x in found.values()), name
        assert found["3r1g", "all"].gpu_s > 2 * found["3r1g", "all"].reram_s, name
        assert found["2r2g", "few"].gpu_s < found["2r2g", "few"].reram_s, name
        assert conventional_s(few, ReramAssumptions()) > 0.9 * conventional_s(full, ReramAssumptions())
        lower.append(1 - best / found["3r1g", "all"].period_s)
        fewer.append(1 - found["3r1g", "few"].instructions / found["3r1g", "all"].instructions)
    assert fmean(lower) == pytest.approx(0.671, abs=0.02)
    assert fmean(fewer) == pytest.approx(0.82, abs=0.02)


def test_vgg11_on_2r2g_waits_slightly_longer_for_its_batch_norms():
    found = pipeline(cifar("vgg11"), "2r2g")
    assert 1 < found.gpu_s / found.reram_s < 1.3


def test_vgg19_does_not_fit_on_one_layer_of_reram_and_is_told_so():
    with pytest.raises(BnfuseError, match=r"vgg19 does not fit on 1R3G: .* 23,068 crossbars .* 13,824.*hidden=512"):
        pipeline(cifar("vgg19"), "1r3g")


def test_stacks_are_read_and_refused_by_name():
    assert stack("3R1g", ReramAssumptions()) == Stack(3, 1)
    assert stack("5r1g", assume(layers=6)) == Stack(5, 1)
    for text in ("4r0g", "3r2g", "h100", ""):
        with pytest.raises(BnfuseError, match="no stack of 4 layers: there are 1r3g, 2r2g, 3r1g"):
            stack(text, ReramAssumptions())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"replication": "some"}, "replication=some is unknown: it is balanced"),
        ({"clock": 0.0}, "clock=0.0 is out of range"),
        ({"clock": float("nan")}, "clock=nan is out of range"),
        ({"batch": -1}, "batch=-1 is out of range"),
        ({"titan_efficiency": 1.5}, "titan_efficiency"),
    ],
)
def test_assumptions_that_make_no_sense_are_refused(given, match):
    with pytest.raises(BnfuseError, match=match):
        ReramAssumptions(**given)


def test_a_fused_graph_is_refused():
    from bnfuse.api import rewrite

    built = build_model("resnet20", zoo={"batch": 2})
    fused = open_graph(rewrite(built.model, "icf").model)
    with pytest.raises(BnfuseError, match=r"is fused: .* Give it the source graph"):
        pipeline(fused)


def test_a_network_without_batch_norms_is_bound_by_its_convolutions():
    found = pipeline(cifar("vgg11", "all"), "3r1g")
    assert (found.gpu_s, found.instructions, found.period_s) == (0, 0, found.reram_s)
    assert found.bottleneck.unit == "reram"


def test_results_as_json_csv_text_and_picture(tmp_path):
    found = pipeline(cifar("vgg11"), "3r1g", assume(batch=64))
    data = json.loads(json.dumps(found.to_json()))
    assert data["period_s"] == pytest.approx(max(stage["time_s"] for stage in data["stages"]))
    assert data["step_s"] == pytest.approx((2 * 19 + 64 + 1) * data["period_s"])
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["name"] for row in rows] == [stage["name"] for stage in data["stages"]]
    assert "batch=64" in str(found)
    assert "is the longest stage" in str(found)
    plot(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_documented_figures_are_what_the_script_prints():
    script = ROOT / "benchmarks" / "reram_figures.py"
    spec = importlib.util.spec_from_file_location("reram_figures", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layers = module.networks()
    found = module.pipelines(layers, ReramAssumptions())
    documented = (ROOT / "docs" / "reram.md").read_text()
    lower, fewer = module.averages(layers, found)
    single = ", ".join(f"{100 * module.reduction(found, name):.1f}" for name in CIFAR)
    assert f"| {lower}: {single} % |" in documented
    assert f"| {fewer}: " in documented
    assert f"| {module.speedup(found['vgg11', '3r1g', 'BO-N'], layers, 'vgg11'):.1f}x, " in documented
    ratios = ", ".join(f"{module.ratio(found[name, '3r1g', 'All-BN']):.2f}" for name in CIFAR)
    assert f"| {ratios} |" in documented
    changed = module.pipelines(layers, assume(gradients="outer"))
    assert changed["vgg19", "2r2g", "All-BN"] is None
    assert str(module.variations(layers, ReramAssumptions())).count("%") == len(module.VARIATIONS) + 1
