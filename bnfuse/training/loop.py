"""A training run: epochs of steps, and after each an evaluation and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnfuse.core.errors import DivergedError, everywhere
from bnfuse.core.files import write_atomically
from bnfuse.core.progress import Progress, bar_of, quiet
from bnfuse.data import Dataset
from bnfuse.data.processes import by_processes
from bnfuse.data.streamed import StreamedImages
from bnfuse.data.targets import fed_labels
from bnfuse.data.workers import default_workers
from bnfuse.parallel.ranks import WIRES
from bnfuse.training import checkpoints, nonfinite
from bnfuse.training.ahead import Ahead, prefetched
from bnfuse.training.checkpoints import Folder, Layout, Position, Saved
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
from bnfuse.training.scoring import Evaluation
from bnfuse.training.team import ALONE, Team
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
    DivergedError where the loss or the state is not finite.

    Of a step that was compiled for a world each rank trains on its part of every batch, and the first one writes."""
    from bnfuse.runtime import add_batch

    team = Team(step.world)
    workers = options.workers or default_workers(busy_threads(step.target), team.sharing)
    loader, labelling = team.together(lambda: looked_at(options, step, data, normalise, workers, team))
    progress = progress if team.leads else quiet
    if (left_over := require_updates(step.optimizer, loader.steps)) is not None:
        progress(left_over)
    if loader.rest and loader.rest not in step.batches:
        add_batch(step, loader.rest)
    with contextlib.ExitStack() as stack:
        place = options.folder if team.leads else None
        folder = team.together(lambda: None if place is None else stack.enter_context(Folder(place)))
        run = Run(step, loader, options, progress, folder, step.lr, labelling, team)
        try:
            history = run.run()
        finally:
            step.lr = run.lr
    if options.plot is not None and team.leads:
        draw(history, Path(options.plot), f"Training on {data.name}")
    return history


def looked_at(
    options: Options, step: Step, data: Dataset, normalise: bool, workers: int, team: Team
) -> tuple[Loader, Labelling | None]:
    """Look at all that can be wrong before the first step; give what makes the batches, and what becomes of labels."""
    options.check(places=team.leads)
    options.rates.check(step.lr)
    labelling = labelling_of(step, data, options.recipe)
    require_followed(data, options.changes)
    if len(data.test_y):
        step.require_evaluation()
    for place in (options.file, options.plot) if team.leads else ():
        if place is not None:
            checkpoints.remove_leftovers(Path(place).parent, Path(place).name)
    changes, ranks = options.changes, (team.rank, team.size)
    loader = Loader(data, batch_of(step), options.seed, changes, normalise, options.partial, workers, *ranks)
    options.rates.check(step.lr, loader.steps)
    require_updates(step.optimizer, loader.steps)
    return loader, labelling


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
        team: Team = ALONE,
    ) -> None:
        self.step, self.loader, self.options, self.progress = step, loader, options, progress
        self.labelling, self.team = labelling, team
        self.folder, self.lr, self.schedule = folder, lr, options.rates
        self.machine = checkpoints.machine_of(step)
        self.keeps = team.from_first(lambda: folder is not None or options.continued is not None)
        self.settings = self._settings() if self.keeps or team.size > 1 else {}
        self.layout = Layout(team.size, loader.batch, checkpoints.digest_of_network(step)) if self.keeps else None
        self.averaged = step.optimizer is not None and step.optimizer.ema is not None
        self.is_due = False  # a checkpoint: of several ranks, each of which adds up gradients, after the next update
        self.bar_drawn = 0.0
        self.pipeline: Pipeline | None = None

    def run(self) -> History:
        """Train from where the run stands to its end."""
        step, loader, options, team = self.step, self.loader, self.options, self.team
        step.seed = options.seed & 0x7FFFFFFF
        team.agree({**self.settings, **options.of_all_ranks}, "setting")
        at, has_state = team.from_first(self._begin)
        if has_state:
            step.share_state()
            if step.target.precision == "fp16":
                step.loss_scale = team.from_first(lambda: step.loss_scale)
        if self.folder is not None and options.recorded is not None:  # not before a run that may not go on is refused
            write_atomically(self.folder.path / RECIPE, f"{options.recorded}\n".encode(errors="backslashreplace"))
        step_count = at.epoch * loader.steps + at.step
        if step.program.signature.get("virtual"):
            step.virtual_statistics = fed_statistics(loader.data, loader.normalise)
        places = (options.metrics, options.tensorboard) if team.leads else (None, None)
        metrics, board = (None if place is None else Path(place) for place in places)
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
        rate, loader = batches.filled(FILLING) * self.loader.whole, self.loader
        streamed = isinstance(loader.data.train_x, StreamedImages)
        self.pipeline = Pipeline(rate, loader.workers, streamed, by_processes(loader.maker, loader.workers))
        self.progress(str(self.pipeline))

    def _history(self, at: Position) -> History:
        """All epochs, and the score of the part that was kept for the end."""
        data, stopped = self.loader.data, self._stopped(at)
        counts = len(data.train_y), len(data.held_out[1])
        found = History(at.history, *counts, stopped, pipeline=self.pipeline, ranks=self.team.size)
        if data.final is None:
            return found
        score = self._score(data.final, ema=self.averaged)
        self.progress(f"{percent(score.accuracy)} right on the test images, after the last epoch")
        accuracy, loss, top5 = score.accuracy, score.loss, score.top5
        return dataclasses.replace(found, tested=score.images, test_accuracy=accuracy, test_loss=loss, test_top5=top5)

    # -- beginning -----------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Position, bool]:
        """Where the run starts: at nothing, from a file's state, or where a checkpoint stands. Tells too whether the
        step has another state now than it was compiled with."""
        options = self.options
        source = options.continued
        if options.automatic and options.folder is not None and checkpoints.has_run(options.folder):
            source = options.folder
        if source is not None:
            last = source / checkpoints.LAST
            settings, steps = self.settings, self.loader.steps
            at, notes = checkpoints.restore(self.step, last, settings, self.machine, steps, self.layout)
            self.progress(f"{source}: continues after {at.epoch} epochs and {at.step} steps")
            for note in notes:
                self.progress(f"note: {note}")
            return at, True
        if options.started_from is not None:
            checkpoints.load_finite(self.step, options.started_from)
            self.step.discard()  # gradients of the run that the state is of
        return Position(), options.started_from is not None

    def _settings(self) -> dict[str, Any]:
        """Gather what must be the same for a run to go on."""
        step, loader, options = self.step, self.loader, self.options
        found = {
            "model": checkpoints.digest_of_model(step),
            "data": checkpoints.digest_of_data(loader.data),
            "normalise": loader.normalise,
            "batch": loader.whole,
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
        if (wire := step.ranks.wire) != WIRES[0]:
            found["wire"] = wire
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
        self._require_sound(at)
        trained = at.seconds
        score = None
        if epoch % self.options.eval_every == 0 or epoch == self.options.epochs:
            score = self._score()
        seconds = trained + time.perf_counter() - begun
        images = self.loader.images(at.step)
        loss, rate = at.loss_sum / (images / self.loader.whole), images / max(trained, 1e-9)
        done = Epoch(epoch, loss, None, self.step.lr, seconds, rate, waited=at.waited / max(trained, 1e-9))
        if score is not None:
            names = ("accuracy", "top5", "balanced_accuracy", "mean_iou")
            found = {name: getattr(score, name) for name in names}
            done = dataclasses.replace(done, held_out_loss=score.loss, **found)
            if self.averaged:
                score = self._score(ema=True)
                seconds = trained + time.perf_counter() - begun
                done = dataclasses.replace(done, ema_accuracy=score.accuracy, ema_loss=score.loss, seconds=seconds)
        return self._finish(Position(epoch, history=(*at.history, done)), tracker)

    def _score(self, part: tuple[Any, Any] | None = None, *, ema: bool = False) -> Evaluation:
        """Evaluate on a part of the data, by default the one held out."""
        loader = self.loader
        return evaluate_data(self.step, loader.data, part, normalise=loader.normalise, ema=ema, team=self.team)

    def _one(self, batch: Batch, at: Position) -> Position:
        """One step."""
        assert (batch.epoch, batch.index) == (at.epoch + 1, at.step)
        step, count = self.step, at.epoch * self.loader.steps + at.step
        step.lr = self.schedule.rate(self.lr, count, self.loader.steps, self.options.epochs)
        whole = step.target.is_one_graph  # one graph of all launches; on a CPU the loss is seen before the update
        fed = (batch.x, *fed_labels(batch.y, label_inputs(step)))
        loss = float(step(*fed) if whole else step.forward(*fed))
        at_step: dict[str, Any] = {"epoch": batch.epoch, "index": count + 1, "lr": step.lr}
        if not math.isfinite(loss):  # a mean over the ranks, so it is on all of them
            complain = functools.partial(nonfinite.complain, step, loss, *fed, **at_step)
            self.team.together(complain, last=nonfinite.ELSEWHERE)
        if not whole:
            step.backward()
            step.update()
        try:
            nonfinite.require_finite_gradients(step, **at_step)
        except DivergedError as error:  # their sums over the ranks are the same on all of them
            raise everywhere(error) from None
        self.loss = loss
        share = len(batch.y) / self.loader.batch  # of a whole batch
        return dataclasses.replace(at, step=at.step + 1, loss_sum=at.loss_sum + loss * share)

    def _require_sound(self, at: Position) -> None:
        """Before anything is kept of the state: it is finite, and the same on all ranks."""
        where = f"step {at.epoch * self.loader.steps + at.step} (epoch {at.epoch + 1})"
        self.team.together(lambda: nonfinite.require_finite_state(self.step, where=where, lr=self.step.lr))
        self.team.together(self.step.same_everywhere)

    def _after_step(self, at: Position, tracker: Tracker) -> None:
        """Write a line of metrics and a checkpoint, and draw the bar: each where it is due."""
        options, steps = self.options, self.loader.steps
        count, last = at.epoch * steps + at.step, at.step == steps
        rate = self.loader.images(at.step) / max(at.seconds, 1e-9)
        if options.log_every and count % options.log_every == 0:
            fields = {"loss": self.loss, "lr": self.step.lr, "images_per_second": rate}
            tracker.write(kind="step", epoch=at.epoch + 1, step=count, **fields)
        if self.keeps and options.checkpoint_every and count % options.checkpoint_every == 0:
            self.is_due = True
        if self.is_due and not last and not (self.team.size > 1 and self.step.pending):
            self.is_due = False
            self._require_sound(at)
            if self.folder is not None:
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
        self.is_due = False
        if self.folder is not None:
            if best_of(at.history) is done:
                self.folder.write(self.step, self._saved(at), best=True)
            self.folder.write(self.step, self._saved(at))
        if self.options.file is not None and self.team.leads:
            self.step.save(self.options.file)
        held_out = "" if done.accuracy is None else f", {percent(done.accuracy)} right on held-out images"
        held_out += "" if done.ema_accuracy is None else f" ({percent(done.ema_accuracy)} by the average)"
        speed = f"; {done.images_per_second:,.0f} images/s, {done.waited:.0%} of the time waiting for them"
        watched = speed if self.pipeline is not None else ""
        self.progress(f"epoch {done.epoch} of {self.options.epochs}: loss {done.loss:.4f}{held_out}{watched}")
        return at

    def _saved(self, at: Position) -> Saved:
        return Saved(at, self.settings, self.machine, self.step.loss_scale, self.layout)

    def _stopped(self, at: Position) -> str | None:
        """Why the run ends early, if it does."""
        patience = self.options.patience
        least = self.options.min_delta
        if patience is None or without_gain(at.history, least) < patience or at.epoch >= self.options.epochs:
            return None
        better = f"better by more than {percent(least)}" if least else "better"
        return f"after epoch {at.epoch}: {patience} evaluations in a row were no {better} than the best before them"
