"""Networks that nobody here wrote for bnfuse: families of torchvision and timm, and forms that people write by hand.

`NETWORKS[name].make()` gives the torch module with random weights, `.inputs()` what it reads. A loss is written as for
`build`, but that it counts the outputs, whose names are the exporter's: `cross-entropy@0 + 0.5*cross-entropy@1`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bnfuse.build import Term
from bnfuse.build.losses import parse_loss

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

    def inputs(self, seed: int = 1) -> tuple[torch.Tensor, ...]:
        """Draw inputs, the same each time for a seed."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(*shape, generator=generator) for shape in self.shapes)

    def terms(self, outputs: Sequence[str]) -> tuple[Term, ...]:
        """Give the terms of the loss, each over an output by its name; of the first, where the loss says none."""
        terms = parse_loss(self.loss)
        return tuple(dataclasses.replace(term, output=outputs[int(term.output or 0)]) for term in terms)

    def labels(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Draw labels that fit the output of each term, the same each time."""
        import torch

        generator = torch.Generator().manual_seed(2)

        def drawn(term: Term, scores: torch.Tensor) -> torch.Tensor:
            if term.kind == "cross-entropy":
                return torch.randint(0, scores.shape[1], (scores.shape[0], *scores.shape[2:]), generator=generator)
            return torch.randn(*scores.shape, generator=generator)

        outputs = outputs_of(copy.deepcopy(module)(*inputs))
        return tuple(drawn(term, outputs[int(term.output or 0)]) for term in parse_loss(self.loss))

    def loss_of_torch(self, given: object, labels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the loss of what the module gives."""
        import torch

        functions = {"cross-entropy": torch.nn.functional.cross_entropy, "mse": torch.nn.functional.mse_loss}
        outputs = outputs_of(given)
        parts = (
            term.weight * functions[term.kind](outputs[int(term.output or 0)], label)
            for term, label in zip(parse_loss(self.loss), labels, strict=True)
        )
        return sum(parts, torch.zeros(()))


def outputs_of(given: object) -> tuple[torch.Tensor, ...]:
    """Give the outputs of a module that has one or several."""
    return given if isinstance(given, tuple) else (given,)  # type: ignore[return-value]


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
