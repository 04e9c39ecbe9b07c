"""What F(4x4, 3x3) costs in accuracy: float32 errors of Winograd's convolutions against float64, and the direct one's.

    python benchmarks/experiments/winograd_error.py [--images 2] [--size 28]

Simulated in numpy: transforms and products in float32, the sums over channels by float32 matrix products for all alike.
The data is a layer's at the start of training: inputs are relu(normal) (forward) or normal (the gradient of the input,
which is a convolution of dy), weights are He's. The transforms are Toom and Cook's for the points given and infinity
(Lavin and Gray, arXiv 1509.09308, section 4). The finding: docs/decisions.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from fractions import Fraction

import numpy as np

WINDOW = 3
POINTS = {
    "F(2x2)  0 1 -1": "0 1 -1",
    "F(4x4)  0 1 -1 2 -2": "0 1 -1 2 -2",
    "F(4x4)  0 1 -1 1/2 -2": "0 1 -1 1/2 -2",
    "F(4x4)  0 1 -1 1/2 -1/2": "0 1 -1 1/2 -1/2",
}


@dataclasses.dataclass(frozen=True)
class Transforms:
    """y = a (g w g' * b x b') a' for a patch x of `patch` squared and `out` squared outputs."""

    a: np.ndarray  # [out, patch]
    g: np.ndarray  # [patch, window]
    b: np.ndarray  # [patch, patch]

    @property
    def patch(self) -> int:
        return len(self.b)

    @property
    def out(self) -> int:
        return len(self.a)


def toom_cook(points: list[Fraction]) -> Transforms:
    """Evaluate both polynomials at the points and at infinity, interpolate, transposed."""
    patch = len(points) + 1
    out = patch - WINDOW + 1
    others = [[q for q in points if q != p] for p in points]
    scale = [np.prod([p - q for q in rest]) for p, rest in zip(points, others, strict=True)]
    a = [[p**i for p in points] + [Fraction(i == out - 1)] for i in range(out)]
    g = [[p**j / s for j in range(WINDOW)] for p, s in zip(points, scale, strict=True)]
    g.append([Fraction(j == WINDOW - 1) for j in range(WINDOW)])
    b = [[*product(rest), Fraction(0)] for rest in others] + [product(points)]
    return Transforms(*(np.array(matrix, np.float64) for matrix in (a, g, b)))


def product(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of the polynomial with these roots, that of x^0 first."""
    found = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *found], [*(-root * c for c in found), Fraction(0)]
        found = [x + y for x, y in zip(shifted, scaled, strict=True)]
    return found


def patches(x: np.ndarray, size: int, step: int) -> np.ndarray:
    """Windows of `size` squared of x [n, h, w, c], every `step` pixels: [tiles, c, size, size]."""
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))[:, ::step, ::step]
    return windows.reshape(-1, *windows.shape[3:])


def direct(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[n, oh, ow, cout] of x [n, h, w, c] and w [cout, c, 3, 3]: one matrix product."""
    n, rows, columns = x.shape[0], x.shape[1] - WINDOW + 1, x.shape[2] - WINDOW + 1
    flat = patches(x, WINDOW, 1).reshape(n * rows * columns, -1)
    return (flat @ w.reshape(len(w), -1).T).reshape(n, rows, columns, len(w))


def winograd(x: np.ndarray, w: np.ndarray, t: Transforms) -> np.ndarray:
    """The same by the transforms, everything in the type of x."""
    a, g, b = (matrix.astype(x.dtype) for matrix in (t.a, t.g, t.b))
    tiles = b @ patches(x, t.patch, t.out) @ b.T  # [tiles, c, patch, patch]
    weights = g @ w @ g.T
    products = tiles.transpose(2, 3, 0, 1) @ weights.transpose(2, 3, 1, 0)  # [patch, patch, tiles, cout]
    y = a @ products.transpose(2, 3, 0, 1) @ a.T  # [tiles, cout, out, out]
    n, rows, columns = x.shape[0], (x.shape[1] - WINDOW + 1) // t.out, (x.shape[2] - WINDOW + 1) // t.out
    y = y.reshape(n, rows, columns, len(w), t.out, t.out).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(n, rows * t.out, columns * t.out, len(w))


def errors(y: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """The norm's, and that of the worst element against the root mean square."""
    difference = y - exact
    scale = np.sqrt(np.mean(exact**2))
    return float(np.sqrt(np.mean(difference**2)) / scale), float(np.abs(difference).max() / scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--size", type=int, default=28, help="rows of the output, a multiple of 4")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    for cin, cout in ((128, 32), (512, 64)):
        for data in ("relu(normal)", "normal"):
            side = arguments.size + WINDOW - 1
            x = rng.standard_normal((arguments.images, side, side, cin), np.float32)
            x = np.maximum(x, 0) if data == "relu(normal)" else x
            w = rng.standard_normal((cout, cin, WINDOW, WINDOW), np.float32) * np.float32((2 / (9 * cin)) ** 0.5)
            wide = x.astype(np.float64), w.astype(np.float64)
            exact = direct(*wide)
            found = {"direct": errors(direct(x, w), exact)}
            for name, points in POINTS.items():
                t = toom_cook([Fraction(point) for point in points.split()])
                assert np.allclose(winograd(*wide, t), exact, rtol=0, atol=1e-12)
                found[name] = errors(winograd(x, w, t), exact)
            print(f"{cin} channels, {data}: error (worst element), and as multiples of the direct one's")
            for name, (norm, worst) in found.items():
                times = norm / found["direct"][0], worst / found["direct"][1]
                print(f"    {name:24} {norm:.1e} ({worst:.1e})   {times[0]:4.1f} ({times[1]:4.1f})")


if __name__ == "__main__":
    main()
