"""mixup and cutmix: images of a batch mixed with those of the same batch in reverse order, as timm mixes them.

    mixing = Mixing(mixup=0.2, cutmix=1.0)
    mix = mixing.drawn(images.shape, seed=0, epoch=3, index=17)      # one for the batch
    images = mix.images(images)                                      # float32 [B, C, H, W]
    labels = mix.labels(probabilities)                               # float64 [B, classes]

mixup (Zhang and others, 2018) adds the two images by shares lam and 1 - lam; cutmix (Yun and others, 2019) puts a
rectangle of the one, 1 - lam of the area, into the other. lam is drawn from Beta(alpha, alpha), and labels are mixed by
the same shares. What is drawn follows from (seed, epoch, place of the batch in the epoch).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from bnfuse.core.errors import BnfuseError
from bnfuse.core.ranges import check_real
from bnfuse.core.text import spelt

STREAM = 0x6D6978  # of the seed: what is drawn here is drawn nowhere else

Box = tuple[int, int, int, int]  # rows from, to, columns from, to


@dataclasses.dataclass(frozen=True)
class Mix:
    """What becomes of a batch: `share` of an image stays, the rest is its partner's, inside the box if there is one."""

    share: float = 1.0
    box: Box | None = None

    def images(self, x: np.ndarray) -> np.ndarray:
        """Mix images float32 [B, C, H, W]; gives others, or the same where there is nothing to mix."""
        if self.share == 1.0:
            return x
        if self.box is not None:
            top, bottom, left, right = self.box
            mixed = x.copy()
            mixed[:, :, top:bottom, left:right] = x[::-1, :, top:bottom, left:right]
            return mixed
        share = np.float32(self.share)
        return x * share + x[::-1] * (np.float32(1) - share)

    def labels(self, probabilities: np.ndarray) -> np.ndarray:
        """Mix probabilities [B, classes] by the same shares."""
        if self.share == 1.0:
            return probabilities
        return probabilities * self.share + probabilities[::-1] * (1 - self.share)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """How batches are mixed: alphas of the two kinds (0: not that one), and how often."""

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0  # of mixing a batch at all
    switch_prob: float = 0.5  # of cutmix, where both are asked for
    off_epoch: int | None = None  # from the epoch behind this one nothing is mixed

    @property
    def is_asked(self) -> bool:
        """Whether any batch is mixed."""
        return bool(self.mixup or self.cutmix)

    def __str__(self) -> str:
        if not self.is_asked:
            return "not mixed"
        until = "" if self.off_epoch is None else f" up to epoch {self.off_epoch}"
        shares = [spelt(value) for value in (self.mixup, self.cutmix, self.prob, self.switch_prob)]
        return "mixup {}, cutmix {} of {} switched {}".format(*shares) + until

    def check(self) -> None:
        """Raise BnfuseError for an option out of its range, or one that means nothing."""
        for name, value in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            check_real(name, value)
        for name, value in (("mixup_prob", self.prob), ("mixup_switch_prob", self.switch_prob)):
            check_real(name, value)
            if value > 1:
                raise BnfuseError(f"{name}={value} is out of range: it must be from 0 to 1")
        changed = (self.prob, self.switch_prob, self.off_epoch) != (1.0, 0.5, None)
        if changed and not self.is_asked:
            raise BnfuseError("--mixup-prob, --mixup-switch-prob and --mixup-off-epoch need --mixup or --cutmix")

    def drawn(self, shape: tuple[int, ...], *, seed: int, epoch: int, index: int) -> Mix:
        """Draw what becomes of batch `index` of an epoch, whose images have this shape [B, C, H, W]."""
        if not self.is_asked or (self.off_epoch is not None and epoch > self.off_epoch):
            return Mix()
        rng = np.random.default_rng([seed, epoch, index, STREAM])
        if rng.random() >= self.prob:
            return Mix()
        cut = bool(self.cutmix) and (not self.mixup or rng.random() < self.switch_prob)
        alpha = self.cutmix if cut else self.mixup
        share = float(rng.beta(alpha, alpha))
        if not cut:
            return Mix(share)
        box = drawn_box(shape[2], shape[3], share, rng)
        area = (box[1] - box[0]) * (box[3] - box[2])
        return Mix(1.0 - area / (shape[2] * shape[3]), box)


def drawn_box(height: int, width: int, share: float, rng: np.random.Generator) -> Box:
    """Draw a rectangle of 1 - share of the area around a point anywhere; what is beyond the image is cut off."""
    ratio = math.sqrt(1 - share)
    rows, columns = int(height * ratio), int(width * ratio)
    top, left = int(rng.integers(0, height)) - rows // 2, int(rng.integers(0, width)) - columns // 2
    return max(top, 0), min(top + rows, height), max(left, 0), min(left + columns, width)
