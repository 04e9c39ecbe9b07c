"""Training curves beside torch's: a U-Net and a DCGAN, from the same start and on the same data.

    python benchmarks/curves.py [--steps 200] [--picture docs/curves-unet-dcgan.png] [--json FILE] [--threads 1]

The U-Net (three levels, bilinear upsampling) segments discs, squares and stripes on noise, four classes, with SGD and
momentum. The DCGAN learns to draw discs, with AdamW: the discriminator's graph has it twice, for real and generated
images; the generator's is the generator with the discriminator behind it, frozen, and parameters are copied from one to
the other in each iteration. Beside both run torch in float32 and in float64. What is drawn are the losses, and how far
those in float32 are from those in float64. Needs torch, onnxscript and matplotlib.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import handwritten
from torch import nn

import bnfuse
from bnfuse import SGD, AdamW
from bnfuse.build import Term

BATCH, LATENT = 8, 64
SIZE, DISC = 64, 32  # of the images to segment, and of those to draw
KINDS = {"torch, float64": torch.float64, "torch, float32": torch.float32}
Curves = dict[str, dict[str, list[float]]]  # of whom, of what


def segments(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Draw batches: images [N, 3, S, S], float32, and the class of each pixel [N, S, S], int64; 0 is the ground."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    while True:
        labels = np.zeros((BATCH, SIZE, SIZE), np.int64)
        for label in labels:
            y, x, radius = [*rng.integers(8, SIZE - 8, 2).tolist(), int(rng.integers(5, 14))]
            label[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = 1
            y, x, half = [*rng.integers(8, SIZE - 8, 2).tolist(), int(rng.integers(4, 11))]
            label[(abs(rows - y) < half) & (abs(columns - x) < half)] = 2
            label[abs(rows + columns - rng.integers(20, 2 * SIZE - 20)) < 4] = 3
        colours = np.array([[0, 0, 0], [1, 0, 0.2], [0.8, 0.3, 0], [0, 0.9, 0.4]])
        images = colours[labels].transpose(0, 3, 1, 2) + 0.5 * rng.standard_normal((BATCH, 3, SIZE, SIZE))
        yield images.astype(np.float32), labels


def discs(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Draw batches: images of discs [N, 3, S, S] in -1 to 1, and latent vectors [N, L, 1, 1], float32."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:DISC, :DISC]
    while True:
        images = np.full((BATCH, 3, DISC, DISC), -0.9, np.float32)
        for image in images:
            y, x, radius = rng.uniform(10, 22), rng.uniform(10, 22), rng.uniform(4, 9)
            edge = 1 / (1 + np.exp(((rows - y) ** 2 + (columns - x) ** 2) ** 0.5 - radius))
            image += (edge * rng.uniform(0.8, 1.8, (3, 1, 1))).astype(np.float32)
        yield images, rng.standard_normal((BATCH, LATENT, 1, 1)).astype(np.float32)


def compiled(
    module: nn.Module, inputs: list[torch.Tensor], losses: list[str], optimizer: Any, threads: int, frozen: str = ""
) -> bnfuse.Step:
    """Export a module, build its training graph with a loss for each output (or none), rewrite and compile it."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "network.onnx"
        given = tuple(inputs)
        torch.onnx.export(copy.deepcopy(module), given, str(path), dynamo=True, optimize=False, verbose=False)
        names = [value.name for value in bnfuse.load(path).graph.outputs]
        terms = [Term(kind, name) for kind, name in zip(losses, names, strict=bool(losses))]
        built = bnfuse.build_training_graph(path, loss=terms, train_bn=True, freeze=[frozen] if frozen else [])
    return bnfuse.compile(bnfuse.rewrite(built, level="icf"), optimizer=optimizer, threads=threads)


def unet_curves(steps: int, threads: int, progress: Callable[[str], None]) -> Curves:
    """Train the U-Net: the loss of each step."""
    torch.manual_seed(0)
    module = handwritten.unet("bilinear").train()
    rate, momentum = 0.1, 0.9
    step = compiled(
        module, [torch.zeros(BATCH, 3, SIZE, SIZE)], ["cross-entropy"], SGD(lr=rate, momentum=momentum), threads
    )
    found = {"bnfuse": {"loss": [float(step(*batch)) for _, batch in zip(range(steps), segments(1), strict=False)]}}
    for name, kind in KINDS.items():
        progress(f"U-Net, {name}")
        net = copy.deepcopy(module).to(kind)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
        losses = []
        for _, (images, labels) in zip(range(steps), segments(1), strict=False):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(torch.from_numpy(images).to(kind)), torch.from_numpy(labels))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[name] = {"loss": losses}
    return found


class RealAndFake(nn.Module):
    """The discriminator, called for real images and for generated ones: what it is trained with."""

    def __init__(self, discriminator: nn.Module) -> None:
        super().__init__()
        self.discriminator = discriminator

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.discriminator(real), self.discriminator(fake)


class Judged(nn.Module):
    """The generator, and the discriminator behind it: what the generator is trained with."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return self.discriminator(self.generator(latent))


def start_of_dcgan() -> tuple[nn.Module, nn.Module]:
    """Make both halves, with weights as DCGAN's authors draw them."""
    torch.manual_seed(0)
    halves = handwritten.generator().train(), handwritten.discriminator(image=DISC).train()
    for part in (each for half in halves for each in half.modules()):
        if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(part.weight, 0.0, 0.02)
    return halves


def dcgan_curves(steps: int, threads: int, progress: Callable[[str], None]) -> Curves:
    """Train the DCGAN: the losses of both halves in each iteration."""
    generator, discriminator = start_of_dcgan()
    rate, betas = 2e-4, (0.5, 0.999)
    images, latent = torch.zeros(BATCH, 3, DISC, DISC), torch.zeros(BATCH, LATENT, 1, 1)
    ours = AdamW(lr=rate, betas=betas, weight_decay=0.0)
    judge = compiled(RealAndFake(discriminator), [images, images.clone()], ["bce", "bce"], ours, threads)
    draw = compiled(Judged(generator, discriminator), [latent], ["bce"], ours, threads, frozen="discriminator.*")
    generate = compiled(generator, [latent], [], None, threads)
    ones, zeros = np.ones((BATCH, 1), np.float32), np.zeros((BATCH, 1), np.float32)
    found: Curves = {"bnfuse": {"discriminator": [], "generator": []}}
    for _, (real, noise) in zip(range(steps), discs(1), strict=False):
        drawn = draw.state_dict()
        generate.load_state_dict({name: drawn[f"generator.{name}"] for name in generate.state_dict()})
        found["bnfuse"]["discriminator"].append(float(judge(real, generate.forward(noise), ones, zeros)))
        judged = judge.state_dict()
        draw.load_state_dict({name: judged.get(name, value) for name, value in drawn.items()})
        found["bnfuse"]["generator"].append(float(draw(noise, ones)))
    for name, kind in KINDS.items():
        progress(f"DCGAN, {name}")
        found[name] = dcgan_of_torch(generator, discriminator, steps, kind, lr=rate, betas=betas)
    return found


def dcgan_of_torch(
    generator: nn.Module, discriminator: nn.Module, steps: int, kind: torch.dtype, **options: Any
) -> dict[str, list[float]]:
    """Train copies of both halves as torch's users write it."""
    generator, discriminator = copy.deepcopy(generator).to(kind), copy.deepcopy(discriminator).to(kind)
    draw = torch.optim.AdamW(generator.parameters(), weight_decay=0.0, **options)
    judge = torch.optim.AdamW(discriminator.parameters(), weight_decay=0.0, **options)
    bce = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(BATCH, 1, dtype=kind), torch.zeros(BATCH, 1, dtype=kind)
    found: dict[str, list[float]] = {"discriminator": [], "generator": []}
    for _, (real, noise) in zip(range(steps), discs(1), strict=False):
        fake = generator(torch.from_numpy(noise).to(kind))
        judge.zero_grad()
        loss = bce(discriminator(torch.from_numpy(real).to(kind)), ones) + bce(discriminator(fake.detach()), zeros)
        loss.backward()
        judge.step()
        draw.zero_grad()
        drawn = bce(discriminator(fake), ones)
        drawn.backward()
        draw.step()
        found["discriminator"].append(loss.item())
        found["generator"].append(drawn.item())
    return found


def differences(curves: Curves, what: str) -> dict[str, np.ndarray]:
    """Give the relative difference of the losses at each step, of each pair that is compared."""
    truth, theirs = (np.array(curves[name][what]) for name in KINDS)
    ours = np.array(curves["bnfuse"][what])
    return {
        "bnfuse from float64": abs(ours - truth) / truth,
        "torch, float32, from float64": abs(theirs - truth) / truth,
        "bnfuse from torch, float32": abs(ours - theirs) / theirs,
    }


def draw_picture(found: dict[str, Curves], file: Path) -> None:
    """Write the losses, and below them their distances from float64."""
    from matplotlib.figure import Figure

    panels = [(title, curves, what) for title, curves in found.items() for what in next(iter(curves.values()))]
    figure = Figure(figsize=(4.2 * len(panels), 6), layout="constrained")
    axes = figure.subplots(2, len(panels), sharex=True)
    for column, (title, curves, what) in enumerate(panels):
        upper, lower = axes[0][column], axes[1][column]
        for (name, losses), style in zip(reversed(curves.items()), ((0, 1), (0, (4, 2)), (0, (1, 2))), strict=True):
            width = 3.2 if style == (0, 1) else 1.6
            line = "-" if style == (0, 1) else style
            upper.plot(range(1, len(losses[what]) + 1), losses[what], linestyle=line, linewidth=width, label=name)
        for name, apart in differences(curves, what).items():
            lower.semilogy(range(1, len(apart) + 1), np.maximum(apart, 1e-9), linewidth=1, label=name)
        upper.set_title(f"{title}: {what}")
        lower.set_xlabel("step")
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("relative difference")
    axes[0][0].legend()
    axes[1][0].legend()
    figure.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", type=Path, default=Path("docs/curves-unet-dcgan.png"))
    parser.add_argument("--json", type=Path, help="write the losses")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Curves] = {}
    for title, curves in (("U-Net", unet_curves), ("DCGAN", dcgan_curves)):
        found[title] = curves(options.steps, options.threads, lambda what: print(what, flush=True))
        for what in found[title]["bnfuse"]:
            first, last = (found[title]["bnfuse"][what][place] for place in (0, -1))
            print(f"{title}, {what}: {first:.4f} at step 1, {last:.4f} at step {options.steps}")
            for name, apart in differences(found[title], what).items():
                until = [place for place in (1, 10, 20, 50, 100, 200) if place <= options.steps]
                print(f"  {name:30}", *(f"to step {place} {apart[:place].max():.1e}" for place in until))
    if options.json:
        options.json.write_text(json.dumps(found))
    draw_picture(found, options.picture)


if __name__ == "__main__":
    main()
