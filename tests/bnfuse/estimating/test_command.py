"""`bnfuse estimate` as a user runs it: every kind of question, and what is refused."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import bnfuse
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.estimating.hardware import MIB, PROFILES
from bnfuse.estimating.source import workloads
from bnfuse.estimating.workload import in_precision

NETWORK = ["densenet40", "--set", "growth=4", "--set", "depth=2", "--batch", "4", "--image", "8"]
TOTALS = (
    "time_s",
    "stall_s",
    "traffic_in_bytes",
    "traffic_out_bytes",
    "average_bandwidth",
    "compute_utilization",
    "by_type",
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    path = tmp_path_factory.mktemp("estimate") / "train.onnx"
    assert main(["build", *NETWORK, "-o", str(path)]) == 0
    return str(path)


@pytest.fixture
def ask(capsys):
    """The JSON of `bnfuse estimate ARGUMENTS`."""

    def asked(*arguments):
        assert main(["estimate", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return asked


@pytest.fixture
def refused(capsys):
    """The one line that `bnfuse estimate ARGUMENTS` ends with."""

    def line(*arguments):
        assert main(["estimate", *arguments]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    return line


def test_an_estimate_has_the_documented_keys_and_adds_up(ask, train):
    found = ask(train, "--hardware", "a100")
    assert {*TOTALS} <= {*found}
    assert found["hardware"]["name"] == "a100"
    assert found["time_s"] == pytest.approx(sum(found["by_type"].values()))
    assert found["time_s"] == pytest.approx(found["compute_s"] + found["stall_s"])
    assert sum(layer["in_bytes"] for layer in found["layers"]) == found["traffic_in_bytes"]
    assert found["batch"] == 4


def test_the_api_gives_the_same_as_the_command(ask, train):
    asked = ask(train, "--cache", "1MB", "--bandwidth", "100GB/s", "--flops", "1TFLOP/s")
    found = bnfuse.estimate(train, cache=MIB, bandwidth=100e9, flops=1e12)
    assert asked["hardware"] == {**asked["hardware"], "cache": MIB, "bandwidth": 100e9, "flops": 1e12, "name": "own"}
    assert found.time_s == asked["time_s"]


def test_a_part_of_a_profile_can_be_another(ask, train):
    found = ask(train, "--hardware", "a100", "--cache", "2MB")["hardware"]
    assert found["cache"] == 2 * MIB
    assert found["bandwidth"] == PROFILES["a100"].bandwidth
    assert found["name"] != "a100"


def test_fused_levels_move_less_and_take_less_time(ask, train):
    found = ask(train, "--level", "none,mvf,icf", "--cache", "16KB", "--hardware", "a100")["results"]
    assert [each["level"] for each in found] == ["none", "mvf", "icf"]
    assert found[0]["ratio"] == 1
    times = [each["time_s"] for each in found]
    moved = [each["traffic_in_bytes"] + each["traffic_out_bytes"] for each in found]
    assert times == sorted(times, reverse=True) and len(set(times)) == 3
    assert moved == sorted(moved, reverse=True) and len(set(moved)) == 3


def test_a_rewritten_file_is_estimated_as_its_level(ask, train, tmp_path):
    fused = str(tmp_path / "fused.onnx")
    bnfuse.save(bnfuse.rewrite(train).model, fused)
    assert ask(train, "--level", "icf")["time_s"] == pytest.approx(ask(fused)["time_s"])
    assert ask(train, "--level", "icf")["workload"] == f"{train} icf"


def test_a_network_by_name_needs_no_file(ask):
    found = ask(*NETWORK, "--hardware", "rtx2080ti")
    assert found["workload"] == "densenet40"
    assert found["batch"] == 4
    assert {"Conv2D", "BatchNorm", "Activation"} <= {*found["by_type"]}


@pytest.mark.parametrize("name", ["gnmt", "transformer"])
def test_networks_of_shapes_alone_are_estimated(ask, name):
    found = ask(name, "--batch", "2", "--set", "steps=3", "--set", "hidden=32", "--set", "vocabulary=50")
    assert found["time_s"] > 0


def test_a_sweep_of_the_cache(ask, train, tmp_path):
    table = tmp_path / "sweep.csv"
    found = ask(train, "--sweep", "cache=16KB:64KB:16KB", "--csv", str(table))
    assert {*TOTALS, "batch", "compute_s", "active_time", "samples_per_s", "flops"} <= {*found["points"][0]}
    assert [point["value"] for point in found["points"]] == [16384, 32768, 49152, 65536]
    moved = [point["traffic_in_bytes"] + point["traffic_out_bytes"] for point in found["points"]]
    assert moved == sorted(moved, reverse=True)
    rows = list(csv.DictReader(table.open()))
    assert [int(row["cache"]) for row in rows] == [16384, 32768, 49152, 65536]


def test_a_sweep_of_the_batch(ask):
    found = ask(*NETWORK[:5], "--image", "8", "--sweep", "batch=1,2,4")
    assert [point["batch"] for point in found["points"]] == [1, 2, 4]


def test_reuse_by_scope(ask, train):
    found = ask(train, "--reuse", "--cache", "32KB")
    shares = [sum(each["saved_in_bytes"].values()) for each in found["caches"]]
    assert found["caches"][0]["cache"] == 32768
    assert shares == sorted(shares)


def test_the_roofline_of_a_network(ask, train):
    found = ask(train, "--roofline", "--bandwidth", "1TB/s", "--flops", "2TFLOP/s", "--cache", "1MB")
    assert found["ridge_point"] == 2
    bound = {layer["compute_bound"]: [] for layer in found["layers"]}
    for layer in found["layers"]:
        assert layer["attainable"] == pytest.approx(min(2e12, 1e12 * layer["reuse_frequency"]))
        bound[layer["compute_bound"]].append(layer["type"])
    assert {"Conv2D"} <= {*bound[True]} and "BatchNorm" in bound[False]


def test_workers_share_a_batch(ask, train):
    found = ask(train, "--workers", "1,2,4", "--network", "1GB/s", "--reduce", "server")
    assert [point["share"] for point in found["points"]] == [4, 2, 1]
    seconds = [point["communication_s"] for point in found["points"]]
    assert seconds == pytest.approx([0, 2 * found["gradient_bytes"] / 1e9, 4 * found["gradient_bytes"] / 1e9])


def test_workers_exchange_buckets_beside_the_backward_pass(ask, train):
    about = ["--workers", "1,4,1024", "--network", "1GB/s", "--scaling", "weak"]
    found = ask(train, *about, "--bucket", "1KB", "--latency", "5", "--jitter", "0.02")
    size, one, four, many = found["gradient_bytes"], *found["points"]
    assert found["strategy"] == "ring" and found["exchanges"] > 2 and one["efficiency"] == pytest.approx(1)
    wanted = 2 * 3 / 4 * size / 1e9 + found["exchanges"] * 6 * 5e-6
    assert four["communication_s"] == pytest.approx(wanted)
    assert four["exposed_s"] < four["communication_s"] and many["efficiency"] < four["efficiency"] < 1
    assert four["waiting_s"] == pytest.approx(0.02 * (1 / 2 + 1 / 3 + 1 / 4) * one["compute_s"])
    (whole,) = ask(train, *about[:1], "4", *about[2:], "--bucket", "1GB")["points"]
    assert whole["communication_s"] == pytest.approx(2 * 3 / 4 * size / 1e9)
    assert 0 < whole["exposed_s"] <= whole["communication_s"]


def test_a_stack_of_reram_and_gpu_layers(ask):
    everything = ask("vgg11", "--image", "32", "--hardware", "3r1g")
    few = ask("vgg11", "--image", "32", "--hardware", "3R1G", "--remove", "paper")
    assert few["gpu_instructions"] < everything["gpu_instructions"]


def test_an_assumption_changes_the_estimate(ask, train):
    own = ["--cache", "1GB", "--bandwidth", "1TB/s", "--flops", "1GFLOP/s"]
    one, two = (ask(train, *own, "--assume", f"mac_operations={n}") for n in (1, 2))
    assert one["compute_s"] < two["compute_s"] < 2 * one["compute_s"]
    assert two["assumptions"]["mac_operations"] == 2


@pytest.mark.parametrize(
    "question",
    [
        [],
        ["--level", "none,icf"],
        ["--sweep", "cache=16KB:64KB:16KB"],
        ["--reuse"],
        ["--roofline"],
        ["--workers", "1,2"],
    ],
    ids=["estimate", "levels", "sweep", "reuse", "roofline", "workers"],
)
def test_every_answer_has_text_a_picture_and_csv(train, tmp_path, capsys, question):
    picture, table = tmp_path / "p.png", tmp_path / "t.csv"
    assert main(["estimate", train, *question, "--plot", str(picture), "--csv", str(table)]) == 0
    assert capsys.readouterr().out.strip()
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.reader(table.open()))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}


def test_what_cannot_be_asked_is_refused(refused, train):
    assert "h100" in refused(train, "--hardware", "abacus")
    assert "densenet121" in refused("nosuchnetwork")
    assert "one of them" in refused(train, "--reuse", "--workers", "1,2")
    assert "no such assumption" in refused(train, "--assume", "speed=fast")
    assert "KEY=VALUE" in refused(train, "--assume", "speed")
    assert "networks of the zoo" in refused(train, "--batch", "2")
    assert "networks of the zoo" in refused(train, "--sweep", "batch=1,2")
    assert "one level" in refused(train, "--level", "none,icf", "--reuse")
    assert "--sweep" in refused("vgg11", "--hardware", "2r2g", "--sweep", "cache=1MB,2MB")
    assert "2r2g" in refused("vgg11", "--hardware", "4r4g")
    assert "--remove" in refused(train, "--remove", "1")
    assert "ends in" in refused(train, "--plot", "picture.txt")
    assert "not a size" in refused(train, "--cache", "lots")
    assert "out of range" in refused(train, "--cache", "0")


@pytest.mark.parametrize(
    ("by_name", "arguments", "option"),
    [
        (False, ["--measure"], "--measure"),
        (False, ["--overlap", "0.5"], "--overlap"),
        (False, ["--overlap", "0.5", "--workers", "2"], "--overlap: for --reduce tree or server"),
        (False, ["--bucket", "1MB", "--workers", "2", "--reduce", "tree"], "--bucket: for --reduce ring or halving"),
        (False, ["--jitter", "0.1", "--sharded", "--reduce", "server", "--workers", "2"], "--jitter, --sharded: for"),
        (False, ["--latency", "5"], "--latency: about several workers"),
        (False, ["--network", "1GB/s", "--reuse"], "--network"),
        (False, ["--assume", "norm_sweeps=2"], "norm_sweeps"),
        (False, ["--reuse", "--assume", "look_ahead=false"], "look_ahead"),
        (False, ["--sweep", "cache=1MB,2MB", "--cache", "3MB"], "--cache"),
        (True, ["--sweep", "batch=1,2"], "--batch"),
        (True, ["--optimizer", "sgd"], "--optimizer"),
        (True, ["--views"], "--views"),
        (True, ["--level", "none", "--assume", "in_place=true"], "in_place"),
        (True, ["--checkpoint", "nowhere"], "--checkpoint"),
        (True, ["--hardware", "3r1g", "--order", "dfs", "--overlap", "1"], "--overlap, --order: not for a ReRAM"),
        (True, ["--level", ","], "no level is named"),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(refused, train, by_name, arguments, option):
    assert option in refused(*(NETWORK if by_name else [train]), *arguments)


def test_results_are_not_written_over_one_another_or_over_the_model(refused, train, tmp_path):
    before = Path(train).read_bytes()
    assert "named twice" in refused(train, "--csv", train)
    assert "named twice" in refused(*NETWORK, "--csv", str(tmp_path / "a.png"), "--plot", str(tmp_path / "a.png"))
    assert Path(train).read_bytes() == before
    assert not (tmp_path / "a.png").exists()


def test_what_cannot_be_written_is_refused_before_the_work(refused, tmp_path):
    nowhere = str(tmp_path / "no" / "such.csv")
    assert nowhere in refused("nosuchnetwork", "--csv", nowhere)
    assert "it is a folder" in refused("nosuchnetwork", "--csv", str(tmp_path))
    assert "no/such.png" in refused("densenet40", "--plot", str(tmp_path / "no" / "such.png"))


@pytest.mark.parametrize("setting", ["batch=4", "image=8", "seed=x", "name=x"])
def test_what_is_no_metaparameter_is_not_set_as_one(refused, setting):
    assert "internal error" not in refused("resnet20", "--set", setting)
    assert "internal error" not in refused("resnet20", "--level", "none", "--set", setting)


def test_numbers_and_names_may_be_pythons_own(train):
    one = bnfuse.estimate(train, levels="icf", flops=np.float64(1e12), cache=np.int64(MIB))
    assert one.hardware.flops == 1e12 and one.hardware.cache == MIB
    two = bnfuse.estimate(train, workers="1,2", network=6e9, reduce="tree")
    assert two.points[1].communication_s == pytest.approx(2 * two.gradient_bytes / 6e9)
    with pytest.raises(BnfuseError, match="optimizer=adagrad is unknown"):
        bnfuse.estimate(train, optimizer="adagrad")


def test_what_is_empty_is_not_left_out(refused, train):
    """An unset variable of a shell script."""
    assert "AXIS=FROM:TO:STEP" in refused(train, "--sweep", "")
    assert "whole number" in refused(train, "--workers", "")
    assert "no hardware" in refused(train, "--hardware", "")


def test_assumptions_have_a_range(refused, train):
    assert "at most 100" in refused(train, "--assume", f"mac_operations={10**400}")
    assert "at most 100" in refused("resnet20", "--assume", "norm_sweeps=1000")
    assert "from 0 to 1e18" in refused("resnet20", "--hardware", "2r2g", "--assume", "clock=inf")


def test_bf16_halves_the_maps_and_has_the_rate_of_its_products(ask, train):
    wide, narrow = (ask(train, "--hardware", "h100", "--cache", "8KB", "--precision", p) for p in ("fp32", "bf16"))
    assert (wide["precision"], narrow["precision"]) == ("fp32", "bf16")
    assert narrow["hardware"]["flops"] == 989.4e12 > wide["hardware"]["flops"] == PROFILES["h100"].flops
    assert narrow["flops"] == wide["flops"] and narrow["compute_s"] < wide["compute_s"] / 10
    whole, half = (sum(layer["in_bytes"] + layer["out_bytes"] for layer in found["layers"]) for found in (wide, narrow))
    assert half < whole
    text = str(bnfuse.estimate(train, hardware="h100", precision="bf16"))
    assert "on h100, bf16" in text


@pytest.mark.parametrize("source", [NETWORK, None])
def test_a_map_has_two_bytes_an_element_and_all_else_four(source, train):
    if source is None:
        (workload,) = workloads(train)
    else:
        (workload,) = workloads("densenet40", zoo={"growth": 4, "depth": 2, "batch": 4, "image": 8})
    narrow = in_precision(workload, "bf16")
    kinds = {"halved": set(), "whole": set()}
    for before, after in zip(workload.tensors, narrow.tensors, strict=True):
        assert after.bytes in (before.bytes, before.bytes // 2)
        kinds["halved" if after.bytes < before.bytes else "whole"].add(before.kind)
    assert kinds["halved"] == {"map", "map_gradient"}
    assert kinds["whole"] >= {"data", "weight", "vector", "weight_gradient"}
    for before, after in zip(workload.layers, narrow.layers, strict=True):
        for wide, half in zip(before.accesses, after.accesses, strict=True):
            assert half.bytes == wide.bytes // (2 if workload.tensors[wide.tensor].is_image else 1)
    assert in_precision(workload, "tf32").tensors == workload.tensors


def test_a_rate_that_is_given_is_that_of_the_precision(ask, train):
    found = ask(train, "--precision", "bf16", "--hardware", "h100", "--flops", "1TFLOP/s")
    assert found["hardware"]["flops"] == 1e12
    assert ask(train, "--precision", "bf16", "--hardware", "i9-10980xe")["hardware"]["flops"] == 2.765e12


def test_an_unknown_precision_is_refused(refused, train):
    assert "precision=int8 is unknown: it is fp32 or tf32 or bf16 or fp16" in refused(train, "--precision", "int8")
