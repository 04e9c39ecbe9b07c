"""A training run: epochs of steps, and after each an evaluation and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.core.files import write_atomically
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.data import Dataset
from bnfuse.data.processes import by_processes
from bnfuse.data.streamed import StreamedImages
from bnfuse.data.targets import fed_labels
from bnfuse.data.workers import default_workers
from bnfuse.training import checkpoints, nonfinite
from bnfuse.training.ahead import Ahead, prefetched
from bnfuse.training.checkpoints import Folder, Position, Saved
from bnfuse.training.feeding import (
    batch_of,
    evaluate_data,
    fed_statistics,
    label_inputs,
    labelling_of,
    require_followed,
)
from bnfuse.training.history import Epoch, History, Pipeline, best_of, percent, without_gain
from bnfuse.training.labelling import Labelling
from bnfuse.training.loading import Batch, Loader
from bnfuse.training.options import Options
from bnfuse.training.plotting import draw
from bnfuse.training.schedules import Schedule
from bnfuse.training.tracking import Tracker
from bnfuse.training.updates import require_updates

if TYPE_CHECKING:
    from bnfuse.runtime import Step

REFRESH = 0.1  # seconds between two pictures of the bar
RECIPE = "recipe.toml"  # in the folder of checkpoints
FILLING = 2.0  # seconds in which the first batches are made, at most


def train_step(
    step: Step, data: Dataset, *, progress: Progress = quiet, normalise: bool = False, **options: Any
) -> History:
    """Train in place, from the step's own learning rate on. `options` are the fields of `Options`: epochs, seed, ...

    `normalise` brings images to the data's mean and std as they are loaded; by default they are fed as they are.
    """
    return train_by(Options(**options), step, data, progress=progress, normalise=normalise)


def train_by(
    options: Options, step: Step, data: Dataset, *, progress: Progress = quiet, normalise: bool = False
) -> History:
    """Do what `train_step` does, with the options in one. Compiles the step for a smaller last batch where they ask for
    one and it is not. Raises BnfuseError before the first step for what cannot be,
    DivergedError where the loss or the state is not finite."""
    from bnfuse.runtime import add_batch

    options.check()
    options.rates.check(step.lr)
    labelling = labelling_of(step, data, options.recipe)
    require_followed(data, options.changes)
    if len(data.test_y):
        step.require_evaluation()
    for place in (options.file, options.plot):
        if place is not None:
            checkpoints.remove_leftovers(Path(place).parent, Path(place).name)
    workers = options.workers or default_workers(busy_threads(step.target))
    loader = Loader(data, batch_of(step), options.seed, options.changes, normalise, options.partial, workers)
    options.rates.check(step.lr, loader.steps)
    if (left_over := require_updates(step.optimizer, loader.steps)) is not None:
        progress(left_over)
    if loader.rest and loader.rest not in step.batches:
        add_batch(step, loader.rest)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(Folder(options.folder)) if options.folder is not None else None
        run = Run(step, loader, options, progress, folder, step.lr, labelling)
        try:
            history = run.run()
        finally:
            step.lr = run.lr
    if options.plot is not None:
        draw(history, Path(options.plot), f"Training on {data.name}")
    return history


def busy_threads(target: Any) -> int:
    """Tell how many processors a step keeps busy: on a GPU the one that launches."""
    return 1 if target.is_one_graph else int(target.threads)


class Run:
    """One call of `train_by`."""

    def __init__(
        self,
        step: Step,
        loader: Loader,
        options: Options,
        progress: Progress,
        folder: Folder | None,
        lr: float,
        labelling: Labelling | None = None,
    ) -> None:
        self.step, self.loader, self.options, self.progress = step, loader, options, progress
        self.labelling = labelling
        self.folder, self.lr, self.schedule = folder, lr, options.rates
        self.machine = checkpoints.machine_of(step)
        self.settings = self._settings() if folder is not None or options.continued is not None else {}
        self.averaged = step.optimizer is not None and step.optimizer.ema is not None
        self.bar_drawn = 0.0
        self.pipeline: Pipeline | None = None

    def run(self) -> History:
        """Train from where the run stands to its end."""
        step, loader, options = self.step, self.loader, self.options
        step.seed = options.seed & 0x7FFFFFFF
        at = self._begin()
        if self.folder is not None and options.recorded is not None:  # not before a run that may not go on is refused
            write_atomically(self.folder.path / RECIPE, f"{options.recorded}\n".encode(errors="backslashreplace"))
        step_count = at.epoch * loader.steps + at.step
        if step.program.signature.get("virtual"):
            step.virtual_statistics = fed_statistics(loader.data, loader.normalise)
        metrics, board = (None if place is None else Path(place) for place in (options.metrics, options.tensorboard))
        made = loader.batches(at.epoch + 1, options.epochs, skip=at.step)
        ahead = prefetched(made if self.labelling is None else self.labelling.fed(made, options.seed))
        with Tracker(metrics, board, keep=step_count) as tracker, ahead as batches:
            self._watch(batches)
            while at.epoch < options.epochs and self._stopped(at) is None:
                at = self._epoch(at, batches, tracker)
        return self._history(at)

    def _watch(self, batches: Ahead[Batch]) -> None:
        """Let the first batches be made with nobody in their way, and tell how fast they came."""
        if not self.loader.by_workers:
            return
        rate, loader = batches.filled(FILLING) * self.loader.batch, self.loader
        streamed = isinstance(loader.data.train_x, StreamedImages)
        self.pipeline = Pipeline(rate, loader.workers, streamed, by_processes(loader.maker, loader.workers))
        self.progress(str(self.pipeline))

    def _history(self, at: Position) -> History:
        """All epochs, and the score of the part that was kept for the end."""
        data, stopped = self.loader.data, self._stopped(at)
        found = History(at.history, len(data.train_y), len(data.held_out[1]), stopped, pipeline=self.pipeline)
        if data.final is None:
            return found
        score = evaluate_data(self.step, data, data.final, normalise=self.loader.normalise, ema=self.averaged)
        self.progress(f"{percent(score.accuracy)} right on the test images, after the last epoch")
        accuracy, loss, top5 = score.accuracy, score.loss, score.top5
        return dataclasses.replace(found, tested=score.images, test_accuracy=accuracy, test_loss=loss, test_top5=top5)

    # -- beginning -----------------------------------------------------------------------------------------------

    def _begin(self) -> Position:
        """Where the run starts: at nothing, from a file's state, or where a checkpoint stands."""
        options = self.options
        source = options.continued
        if options.automatic and options.folder is not None and checkpoints.has_run(options.folder):
            source = options.folder
        if source is not None:
            last = source / checkpoints.LAST
            at, note = checkpoints.restore(self.step, last, self.settings, self.machine, self.loader.steps)
            self.progress(f"{source}: continues after {at.epoch} epochs and {at.step} steps")
            if note is not None:
                self.progress(f"note: {note}")
            return at
        if options.started_from is not None:
            checkpoints.load_finite(self.step, options.started_from)
            self.step.discard()  # gradients of the run that the state is of
        return Position()

    def _settings(self) -> dict[str, Any]:
        """Gather what must be the same for a run to go on."""
        step, loader, options = self.step, self.loader, self.options
        found = {
            "model": checkpoints.digest_of_model(step),
            "data": checkpoints.digest_of_data(loader.data),
            "normalise": loader.normalise,
            "batch": loader.batch,
            "seed": options.seed,
            "schedule": str(self.schedule),
            "warm_up": self.schedule.warm_up,
            "lr": self.lr,
            "optimizer": str(step.optimizer),
            "augment": str(loader.augment),
            "target": f"{step.target.kind} {step.target.precision}",
        }
        if loader.normalise:  # as float32, which is what divides; further digits may be another CPU's
            found |= {name: [f"{value:.9g}" for value in getattr(loader.data, name)] for name in ("mean", "std")}
        if loader.partial:
            found["last_batch"] = options.last_batch
        if self.labelling is not None:
            found["labels"] = str(self.labelling)
        plain = Schedule()
        for name in ("min_lr", "warm_up_lr", "by"):
            if (value := getattr(self.schedule, name)) != getattr(plain, name):
                found["schedule_by" if name == "by" else name] = value
        return {**found, "epochs": options.epochs} if self.schedule.needs_end else found

    # -- an epoch ------------------------------------------------------------------------------------------------

    def _epoch(self, at: Position, batches: Ahead[Batch], tracker: Tracker) -> Position:
        """Run the rest of the epoch that follows `at`, its evaluation and its checkpoints."""
        epoch, begun = at.epoch + 1, time.perf_counter()
        self.step.epoch = epoch  # places of sampled statistics are drawn anew
        while at.step < self.loader.steps:
            waited = at.waited - batches.waited
            now = self._one(next(batches), at)
            seconds = at.seconds + time.perf_counter() - begun
            at = dataclasses.replace(now, seconds=seconds, waited=waited + batches.waited)
            begun = time.perf_counter()
            self._after_step(at, tracker)
        self.step.flush()  # an update of several batches does not reach over the end of an epoch
        self._require_finite(at)
        trained = at.seconds
        score = None
        if epoch % self.options.eval_every == 0 or epoch == self.options.epochs:
            score = evaluate_data(self.step, self.loader.data, normalise=self.loader.normalise)
        seconds = trained + time.perf_counter() - begun
        images = self.loader.images(at.step)
        loss, rate = at.loss_sum / (images / self.loader.batch), images / max(trained, 1e-9)
        done = Epoch(epoch, loss, None, self.step.lr, seconds, rate, waited=at.waited / max(trained, 1e-9))
        if score is not None:
            names = ("accuracy", "top5", "balanced_accuracy", "mean_iou")
            found = {name: getattr(score, name) for name in names}
            done = dataclasses.replace(done, held_out_loss=score.loss, **found)
            if self.averaged:
                score = evaluate_data(self.step, self.loader.data, normalise=self.loader.normalise, ema=True)
                seconds = trained + time.perf_counter() - begun
                done = dataclasses.replace(done, ema_accuracy=score.accuracy, ema_loss=score.loss, seconds=seconds)
        return self._finish(Position(epoch, history=(*at.history, done)), tracker)

    def _one(self, batch: Batch, at: Position) -> Position:
        """One step."""
        assert (batch.epoch, batch.index) == (at.epoch + 1, at.step)
        step, count = self.step, at.epoch * self.loader.steps + at.step
        step.lr = self.schedule.rate(self.lr, count, self.loader.steps, self.options.epochs)
        whole = step.target.is_one_graph  # one graph of all launches; on a CPU the loss is seen before the update
        fed = (batch.x, *fed_labels(batch.y, label_inputs(step)))
        loss = float(step(*fed) if whole else step.forward(*fed))
        if not math.isfinite(loss):
            raise nonfinite.error_of(step, loss, *fed, epoch=batch.epoch, index=count + 1, lr=step.lr)
        if not whole:
            step.backward()
            step.update()
        nonfinite.require_finite_gradients(step, epoch=batch.epoch, index=count + 1, lr=step.lr)
        self.loss = loss
        share = len(batch.y) / self.loader.batch  # of a whole batch
        return dataclasses.replace(at, step=at.step + 1, loss_sum=at.loss_sum + loss * share)

    def _require_finite(self, at: Position) -> None:
        """Before anything is kept of the state."""
        where = f"step {at.epoch * self.loader.steps + at.step} (epoch {at.epoch + 1})"
        nonfinite.require_finite_state(self.step, where=where, lr=self.step.lr)

    def _after_step(self, at: Position, tracker: Tracker) -> None:
        """Write a line of metrics and a checkpoint, and draw the bar: each where it is due."""
        options, steps = self.options, self.loader.steps
        count, last = at.epoch * steps + at.step, at.step == steps
        rate = self.loader.images(at.step) / max(at.seconds, 1e-9)
        if options.log_every and count % options.log_every == 0:
            fields = {"loss": self.loss, "lr": self.step.lr, "images_per_second": rate}
            tracker.write(kind="step", epoch=at.epoch + 1, step=count, **fields)
        if self.folder is not None and options.checkpoint_every and count % options.checkpoint_every == 0 and not last:
            self._require_finite(at)
            self.folder.write(self.step, self._saved(at))
        bar = bar_of(self.progress)
        if bar is not None and not last and time.monotonic() - self.bar_drawn > REFRESH:
            self.bar_drawn = time.monotonic()
            where = f"epoch {at.epoch + 1} of {options.epochs}"
            bar(at.step, steps, f"{where}  loss {self.loss:.4f}  lr {self.step.lr:.3g}  {rate:,.0f} images/s")

    def _finish(self, at: Position, tracker: Tracker) -> Position:
        """Keep what an epoch leaves: a line of metrics, then the checkpoints that know of it, and a word."""
        done = at.history[-1]
        fields = dataclasses.asdict(done)
        tracker.write(kind="epoch", epoch=fields.pop("epoch"), step=at.epoch * self.loader.steps, **fields)
        if self.folder is not None:
            if best_of(at.history) is done:
                self.folder.write(self.step, self._saved(at), best=True)
            self.folder.write(self.step, self._saved(at))
        if self.options.file is not None:
            self.step.save(self.options.file)
        held_out = "" if done.accuracy is None else f", {percent(done.accuracy)} right on held-out images"
        held_out += "" if done.ema_accuracy is None else f" ({percent(done.ema_accuracy)} by the average)"
        speed = f"; {done.images_per_second:,.0f} images/s, {done.waited:.0%} of the time waiting for them"
        watched = speed if self.pipeline is not None else ""
        self.progress(f"epoch {done.epoch} of {self.options.epochs}: loss {done.loss:.4f}{held_out}{watched}")
        return at

    def _saved(self, at: Position) -> Saved:
        return Saved(at, self.settings, self.machine, self.step.loss_scale)

    def _stopped(self, at: Position) -> str | None:
        """Why the run ends early, if it does."""
        patience = self.options.patience
        least = self.options.min_delta
        if patience is None or without_gain(at.history, least) < patience or at.epoch >= self.options.epochs:
            return None
        better = f"better by more than {percent(least)}" if least else "better"
        return f"after epoch {at.epoch}: {patience} evaluations in a row were no {better} than the best before them"
