"""`bnfuse demo`: the whole job on a small DenseNet and the embedded digits, telling what it does as it goes."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bnfuse import api
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.core.text import Section, count, scaled

NETWORK = {"batch": 32, "image": 8, "channels": 1, "classes": 10, "growth": 12, "depth": 4}
EPOCHS = 8
LEARNING_RATE = 0.1
WANTED = 0.95  # accuracy on held-out images

Say = Callable[[str], None]


def run_demo(
    *,
    folder: Path | None = None,
    seed: int = 0,
    threads: int | None = None,
    say: Say = print,
    show: Callable[[list[Section]], None] = lambda sections: None,
    progress: Progress = quiet,
) -> bool:
    """Run the demo. Gives whether every check said yes and the accuracy reached 95 %. The files stay in `folder`, if
    one is given."""
    start = time.perf_counter()
    with working_folder(folder) as place:
        train, fused, step_file = (place / name for name in ("train.onnx", "fused.onnx", "step.bnf"))

        say("1. Build the training graph of a small DenseNet: forward, loss, backward (bnfuse build).")
        built = build_model("densenet40", zoo={**NETWORK, "seed": seed}, loss="cross-entropy")
        api.save(built.model, train)
        say(f"   {count(len(built.model.graph.node), 'node')}, batches of {NETWORK['batch']} images of 8x8 pixels\n")

        say("2. Split every BatchNorm and fuse the halves into the operators around it (bnfuse rewrite).")
        rewritten = api.rewrite(train, level="icf")
        api.save(rewritten.model, fused)
        report = rewritten.report.to_json()
        unfused = {entry["node"] for entry in report["unfused"] if entry["norm"] == "BatchNorm"}
        say(f"   {count(report['batch_norms'], 'BatchNorm')}, {len(unfused)} left unfused\n")

        say("3. Verify in onnxruntime that both graphs compute the same (bnfuse verify).")
        verified = api.verify(train, fused, seed=seed, threads=threads)
        show(verified.sections())

        say("4. Compare them: feature maps are what a training step spends its time moving (bnfuse diff).")
        show(api.diff(train, fused).sections()[:1])

        say("5. Compile: a kernel for every operator, forward, backward and update (bnfuse compile).")
        begun = time.perf_counter()
        optimizer = api.optimizer("sgd", LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=1e-4)
        step = api.compile(fused, optimizer=optimizer, threads=threads, progress=bar_of(progress))
        step.export(step_file)
        memory = scaled(step.report.arena_bytes, "B")
        say(f"   {step.report.kernels} kernels in {time.perf_counter() - begun:.1f} s, {memory} of working memory\n")

        say("6. Train on handwritten digits and count right answers on images held out (bnfuse train).")
        from bnfuse.training import data_for, train_step

        history = train_step(step, data_for(step, "digits"), epochs=EPOCHS, seed=seed, progress=progress)
        show(history.sections())
        step.save(place / "state.safetensors")

        good = verified.equal and history.accuracy >= WANTED
        seconds = time.perf_counter() - start
        say(f"{'Done' if good else 'FAILED'}: {100 * history.accuracy:.2f} % right, {seconds:.0f} s in all.")
        if folder is not None:
            say(f"The files are in {place}: try `bnfuse diff {train} {fused}`.")
        return good


@contextlib.contextmanager
def working_folder(folder: Path | None) -> Iterator[Path]:
    """Make the given folder, if need be, or one that goes away afterwards."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BnfuseError(f"{folder}: cannot be made: {error.strerror}. Name another folder.") from None
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bnfuse-demo-") as name:
        yield Path(name)
