"""What [Tsai21] leaves open about the machine, as named choices.

Choices about the passes of a network are `layerwise.Passes`. Its defaults and `PAPER` are the one set that comes
nearest to the paper's printed figures for all of its networks at once; each choice says what it does to them. They are,
paper and `PAPER` (RTX 2080 Ti of table 5.2, batch 32, MB of 2^20 bytes):

    ResNet-50      type-II layers (BN, ReLU, Add) at 24 MB 46.15 %, 45.7 %; time from 24 to 500 MB -48.1 %, -48.7 %;
                   speed-up of a 1.71 times higher rate at 24 MB 20 %, 22.0 %; traffic at 296 MB about -70 %, -74 %
    MobileNetV2    time from 24 to 500 MB -69.6 %, -71.1 %; traffic at 442 MB about -70 %, -74 %
    GNMT           traffic from 24 to 500 MB -96.6 %, -97.7 %; time -81.1 %, -79.1 % (without vocabulary)
    Transformer    traffic at 128 MB -67 %, -67.9 %; time from 24 to 500 MB -26.5 %, -28.2 %; speed-up 40 %, 40.7 %;
                   type-II layers 26.69 %, 22.5 % (without vocabulary, maps of one width, a ReLU behind queries, keys
                   and values and no layer behind the heads)
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from bnfuse.core.errors import BnfuseError

MOST = 100  # operations of a multiply-add, or sweeps: more is mistyped


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """How the software-managed cache, the memory bus and the arithmetic behave."""

    mac_operations: int = 2
    """Operations that a multiply-add of a dense layer takes of the peak rate.

    Peak rates of data sheets count 2, so with less a time may come out that the hardware cannot reach. The paper does
    not say; its figures come out with 1 and with nothing else. With 2: ResNet-50's type-II share is 31 %, its time
    falls by 32 %, the speed-up is 38 %; MobileNetV2's time falls by 67 %, GNMT's by 64 %.
    """

    prefetch: Literal["latency", "next", "none"] = "latency"
    """When a load is issued: so many layers ahead that their computing covers it (the paper's way), one layer ahead, or
    only when it is needed.

    At 24 MB there is no room to prefetch into, so only the fall of time to 500 MB changes: ResNet-50 43.0 % with next,
    42.1 % with none; MobileNetV2 68.6 %, 67.6 %.
    """

    look_ahead: bool = True
    """A tensor that will not stay until its next use leaves right after its last one (the paper's way), not when its
    space is needed.

    Without: time falls by 44.5 % (ResNet-50) and 69.8 % (MobileNetV2).
    """

    demand_first: bool = True
    """What a layer waits for overtakes what was issued before and nothing waits for yet; otherwise the bus works in the
    order of issue.

    In order of issue: time falls by 43.0 % (ResNet-50), 66.1 % (MobileNetV2), 80.1 % (GNMT).
    """

    streams_overlap: bool = True
    """What passes through the cache row by row does so while its layer computes, so that a layer takes the longer of
    the two; otherwise one comes after the other.

    One after the other: dense layers are no longer bound by computing at 24 MB, as the paper has them. ResNet-50's
    type-II share 40.1 %, its time falls by 55.8 %; MobileNetV2's by 72.4 %.
    """

    loads_overlap: bool = False
    """A layer computes on the part of its whole inputs that has come; otherwise (the paper's figure 4.3) it waits for
    all of them.

    With it: ResNet-50's type-II share 46.1 %, its time falls by 48.3 %, GNMT's by 78.1 %; little else changes.
    """

    leaving_holds_space: bool = True
    """The space of a tensor that is written out is free when the transfer is done, not when it is issued.

    Free at once: MobileNetV2's time falls by 75.4 %; the others change by a tenth.
    """

    def __post_init__(self) -> None:
        check_times("mac_operations", self.mac_operations)
        check_choice("prefetch", self.prefetch, ("latency", "next", "none"))


def check_times(name: str, value: int) -> None:
    """Raise BnfuseError unless a count is at least one, and not absurd."""
    if not 1 <= value <= MOST:
        raise BnfuseError(f"{name}={value} is out of range: it must be at least 1, and at most {MOST}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise BnfuseError unless a choice is one of those that there are."""
    if value not in choices:
        raise BnfuseError(f"{name}={value} is unknown: it is {' or '.join(choices)}")


PAPER = Assumptions(mac_operations=1)
"""[Tsai21]'s own: the set that comes nearest to its figures."""
