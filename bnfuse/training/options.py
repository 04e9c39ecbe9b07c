"""What can be asked of a training run, checked before any work."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from bnfuse.core.errors import BnfuseError
from bnfuse.core.files import require_writable
from bnfuse.core.ranges import check_real, check_whole
from bnfuse.data.augment import Augment, parse_augment
from bnfuse.training.checkpoints import has_run, is_folder, make_folder
from bnfuse.training.labelling import Recipe, Weights
from bnfuse.training.mixing import Mixing
from bnfuse.training.plotting import require_plotting
from bnfuse.training.schedules import Schedule, parse_schedule
from bnfuse.training.tracking import require_tensorboard

Place = str | os.PathLike[str]
AUTO = "auto"
LAST_BATCHES = ("drop", "train")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a training is to do. `check` says what of it is impossible, before anybody waits for a compilation.

    epochs, seed        passes over the training data; the seed of everything that is drawn
    schedule, warm_up   cosine, constant, step:30,60,80@0.1, poly:2, exp:0.97, one-cycle:0.3 or restarts:10x2, behind so
                        many epochs of linear climb, which begins at `warm_up_lr`. `min_lr`: what it falls to.
                        `schedule_by`: "step", or "epoch" for one rate an epoch
    label_smoothing     this share of each label is spread over all classes
    class_weights       a number for each class, a file of them, or "balanced": N/(classes*images of the class)
    mixup, cutmix       mix the images of a batch, as timm does: the alpha of each kind. `mixup_prob`: how often;
                        `mixup_switch_prob`: how often by cutmix where both are asked for; none after `mixup_off_epoch`
    augment             none, or changes of images with commas between them, as flip,pad-crop:4 (data/augment.py)
    workers             threads that decode images and change them as pictures; by default as many as there are
                        processors that the step leaves
    last_batch          of images that do not fill the last batch of an epoch: "drop" leaves them to the next epoch's
                        order, "train" makes a smaller batch of them, for which the step is compiled too
    eval_every          epochs between evaluations; `patience`: the run ends after so many without a gain in accuracy of
                        more than `min_delta`
    save_to             a folder for last.safetensors and best.safetensors, every `checkpoint_every` steps and every
                        epoch; or a file NAME.safetensors for the state after each epoch
    resume              a folder, whose run goes on, bit by bit; "auto" or True, the run in `save_to` if there is one,
                        else a new one; a file, whose state a new run starts from
    metrics, log_every  a file of JSON lines, or FILE.csv: one an epoch, and one every so many steps
    tensorboard         a folder for the same numbers as TensorBoard reads them (tensorboardX must be installed)
    plot                a file for the curves
    recorded            a text that says what the run was asked for, which goes beside the checkpoints as recipe.toml
    """

    epochs: int
    seed: int = 0
    schedule: str | Schedule = "cosine"
    warm_up: float = 0.0
    augment: str | Augment | None = "none"
    last_batch: str = "drop"
    eval_every: int = 1
    checkpoint_every: int | None = None
    save_to: Place | None = None
    resume: Place | bool | None = None
    metrics: Place | None = None
    log_every: int | None = None
    plot: Place | None = None
    patience: int | None = None
    min_delta: float = 0.0
    min_lr: float = 0.0
    warm_up_lr: float | None = None
    schedule_by: str = "step"
    label_smoothing: float = 0.0
    class_weights: Weights | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_off_epoch: int | None = None
    tensorboard: Place | None = None
    recorded: str | None = None
    workers: int | None = None

    @property
    def rates(self) -> Schedule:
        """The learning rates. Raises BnfuseError where the text names none."""
        return parse_schedule(
            self.schedule, self.warm_up, min_lr=self.min_lr, warm_up_lr=self.warm_up_lr, by=self.schedule_by
        )

    @property
    def recipe(self) -> Recipe:
        """What becomes of labels, and of images with them."""
        mixing = Mixing(self.mixup, self.cutmix, self.mixup_prob, self.mixup_switch_prob, self.mixup_off_epoch)
        return Recipe(self.label_smoothing, self.class_weights, mixing)

    @property
    def changes(self) -> Augment:
        """The changes of training images. Raises BnfuseError where the text names none."""
        return parse_augment(self.augment)

    @property
    def partial(self) -> bool:
        """Whether a smaller batch at the end of an epoch is trained on."""
        return self.last_batch == "train"

    @property
    def folder(self) -> Path | None:
        """Where checkpoints go, if anywhere: `save_to`, or the folder whose run goes on."""
        if self.save_to is not None:
            return Path(self.save_to) if is_folder(self.save_to) else None
        return self.continued

    @property
    def file(self) -> Path | None:
        """The file that gets the state after each epoch."""
        return Path(self.save_to) if self.save_to is not None and not is_folder(self.save_to) else None

    @property
    def automatic(self) -> bool:
        """Whether the run goes on where the folder of `save_to` holds one."""
        return self.resume is True or self.resume == AUTO

    @property
    def continued(self) -> Path | None:
        """The folder whose run must go on."""
        if not self.resume or self.automatic:
            return None
        path = Path(os.fspath(self.resume))  # type: ignore[arg-type]
        return path if is_folder(path) else None

    @property
    def started_from(self) -> Path | None:
        """The file whose state a new run starts from."""
        if not self.resume or self.automatic or self.continued is not None:
            return None
        return Path(os.fspath(self.resume))  # type: ignore[arg-type]

    @property
    def of_all_ranks(self) -> dict[str, str]:
        """What must be the same where several ranks train together, as text: all but the places, which are the first
        one's, and the workers of each."""
        places = ("save_to", "resume", "metrics", "tensorboard", "plot", "recorded", "workers", "class_weights")
        return {f.name: str(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name not in places}

    def check(self, *, places: bool = True) -> None:
        """Raise BnfuseError for the first option that is impossible, alone or beside the others; makes the folder.
        Without `places` nothing is asked of files and folders, which are another rank's."""
        for name in ("epochs", "eval_every", "checkpoint_every", "log_every", "patience", "workers", "mixup_off_epoch"):
            value = getattr(self, name)
            if value is not None or name in ("epochs", "eval_every"):
                check_whole(name, value, 1)
        check_whole("seed", self.seed)
        if self.last_batch not in LAST_BATCHES:
            raise BnfuseError(f"last batch '{self.last_batch}' is unknown: it is {' or '.join(LAST_BATCHES)}")
        for name in ("warm_up", "min_lr", "min_delta"):
            check_real(name, getattr(self, name))
        if self.warm_up_lr is not None:
            check_real("warm_up_lr", self.warm_up_lr)
        if self.min_delta and self.patience is None:
            raise BnfuseError("--min-delta is the least gain that --patience waits for: give --patience too")
        schedule, _ = self.rates, self.changes
        self.recipe.check()
        if schedule.warm_up >= self.epochs and schedule.needs_end:
            raise BnfuseError(f"a warm-up of {schedule.warm_up:g} epochs leaves none of {self.epochs} to the schedule")
        if places:
            self._check_places()

    def _check_places(self) -> None:
        if self.automatic and self.folder is None:
            raise BnfuseError("resume auto continues the run in the folder of --save: name one")
        if self.checkpoint_every is not None and self.folder is None:
            raise BnfuseError("checkpoints within an epoch need a folder: --save DIR")
        if self.continued is not None and not has_run(self.continued):
            raise BnfuseError(f"{self.continued}: holds no run to continue (no last.safetensors)")
        if self.folder is not None and has_run(self.folder) and not self.automatic and self.folder != self.continued:
            raise BnfuseError(f"{self.folder}: holds a run already: continue it by --resume auto, or name another one")
        if self.folder is not None:
            make_folder(self.folder)
        if self.file is not None and self.file.suffix != ".safetensors":
            raise BnfuseError(f"{self.file}: is a file: name a folder for checkpoints, or a file NAME.safetensors")
        for place in (self.file, self.metrics, self.plot):
            if place is not None:
                require_writable(place)
        if self.log_every is not None and self.metrics is None and self.tensorboard is None:
            raise BnfuseError("--log-every writes into the file of --metrics or the folder of --tensorboard: name one")
        if self.tensorboard is not None:
            require_tensorboard(Path(self.tensorboard))
        if self.plot is not None:
            require_plotting(Path(self.plot))
