"""What each BatchNorm takes its statistics from, in words: `fs:1/32`, or `fs:1/64+vdn:2@0.5,stem*=bn` ([Chen18]).

    ns:4          the first 4 samples of the batch
    bs:4          4 consecutive samples, from another place each epoch
    fs:1/32       a rectangle of every map, 1/32 of its area, at another place each epoch
    frs:1/32      1/32 of all points of the maps, other ones each epoch
    vdn:1         1 virtual sample that is drawn each step and goes through all layers with the batch
    bn            the whole batch
    l1bn, rbn     the whole batch, but the variance from the mean absolute deviation, or from the range

ns and bs take ratios of the batch as well (bs:1/8). A+vdn:N@W mixes a sample of the batch with the virtual samples, of
which the weight is W (0.5 where it is not said). GLOB=SPEC holds for the BatchNorms whose names the glob matches; of
several that match the last one counts.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable
from fractions import Fraction

from bnfuse.core.errors import BnfuseError

SAMPLERS = ("ns", "bs", "fs", "frs")
WHOLE = ("bn", "l1bn", "rbn")
FORMS = "ns:4, bs:4, fs:1/32, frs:1/32, vdn:1, bn, l1bn, rbn, or a mixture such as fs:1/64+vdn:2@0.5"
MOST_VIRTUAL = 1 << 16
NUMBER = re.compile(r"\d{1,9}", re.ASCII)  # of so many digits, as those of ratios: 1e-999999999 would take for ever
RATIO = re.compile(r"\d{1,9}/\d{1,9}|\d{0,9}\.\d{1,9}|\d{1,9}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class LayerSample:
    """The statistics of one layer: of a part of the batch (`kind`), of `virtual` samples, or of both.

    `kind` is None where only virtual samples count. `amount` is a number of samples (int) or a ratio. `weight` is that
    of the virtual samples where both count.
    """

    text: str
    kind: str | None = "bn"
    amount: int | Fraction | None = None
    virtual: int = 0
    weight: float = 0.5


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """A spec: what holds for all layers, and what for those of a glob."""

    default: LayerSample
    by_glob: tuple[tuple[str, LayerSample], ...] = ()

    def of(self, name: str) -> LayerSample:
        """Give what holds for the BatchNorm of this name."""
        matching = [spec for glob, spec in self.by_glob if fnmatch.fnmatchcase(name, glob)]
        return matching[-1] if matching else self.default

    @property
    def virtual(self) -> int:
        """Count the virtual samples that go before the batch."""
        return max(spec.virtual for spec in (self.default, *(spec for _, spec in self.by_glob)))

    def check_names(self, names: Iterable[str]) -> None:
        """Raise BnfuseError for a glob that matches nothing: a slip of the pen."""
        names = list(names)
        for glob, _ in self.by_glob:
            if not any(fnmatch.fnmatchcase(name, glob) for name in names):
                some = f"they are {', '.join(names[:4])}, ..." if names else "there is none"
                raise BnfuseError(f"sample spec: no BatchNorm's name matches '{glob}': {some}")


def parse_plan(text: str) -> SamplePlan:
    """Read the plan of a spec. Raises BnfuseError with what is wrong and what is right."""
    default: LayerSample | None = None
    by_glob: list[tuple[str, LayerSample]] = []
    for item in (part.strip() for part in text.split(",")):
        glob, equals, spec = item.rpartition("=")
        if equals:
            if not glob.strip():
                raise BnfuseError(f"sample spec '{item}': before = goes a glob of BatchNorm names")
            by_glob.append((glob.strip(), parse_layer(spec.strip())))
        elif default is not None:
            raise BnfuseError(f"sample spec '{text}': '{default.text}' and '{item}' both hold for all layers: keep one")
        else:
            default = parse_layer(spec.strip())
    plan = SamplePlan(default or LayerSample("bn"), tuple(by_glob))
    check_virtual(plan, text)
    return plan


def check_virtual(plan: SamplePlan, text: str) -> None:
    """Raise BnfuseError where layers want different numbers of virtual samples, or some beside l1bn or rbn."""
    specs = (plan.default, *(spec for _, spec in plan.by_glob))
    counts = sorted({spec.virtual for spec in specs if spec.virtual})
    if len(counts) > 1:
        raise BnfuseError(
            f"sample spec '{text}': the same virtual samples go through all layers: write vdn:{counts[-1]} everywhere"
        )
    if counts and any(spec.kind in ("l1bn", "rbn") for spec in specs):
        raise BnfuseError(f"sample spec '{text}': l1bn and rbn take the whole batch: leave vdn out, or them")


def parse_layer(text: str) -> LayerSample:
    """Read the spec of one layer, such as fs:1/64+vdn:2@0.5. Raises BnfuseError with what is wrong."""
    parts = text.split("+")
    virtual = [part for part in parts if part.startswith("vdn")]
    real = [part for part in parts if not part.startswith("vdn")]
    if len(virtual) > 1 or len(real) > 1:
        raise BnfuseError(f"sample spec '{text}': a mixture is of one sample of the batch and vdn:N")
    kind, amount = _real(real[0], text) if real else (None, None)
    if not virtual:
        return LayerSample(text, kind, amount)
    count, at, weight = virtual[0].partition("@")
    if at and not real:
        raise BnfuseError(f"sample spec '{text}': a weight is that of vdn in a mixture: write bn+{text}, or {count}")
    if kind in ("l1bn", "rbn"):
        raise BnfuseError(f"sample spec '{text}': {kind} takes the whole batch: mix vdn with bn, ns, bs, fs or frs")
    return LayerSample(text, kind, amount, _virtual(count, text), _weight(weight, text) if at else 0.5)


def _real(part: str, text: str) -> tuple[str, int | Fraction | None]:
    kind, colon, amount = part.partition(":")
    if kind in WHOLE and not colon:
        return kind, None
    if kind not in SAMPLERS or not colon:
        raise BnfuseError(f"sample spec '{text}': '{part}' is none: a spec is {FORMS}")
    if kind in ("ns", "bs") and NUMBER.fullmatch(amount):
        return kind, _at_least_one(int(amount), part, text)
    return kind, _ratio(amount, part, text)


def _at_least_one(count: int, part: str, text: str) -> int:
    if count < 1:
        raise BnfuseError(f"sample spec '{text}': '{part}' takes no sample: take 1 or more")
    return count


def _ratio(amount: str, part: str, text: str) -> Fraction:
    try:
        ratio = Fraction(amount) if RATIO.fullmatch(amount) else Fraction(0)
    except ZeroDivisionError:
        ratio = Fraction(0)
    if not 0 < ratio <= 1:
        raise BnfuseError(f"sample spec '{text}': '{part}' needs a ratio above 0 and at most 1, such as 1/32 or 0.03")
    return ratio


def _virtual(part: str, text: str) -> int:
    kind, _, count = part.partition(":")
    if kind != "vdn" or not NUMBER.fullmatch(count) or not 0 < int(count) <= MOST_VIRTUAL:
        raise BnfuseError(f"sample spec '{text}': '{part}' is not vdn:N with N virtual samples, such as vdn:1")
    return int(count)


def _weight(weight: str, text: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise BnfuseError(f"sample spec '{text}': the weight of vdn is a number between 0 and 1, such as @0.5")
    return value
