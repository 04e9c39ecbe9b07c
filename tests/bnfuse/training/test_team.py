"""What ranks do together, and each one's part of batches, labels and evaluations, beside one process."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
import types

import numpy as np
import onnx_ir as ir
import pytest
from odd_pictures import save_plain
from rank_results import on_ranks
from small_training import small_data

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.commands.worlds import Here
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.data import load_data
from bnfuse.data.augment import parse_augment
from bnfuse.data.items import Files
from bnfuse.parallel.peers import Peers, own
from bnfuse.training.checkpoints import digest_of_network
from bnfuse.training.labelling import Recipe
from bnfuse.training.loading import Loader
from bnfuse.training.scoring import evaluate_batches, merged
from bnfuse.training.team import Team


def parts(data, size: int, batch: int, **options) -> list[list]:
    """The batches of each rank, over two epochs, from the second batch on."""
    return [
        list(Loader(data, batch // size, 3, rank=rank, size=size, **options).batches(1, 2, skip=1))
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("partial", [False, True])
def test_the_parts_of_all_ranks_are_the_batch_of_one_process(size, partial):
    data = small_data(train=52)  # batches of 16: three, and 4 images
    options = {"augment": parse_augment("flip,pad-crop:2,random-erasing"), "partial": partial}
    (whole,) = parts(data, 1, 16, **options)
    own_parts = parts(data, size, 16, **options)
    assert [len(rank) for rank in own_parts] == [len(whole)] * size == [2 + 3 + 2 * partial] * size
    for batch, *of_ranks in zip(whole, *own_parts, strict=True):
        assert {(b.epoch, b.index) for b in of_ranks} == {(batch.epoch, batch.index)}
        assert np.concatenate([b.x for b in of_ranks]).tobytes() == batch.x.tobytes()
        np.testing.assert_array_equal(np.concatenate([b.y for b in of_ranks]), batch.y)
        for b in of_ranks:
            np.testing.assert_array_equal(b.all_y, batch.y)
    loader = Loader(data, 16 // size, rank=1, size=size, partial=partial)
    assert (loader.whole, loader.images(3), loader.images(4)) == (16, 48, 52)
    assert f"16 ({size} ranks of {16 // size})" in loader.about


def test_a_rank_opens_the_files_of_its_part_alone(tmp_path, monkeypatch):
    save_plain(tmp_path / "photos", {"train": 6, "test": 2})
    data = load_data(str(tmp_path / "photos"), image=8, channels=3, stream=True, mean="imagenet", std="imagenet")
    opened: list[int] = []
    before = Files.open
    monkeypatch.setattr(Files, "open", lambda items, index: (opened.append(index), before(items, index))[1])
    seen = []
    for rank in range(2):
        opened.clear()
        loader = Loader(data, 2, rank=rank, size=2, augment=parse_augment("random-resized-crop"))
        list(loader.batches(1, 1))
        assert len(opened) == 2 * loader.steps
        seen.append(set(opened))
    assert not seen[0] & seen[1]


def test_a_last_batch_that_cannot_be_dealt_alike_is_refused():
    with pytest.raises(
        BnfuseError, match=r"the last 3 images of an epoch cannot be dealt to 2 ranks alike: leave them"
    ):
        Loader(small_data(train=35), 8, rank=0, size=2, partial=True)
    with pytest.raises(BnfuseError, match=r"10 images do not fill a batch of 16 \(2 ranks of 8\).*--batch 5 or less"):
        Loader(small_data(train=10), 8, rank=0, size=2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighed_labels_of_parts_mean_what_those_of_the_batch_do(smoothing):
    rng = np.random.default_rng(0)
    labels, log_p = rng.integers(0, 4, 12), np.log(rng.dirichlet(np.ones(4), 12))
    labels[:6] = 0  # the first part has no image of a class that counts
    labelling = Recipe(smoothing, [0, 1, 2, 3.5]).labelling(4, labels)
    whole = -(labelling.rows(labels) * log_p).sum(1).mean()
    halves = [-(labelling.rows(labels[at], None, labels) * log_p[at]).sum(1).mean() for at in (slice(6), slice(6, 12))]
    np.testing.assert_allclose(np.mean(halves), whole, rtol=1e-6)


@pytest.mark.parametrize("classes", [4, 9])
def test_evaluations_of_shares_are_that_of_all_images(classes):
    rng = np.random.default_rng(1)
    logits, labels = rng.standard_normal((21, classes)).astype(np.float32), rng.integers(0, classes, 21)

    def evaluated(rows: slice):
        at = range(21)[rows]
        made = ((np.array(at[k : k + 4]), labels[at[k : k + 4]]) for k in range(0, len(at), 4))
        return evaluate_batches(lambda x: logits[x], made, names=tuple("abcd"))

    whole = evaluated(slice(None))
    for size in (2, 3, 8):  # of 8 ranks some have nothing
        shares = []
        for rank in range(size):
            team = Team()
            team.rank, team.size = rank, size
            shares.append(team.share(21, 4))
        assert sorted(i for share in shares for i in range(21)[share]) == list(range(21))
        found = merged([evaluated(share) for share in shares])
        assert dataclasses.replace(found, loss=whole.loss) == whole and found.loss == pytest.approx(
            whole.loss, rel=1e-12
        )
        np.testing.assert_array_equal(found.confusion, whole.confusion)
        assert found.names == whole.names


def test_what_one_rank_complains_of_is_raised_on_all():
    def look(world):
        def work():
            if world.rank == 1:
                raise DivergedError("the loss is nan")
            return world.rank

        return Team(world).together(work)

    for error in on_ranks(3, look):
        assert isinstance(error, DivergedError) and str(error) == "rank 1: the loss is nan" and error.everywhere


def test_what_all_ranks_complain_of_is_told_without_a_rank_and_what_says_more_first():
    def look(world):
        def work():
            raise BnfuseError("no such file")

        return Team(world).together(work)

    assert [str(error) for error in on_ranks(2, look)] == ["no such file"] * 2

    def vague(world):
        def work():
            raise BnfuseError("nan: nothing is known" if world.rank == 0 else "nan: it was conv1")

        return Team(world).together(work, last="nothing is known")

    assert [str(error) for error in on_ranks(2, vague)] == ["rank 1: nan: it was conv1"] * 2


def test_ranks_with_other_settings_are_named():
    errors = on_ranks(3, lambda world: Team(world).agree({"batch": 16, "seed": 4 + (world.rank == 2)}, "setting"))
    for error in errors:
        assert str(error) == "rank 2 has the setting seed 5, rank 0 4: start all ranks with the same command"
    assert on_ranks(2, lambda world: Team(world).agree({"batch": 16}, "setting")) == [None, None]


def test_all_get_what_the_first_rank_gives():
    assert on_ranks(2, lambda world: Team(world).from_first(lambda: ("at", world.rank))) == [("at", 0)] * 2


def test_ranks_that_share_processors_are_counted_and_one_that_is_stopped_is_named():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        peers = on_ranks(2, Peers.of)
        assert [found.sharing for found in peers] == [2, 2] and peers[0].lost() == []
        me = own()
        other = dataclasses.replace(me, pid=process.pid, started="")
        found = Peers(
            (me, other, dataclasses.replace(other, machine="elsewhere"), dataclasses.replace(me, cpus=frozenset())), 0
        )
        assert found.lost() == [] and found.here == [0, 1, 3] and found.sharing == 2
        process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + 10
        while not found.lost() and time.monotonic() < end:
            time.sleep(0.01)
        assert found.lost() == [f"rank 1 (process {process.pid}) is stopped"]
    finally:
        process.kill()
        process.wait()
    assert found.lost() == [f"rank 1 (process {process.pid}) has ended"]


def test_graphs_of_one_network_have_one_digest_at_any_batch():
    def digest(batch: int, **more) -> str:
        zoo = {"batch": batch, "image": 8, "channels": 1, "classes": 10, "growth": 4, "depth": 1, **more}
        fused = bnfuse.rewrite(build_model("densenet40", zoo=zoo, loss="cross-entropy").model, level="icf").model
        return digest_of_network(types.SimpleNamespace(model=ir.to_proto(fused).SerializeToString()))

    found = digest(4)
    assert digest(16) == found
    assert found != digest(4, seed=1)


@pytest.mark.parametrize(("name", "values"), [("command", ("train", "run")), ("deterministic", (False, True))])
def test_ranks_that_were_started_for_something_else_are_told_apart_at_once(name, values):
    for error in on_ranks(2, lambda world: Here().meet(world, **{name: values[world.rank]})):
        assert str(error).startswith(f"rank 1 has the setting {name} {values[1]}, rank 0 {values[0]}: start all ranks")
        assert error.everywhere
