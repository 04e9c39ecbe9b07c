"""What the inputs and outputs of a training graph are for (docs/training-file.md).

Kept in the model's metadata under `bnfuse.roles` as JSON; inferred for files that others wrote.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Roles:
    """Names of graph inputs and outputs by purpose. Every graph input is in exactly one of the input roles."""

    data: tuple[str, ...]  # inputs fed each step
    labels: tuple[str, ...]
    trainable: tuple[str, ...]  # inputs with an initializer of the same name, updated by the optimiser
    frozen: tuple[str, ...]  # inputs with an initializer of the same name, never changed
    running: dict[str, str]  # running statistics: input -> output that replaces it after the step
    gradients: dict[str, str]  # trainable input -> output that is its gradient
    loss: str
    logits: str | None = None
    offsets: tuple[str, ...] = ()  # int64 inputs of the sampling passes
