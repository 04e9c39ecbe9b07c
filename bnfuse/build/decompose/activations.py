"""Activations by others whose gradient is known; each is the same function.

    Elu(x; a)             Relu(x) + a*Elu(-Relu(-x))                          (Elu of alpha 1 has a definition)
    Selu, Celu            by Elu
    HardSigmoid(x; a, b)  HardSigmoid((6a)*x + 6(b - 1/2))                     (that of 1/6, 1/2 has a definition)

At the kink of a piecewise function the slope is that of Relu at 0, which is 0.
"""

from __future__ import annotations

import numpy as np

from .writer import Writer


def elu(write: Writer) -> None:
    """Write Elu of any alpha by Elu of alpha 1, whose gradient there is."""
    alpha = float(write.given.get("alpha", 1.0))
    if alpha == 1.0:
        return
    _scaled_elu(write, write.node.input[0], alpha)


def _scaled_elu(write: Writer, x: str, alpha: float, *, gamma: float = 1.0) -> None:
    """gamma*(relu(x) + alpha*elu(-relu(-x)))."""
    depth = write.add("Neg", [write.add("Relu", [write.add("Neg", [x])])])
    below = write.add("Mul", [write.add("Elu", [depth]), write.number("alpha", alpha)])
    above = write.add("Relu", [x])
    if gamma == 1.0:
        write.add("Add", [above, below], last=True)
    else:
        write.add("Mul", [write.add("Add", [above, below]), write.number("gamma", gamma)], last=True)


def selu(write: Writer) -> None:
    """Write Selu by Elu of alpha 1."""
    given = write.given
    alpha = float(given.get("alpha", 1.6732632423543772))
    gamma = float(given.get("gamma", 1.0507009873554805))
    _scaled_elu(write, write.node.input[0], alpha, gamma=gamma)


def celu(write: Writer) -> None:
    """Write Celu as alpha*elu(x/alpha)."""
    alpha = write.number("alpha", float(write.given.get("alpha", 1.0)))
    x = write.add("Elu", [write.add("Div", [write.node.input[0], alpha])])
    write.add("Mul", [x, alpha], last=True)


def hard_sigmoid(write: Writer) -> None:
    """Write HardSigmoid of any slope by the one whose gradient there is."""
    given = write.given
    alpha, beta = float(given.get("alpha", 0.2)), float(given.get("beta", 0.5))
    if np.float32(alpha) == np.float32(1 / 6) and beta == 0.5:
        return
    x = write.add("Mul", [write.node.input[0], write.number("slope", 6 * alpha)])
    x = write.add("Add", [x, write.number("offset", 6 * (beta - 0.5))])
    write.add("HardSigmoid", [x], last=True, alpha=1 / 6, beta=0.5)
