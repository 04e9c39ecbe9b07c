"""What papers/004 leaves open, as named choices.

Choices about the machine are here; those about the passes of a network are `layerwise.Passes`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """How the software-managed cache and its memory bus behave."""

    mac_operations: int = 2
    """Operations that a multiply-add counts for: 2 as data sheets count, 1 as some papers do."""
