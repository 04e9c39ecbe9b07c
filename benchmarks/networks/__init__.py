"""Networks that nobody here wrote for bnfuse: families of torchvision and timm, and forms that people write by hand.

`NETWORKS[name].make()` gives the torch module with random weights, `.inputs()` what it reads.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import handwritten, libraries

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Network:
    """A network: how it is made, the shapes of its inputs (batch first), and the loss that it is trained with."""

    group: str
    make: Callable[[], torch.nn.Module]
    shapes: tuple[Shape, ...]
    loss: str = "cross-entropy"

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Draw inputs, the same each time."""
        import torch

        generator = torch.Generator().manual_seed(1)
        return tuple(torch.randn(*shape, generator=generator) for shape in self.shapes)

    def labels(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Draw labels that fit the (first) output, the same each time."""
        import torch

        given = copy.deepcopy(module)(*inputs)
        scores = given[0] if isinstance(given, tuple) else given
        generator = torch.Generator().manual_seed(2)
        if self.loss == "cross-entropy":
            return torch.randint(0, scores.shape[1], (scores.shape[0], *scores.shape[2:]), generator=generator)
        return torch.randn(*scores.shape, generator=generator)


NETWORKS: dict[str, Network] = {
    name: Network(group, make, shapes, loss)
    for group, table in (
        ("torchvision", libraries.torchvision_networks()),
        ("segmentation", libraries.segmentation_networks()),
        ("timm", libraries.timm_networks()),
        ("handwritten", handwritten.networks()),
    )
    for name, (make, shapes, loss) in table.items()
}
