"""What a training graph draws: places of samples once an epoch, virtual samples each step ([Chen18]), and each step
the values of its own operators that draw at random (drawing.py).

    drawn = sampling_of(model)                               # what the passes left in the metadata, or NOTHING
    feeds = drawn.offsets(seed=0, epoch=3)                   # {input: int64 array}
    feeds |= {name: virtual_samples(shape, mean, std, seed=0, step=17) for name in drawn.virtual}

Everything follows from (seed, epoch) or (seed, step), so a run that is resumed draws what it would have drawn.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError

METADATA_KEY = "bnfuse.sampling"
MAX_POINTS = 1 << 26
MAX_INDEX = 1 << 31  # kernels count the elements of a map in int32


@dataclasses.dataclass(frozen=True)
class Box:
    """Where a box may begin: (sample, row, column) from `low` to `high`, both included. Its input is int64 [3]."""

    low: tuple[int, int, int]
    high: tuple[int, int, int]

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw where the box begins: int64 [3], sample, row, column."""
        return rng.integers(self.low, self.high, endpoint=True, dtype=np.int64)

    def admits(self, value: np.ndarray) -> bool:
        """Tell whether the box may begin there."""
        return value.shape == (3,) and bool(np.all(value >= self.low) and np.all(value <= self.high))

    @property
    def is_sound(self) -> bool:
        """Whether there is a map that it lies in."""
        return all(0 <= low <= high < MAX_INDEX for low, high in zip(self.low, self.high, strict=True))


@dataclasses.dataclass(frozen=True)
class Points:
    """`count` different flat indices into N, H, W in [first, stop), in order. Its input is int64 [count]."""

    count: int
    first: int
    stop: int

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the places: int64 [count], ascending."""
        chosen = rng.choice(self.stop - self.first, self.count, replace=False, shuffle=False)
        return np.sort(chosen.astype(np.int64)) + self.first

    def admits(self, value: np.ndarray) -> bool:
        """Tell whether places are within the bounds, each once, ascending."""
        inside = value.shape == (self.count,) and bool(np.all(value >= self.first) and np.all(value < self.stop))
        return inside and bool(np.all(value[1:] > value[:-1]))  # a difference of unsigned numbers is never below 0

    @property
    def is_sound(self) -> bool:
        """Whether there is a map that they lie in."""
        return 0 <= self.first < self.stop <= MAX_INDEX and 0 < self.count <= min(self.stop - self.first, MAX_POINTS)


@dataclasses.dataclass(frozen=True)
class Random:
    """Independent values of one distribution, drawn each step: `uniform` in [a, b), `normal` of mean a and deviation b,
    `bernoulli`: 1 with probability a, else 0."""

    kind: str
    a: float
    b: float = 0.0

    def draw(self, shape: Sequence[int], dtype: str, *, seed: int, step: int, name: str) -> np.ndarray:
        """Draw values that follow from the four of seed, step, name and shape. A uniform value is never b, whatever the
        dtype."""
        rng = np.random.default_rng([seed, step, zlib.crc32(name.encode()), 0x0DD5])
        precise = np.float64 if dtype == "float64" else np.float32
        if self.kind == "normal":
            return (rng.standard_normal(tuple(shape), precise) * precise(self.b) + precise(self.a)).astype(dtype)
        unit = rng.random(tuple(shape), precise)
        if self.kind == "bernoulli":
            return (unit < self.a).astype(dtype)
        bits = BITS.get(dtype)
        if bits is not None:
            unit = np.floor(unit * 2**bits) / 2**bits  # a number near 1 would be rounded to it
        if (self.a, self.b) == (0.0, 1.0):
            return unit.astype(dtype, copy=False)
        values = (self.a + (self.b - self.a) * unit.astype(np.float64)).astype(dtype)
        end = np.asarray(self.b, dtype)
        return (
            np.where(values < end, values, np.nextafter(end, np.asarray(self.a, dtype))) if self.a < self.b else values
        )

    def quantiles(self, at: np.ndarray) -> np.ndarray:
        """Give, as float64, what so large a share of all values is below, for shares between 0 and 1."""
        if self.kind == "bernoulli":
            return (at < self.a).astype(np.float64)
        if self.kind == "normal":
            inverse = statistics.NormalDist().inv_cdf
            return self.a + self.b * np.array([inverse(share) for share in at.tolist()])
        return self.a + (self.b - self.a) * at

    @property
    def is_sound(self) -> bool:
        """Whether there is such a distribution."""
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            return False
        fits = {"uniform": self.a <= self.b, "normal": self.b >= 0, "bernoulli": 0 <= self.a <= 1}
        return fits.get(self.kind, False)


BITS = {"float16": 11, "bfloat16": 8}  # of numbers below 1 that a uniform draw makes, where float32 has too many


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The inputs of a graph that are drawn: places by input, inputs of virtual samples, random values by input."""

    places: Mapping[str, Box | Points] = dataclasses.field(default_factory=dict)
    virtual: tuple[str, ...] = ()
    random: Mapping[str, Random] = dataclasses.field(default_factory=dict)

    def offsets(self, *, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Draw every place, independently of one another: int64 arrays by input."""
        return {
            name: place.draw(np.random.default_rng([seed, epoch, index, 0x0FF5E7]))
            for index, (name, place) in enumerate(self.places.items())
        }

    def check(self, name: str, value: np.ndarray) -> None:
        """Check places that were set from outside, for a kernel must not be led outside of its map."""
        if not self.places[name].admits(value):
            raise BnfuseError(f"input '{name}' is {value.tolist()[:8]}: it must lie within {self.places[name]}")

    def to_json(self) -> str:
        """Write it as it stands in a model's metadata."""
        boxes = {n: [*p.low, *p.high] for n, p in self.places.items() if isinstance(p, Box)}
        points = {n: [p.count, p.first, p.stop] for n, p in self.places.items() if isinstance(p, Points)}
        fields = {"order": list(self.places), "boxes": boxes, "points": points, "virtual": list(self.virtual)}
        random = {name: [r.kind, r.a, r.b] for name, r in self.random.items()}
        return json.dumps({**fields, "random": random} if random else fields)

    @classmethod
    def from_json(cls, text: str) -> Sampling:
        """Read what `to_json` wrote. Raises ValueError where the text is something else."""
        try:
            fields = json.loads(text)
            found: dict[str, Box | Points] = {}
            for name in fields["order"]:
                place: Box | Points
                if name in fields["boxes"]:
                    bounds = _integers(fields["boxes"][name], 6)
                    place = Box(bounds[:3], bounds[3:])  # type: ignore[arg-type]
                else:
                    place = Points(*_integers(fields["points"][name], 3))
                if not place.is_sound:
                    raise ValueError(f"the place of {name} is in no map")
                found[name] = place
            random = {str(name): _random(values) for name, values in fields.get("random", {}).items()}
            return cls(found, tuple(str(name) for name in fields["virtual"]), random)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not what a sampled graph draws: {error}") from None


NOTHING = Sampling()


def sampling_of(model: ir.Model) -> Sampling:
    """Read what the sampling passes left in the model's metadata."""
    text = model.metadata_props.get(METADATA_KEY)
    if text is None:
        return NOTHING
    try:
        return Sampling.from_json(text)
    except ValueError as error:
        raise BnfuseError(f"the model's {METADATA_KEY} metadata is damaged ({error}): rewrite it anew") from None


def virtual_samples(
    shape: Sequence[int], mean: Sequence[float], std: Sequence[float], *, seed: int, step: int
) -> np.ndarray:
    """Draw float32 [n, C, H, W] from N(mean, std) per channel: VDN's virtual samples ([Chen18], section 4.2). Several
    ranks have the same ones, so the statistics of these are of all ranks without an exchange."""
    drawn = np.random.default_rng([seed, step, 0x0D47A]).standard_normal(tuple(shape), dtype=np.float32)
    mu, sigma = (np.broadcast_to(np.asarray(v, np.float32), (shape[1],)).reshape(1, -1, 1, 1) for v in (mean, std))
    return np.ascontiguousarray(drawn * sigma + mu)


def _integers(values: Sequence[object], count: int) -> tuple[int, ...]:
    if len(values) != count or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ValueError(f"a place is no list of {count} integers")
    return tuple(values)  # type: ignore[arg-type]


def _random(values: Any) -> Random:
    kind, a, b = values
    if not isinstance(kind, str) or any(isinstance(x, bool) or not isinstance(x, int | float) for x in (a, b)):
        raise ValueError("a distribution is no name with two numbers")
    found = Random(kind, float(a), float(b))
    if not found.is_sound:
        raise ValueError(f"there is no distribution {found}")
    return found
