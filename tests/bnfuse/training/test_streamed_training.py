"""What a batch holds does not depend on who makes it, a run over files goes on bit by bit, and it is told who waits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from odd_pictures import save_plain, save_tars
from PIL import Image
from small_training import forward_model, small_graph

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError, DivergedError
from bnfuse.data import load_data
from bnfuse.data.processes import Processes, by_processes
from bnfuse.training import Augment, Loader, data_for, parse_augment, prefetched, train_step
from bnfuse.training.ahead import Ahead

EVERYTHING = "random-resized-crop:0.3,flip,pad-crop:1,jitter:0.4,0.4,0.4,0.1,rand-augment:2,9,random-erasing:0.5"
SIZE = {"image": 8, "channels": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    save_plain(root, {"train": 25, "val": 4})
    return root


def made(data, workers, augment=EVERYTHING, skip=0):
    loader = Loader(data, 16, seed=3, augment=parse_augment(augment), normalise=True, partial=True, workers=workers)
    return list(loader.batches(1, 2, skip))


def same(ones, others):
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        assert (a.epoch, a.index) == (b.epoch, b.index)
        assert np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)


def test_batches_do_not_depend_on_the_number_of_workers(folder):
    data = load_data(folder, stream=True, **SIZE)
    first = made(data, 1)
    assert [len(batch.y) for batch in first] == [16, 16, 16, 2] * 2
    same(first, made(data, 3))
    same(first[2:], made(data, 5, skip=2))  # processes
    assert not np.array_equal(first[0].x, first[4].x)
    assert first[0].x.dtype == np.float32 and first[0].x.flags.c_contiguous


def test_streamed_batches_are_those_of_memory(folder, tmp_path):
    options = {**SIZE, "mean": 0.4, "std": 0.3}
    held, streamed = load_data(folder, **options), load_data(folder, stream=True, **options)
    same(made(held, 1, "flip,pad-crop:1"), made(streamed, 2, "flip,pad-crop:1"))
    same(made(held, 2, "jitter:0.4,rand-augment"), made(streamed, 2, "jitter:0.4,rand-augment"))
    save_tars(folder, tmp_path / "tars")
    same(made(load_data(tmp_path / "tars", **options), 2), made(streamed, 2))


def test_parts_of_arrays_are_cut_out_too(data):
    wide = dataclasses.replace(data, train_x=np.arange(83 * 2 * 6 * 9, dtype=np.float32).reshape(83, 2, 6, 9))
    (batch, *_) = Loader(wide, 83, augment=Augment(scale=0.5), workers=2).batches(1, 1)
    assert batch.x.shape == (83, 2, 6, 9)
    order = Loader(wide, 83).order(1)
    low, high = (f(wide.train_x[order], (1, 2, 3)) for f in (np.min, np.max))
    assert (batch.x.min((1, 2, 3)) >= low).all() and (batch.x.max((1, 2, 3)) <= high).all()
    assert (batch.x.min((1, 2, 3)) > low).any()
    assert np.allclose(batch.x[:, 1] - batch.x[:, 0], 54, atol=1e-2)  # both channels alike


def test_colours_of_numbers_are_refused(data, folder):
    for wrong in (data.normalised(), dataclasses.replace(data, scale=1.0)):
        with pytest.raises(BnfuseError, match="nothing says that its numbers go from black to white"):
            Loader(wrong, 16, augment=parse_augment("jitter:0.4"))
    Loader(load_data(folder, stream=True, **SIZE).normalised(), 16, augment=parse_augment("jitter:0.4"))


def test_an_error_of_a_worker_arrives_and_no_thread_goes_on(folder, monkeypatch):
    data = load_data(folder, stream=True, **SIZE)
    loader = Loader(data, 16, workers=3)

    def broken(self, index, change=None):
        raise BnfuseError("no more") if index == 7 else BnfuseError("others")

    monkeypatch.setattr(type(data.train_x), "row", broken)
    with pytest.raises(BnfuseError), prefetched(loader.batches(1, 1)) as batches:
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name == "bnfuse-loader"]


def workers_of_ours() -> list[str]:
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    return [child for child in children if b"bnfuse.data.worker" in (Path("/proc") / child / "cmdline").read_bytes()]


def test_processes_name_what_they_cannot_read_and_end(folder, tmp_path, monkeypatch):
    save_plain(tmp_path / "data", {"train": 8, "val": 1})
    monkeypatch.chdir(tmp_path)
    data = load_data("data", stream=True, **SIZE)
    (tmp_path / "data" / "train" / "c1" / "003.png").unlink()
    loader = Loader(data, 8, workers=4)
    assert by_processes(loader.maker, 4) and not by_processes(loader.maker, 3)
    with pytest.raises(BnfuseError, match=r"data/train/c1/003\.png: is no image that can be read: No such file"):
        list(loader.batches(1, 1))
    processes = Processes(loader.maker, 1, 8)
    (process,) = processes._all
    assert np.array_equal(processes.made(np.array([0, 2]), 1), loader.maker.made(np.array([0, 2]), 1))
    os.kill(process._child.pid, signal.SIGKILL)
    with pytest.raises(BnfuseError, match="a process that decodes images has ended"):
        processes.made(np.array([0]), 1)
    processes.close()
    assert process._child.poll() is not None and not workers_of_ours()


def test_waiting_is_measured_where_it_is():
    def slow():
        for number in range(4):
            time.sleep(0.05)
            yield number

    with prefetched(slow()) as ahead:
        assert list(ahead) == [0, 1, 2, 3]
        assert 0.15 < ahead.waited < 1.0
    with prefetched(slow()) as ahead:
        assert 5 < ahead.filled(0.12) < 25  # 20 a second on an idle machine
    with prefetched(slow()) as ahead:
        assert 0 < ahead.filled(0.0) < 25
    ahead = Ahead(iter(range(100)))
    assert ahead.filled(5.0) > 3
    for _ in range(10):
        time.sleep(0.005)
        next(ahead)
    assert ahead.waited < 0.05
    ahead.close()
    with prefetched(iter(range(2))) as short:
        assert short.filled(5.0) > 0 and list(short) == [0, 1] and list(short) == []


def test_a_run_over_files_goes_on_bit_by_bit(new_step, folder, tmp_path):
    data = load_data(folder, stream=True, **SIZE)
    options = {"epochs": 3, "augment": EVERYTHING, "normalise": True, "last_batch": "drop", "seed": 5}
    whole, broken, again = new_step(), new_step(), new_step()
    expected = train_step(whole, data, workers=1, **options)

    def interrupt(text: str) -> None:
        if text.startswith("epoch 2 of 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_step(broken, data, workers=2, save_to=tmp_path, checkpoint_every=2, progress=interrupt, **options)
    found = train_step(again, data, workers=3, resume=tmp_path, **options)
    for name, value in whole.state_dict().items():
        assert np.array_equal(value, again.state_dict()[name]), name
    assert [e.loss for e in found.epochs] == [e.loss for e in expected.epochs]
    assert [e.accuracy for e in found.epochs] == [e.accuracy for e in expected.epochs]
    fewer = load_data(folder, stream=True, crop_share=0.9, **SIZE)
    with pytest.raises(BnfuseError, match="is a run with another data"):
        train_step(new_step(), fewer, resume=tmp_path, **options)


def test_train_streams_and_tells_who_waits(folder, tmp_path, capsys):
    graph, model = tmp_path / "train.onnx", tmp_path / "model.onnx"
    onnx.save(build_training_graph(forward_model()), graph)
    augment = "random-resized-crop,flip,jitter:0.2"
    command = ["train", str(graph), "--data", str(folder), "--augment", augment, "--mean", "0.5", "--std", "0.25"]
    options = ["--epochs", "1", "--threads", "1", "--workers", "2", "--json", "--export", str(model)]
    code = main([*command, *options])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    with Image.open(next(folder.glob("val/*/*.png"))) as opened:
        assert opened.size == (10, 12)  # not square, so that the middle is another image than the squashed whole
    about = {entry.key: json.loads(entry.value) for entry in onnx.load(model).metadata_props}
    assert (about["bnfuse.input_crop_share"], about["bnfuse.input_mean"]) == (0.875, [0.5])
    found, scored = json.loads(printed.out), bnfuse.evaluate(model, folder)
    assert (scored.accuracy, scored.loss) == pytest.approx(
        (found["accuracy"], found["epochs"][0]["held_out_loss"]), abs=1e-5
    )
    assert scored.loss != pytest.approx(bnfuse.evaluate(model, folder, crop_share=1.0).loss, abs=1e-3)
    assert found["pipeline"]["workers"] == 2 and found["pipeline"]["streamed"] is True
    assert found["pipeline"]["images_per_second"] > 0
    assert 0 <= found["epochs"][0]["waited"] <= 1
    assert "streamed, 50 to train on, 8 held out (val/)" in printed.err
    assert "images are decoded by 2 threads: " in printed.err
    assert "% of the time waiting for them" in printed.err


def test_what_cannot_be_followed_is_refused_before_the_work(folder, data, monkeypatch):
    monkeypatch.setattr("bnfuse.runtime.compile_step", lambda *_, **__: pytest.fail("compiled"))
    model = build_training_graph(forward_model())
    for options, said in (
        ({"stream": True}, "is a Dataset, which is fed as it is: leave out stream"),
        ({"mean": 0.5, "std": 0.5}, "leave out mean, std"),
        ({"augment": "jitter:0.4"}, "nothing says that its numbers go from black to white"),
        ({"augment": "rotate"}, "augmentation 'rotate' is unknown"),
        ({"workers": 0}, "workers"),
    ):
        with pytest.raises(BnfuseError, match=said):
            bnfuse.train(model, dataclasses.replace(data, scale=None), **options)
    for options, said in (({"crop_share": 2}, "a crop share of 2 is none"), ({"mean": 0.5}, "give --mean and --std")):
        with pytest.raises(BnfuseError, match=said):
            bnfuse.train(model, folder, **options)


def test_evaluate_reads_as_it_is_told(new_step, folder):
    step = new_step()
    try:
        one = bnfuse.evaluate(step, folder, stream=True, crop_share=0.5, mean=0.5, std=0.25, workers=2)
        other = bnfuse.evaluate(step, data_for(step, folder, crop_share=0.5, mean=0.5, std=0.25))
    except DivergedError:
        pytest.fail("diverged")
    assert one == other and one.images == 8


def test_names_that_are_no_utf_8_are_trained_on_and_written_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    bnfuse.save(small_graph(None), "fused.onnx")
    for label in range(10):
        folder = tmp_path / "photos" / os.fsdecode(b"caf\xe9%d" % label)
        folder.mkdir(parents=True)
        for number in range(6):
            with (folder / os.fsdecode(b"%d\xe9.png" % number)).open("wb") as stream:
                Image.new("L", (8, 8), 20 * label + number).save(stream, "PNG")
    run = ["--epochs", "1", "--threads", "1", "--save", "run", "--export", "model.onnx", "--metrics", "run.jsonl"]
    assert main(["train", "fused.onnx", "--data", "photos", "--stream", *run]) == 0, capsys.readouterr().err
    assert main(["evaluate", "model.onnx", "--data", "photos", "--confusion", "c.csv", "--json"]) == 0
    assert r"caf\\udce91" in capsys.readouterr().out
    assert Path("c.csv").read_text().splitlines()[0].startswith(r"class,caf\udce90,caf\udce91,")
