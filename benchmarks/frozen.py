"""Fine-tuning with frozen BatchNorms: torchvision's resnet50, its BatchNorms in eval mode, beside torch.

    python benchmarks/frozen.py [--network resnet50] [--affine trained|frozen] [--check] [--time] [--batch 8]
                                [--image 224] [--rounds 10] [--threads 2]

`--check`: loss and gradients of the compiled step against torch in float64, beside torch's own float32, at batch 4 and
images of 64x64. `--time`: a step (forward, backward, SGD with momentum) of ours, of torch, of torch.compile, in turn,
round by round; min and median in seconds. Running statistics are those of four batches of noise. Needs torch,
onnxscript and torchvision.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from coverage import distance
from networks.libraries import CLASSES, import_torchvision

import bnfuse
from bnfuse import SGD

RATE, MOMENTUM = 1e-3, 0.9
DRAWS = 7


def network(name: str, affine: str, image: int) -> torch.nn.Module:
    """Make the network with statistics of its own, then freeze its BatchNorms."""
    torch.manual_seed(0)
    made = getattr(import_torchvision().models, name)(weights=None, num_classes=CLASSES).train()
    norms = [part for part in made.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the average of the batches
        torch.nn.init.uniform_(norm.weight, 0.5, 1.0)
        torch.nn.init.uniform_(norm.bias, -0.2, 0.2)
    with torch.no_grad():
        for _ in range(4):
            made(torch.randn(4, 3, image, image))
    for norm in norms:
        norm.eval()
        for parameter in norm.parameters():
            parameter.requires_grad = affine == "trained"
    return made


def training_file(module: torch.nn.Module, images: torch.Tensor, folder: str) -> Any:
    """Export the module and build its training file; what has no gradient in torch is frozen here too."""
    path = Path(folder) / f"{images.shape[0]}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(copy.deepcopy(module), (images,), str(path), dynamo=True, optimize=False, verbose=False)
    fixed = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return bnfuse.build_training_graph(path, frozen_bn=True, freeze=fixed)


def step_of_torch(module: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, kind: torch.dtype) -> Any:
    """Give the loss and the gradients by name."""
    module = copy.deepcopy(module).to(kind)
    loss = torch.nn.functional.cross_entropy(module(images.to(kind)), labels)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def check(name: str, affine: str, folder: str, threads: int) -> None:
    """Print the errors against float64 of loss and gradients, ours and torch's, over DRAWS batches.

    An element at zero within rounding that one ReLU opens and another does not moves whole gradients: hence several.
    """
    module = network(name, affine, 64)
    draws = [(torch.randn(4, 3, 64, 64), torch.randint(0, CLASSES, (4,))) for _ in range(DRAWS)]
    built = training_file(module, draws[0][0], folder)
    step = bnfuse.compile(bnfuse.rewrite(built, level="icf"), threads=threads)
    losses, gradients = [], []
    for images, labels in draws:
        true_loss, truth = step_of_torch(module, images, labels, torch.float64)
        single_loss, single = step_of_torch(module, images, labels, torch.float32)
        loss = float(step(images.numpy(), labels.numpy()))
        ours = {key.removesuffix("_grad"): value for key, value in step.gradients().items()}
        assert ours.keys() == truth.keys(), sorted(ours.keys() ^ truth.keys())[:4]
        losses.append([abs(each - true_loss) / true_loss for each in (loss, single_loss)])
        gradients.append([distance(each, truth) for each in (ours, single)])
    print(f"{name}, affine {affine}, {len(truth)} gradients, {DRAWS} batches: median and largest error against float64")
    for what, errors in (("loss", losses), ("gradients together", gradients)):
        shown = (f"{statistics.median(each):.1e}, {max(each):.1e}" for each in zip(*errors, strict=True))
        print(f"  {what:19} {' (torch in float32: '.join(shown)})")


def trainer(module: torch.nn.Module, forward: Any, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    """Give a whole step of torch."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(options: argparse.Namespace, folder: str) -> None:
    """Print the times of a step, in turn."""
    module = network(options.network, options.affine, options.image)
    images = torch.randn(options.batch, 3, options.image, options.image)
    labels = torch.randint(0, CLASSES, (options.batch,))
    rewritten = bnfuse.rewrite(training_file(module, images, folder), level="icf")
    ours = bnfuse.compile(rewritten, threads=options.threads, optimizer=SGD(lr=RATE, momentum=MOMENTUM))
    given = images.numpy(), labels.numpy()
    eager, compiled = copy.deepcopy(module), copy.deepcopy(module)
    steps: dict[str, Callable[[], object]] = {
        "bnfuse": lambda: ours(*given),
        "torch eager": trainer(eager, eager, images, labels),
    }
    if not options.eager_only:
        steps["torch.compile"] = trainer(compiled, torch.compile(compiled), images, labels)
    losses = {name: [step() for _ in range(2)][-1] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - started)
    where = f"batch {options.batch}, {options.image}x{options.image}, {options.threads} threads"
    print(f"{options.network}, affine {options.affine}, {where}, {options.rounds} rounds")
    for name, taken in times.items():
        shown = f"min {min(taken):.3f} s, median {statistics.median(taken):.3f} s"
        print(f"  {name:14} {shown}, loss of step 2 {float(losses[name]):.5f}")  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--affine", choices=("trained", "frozen"), default="trained")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--eager-only", action="store_true", help="no torch.compile")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if options.check:
            check(options.network, options.affine, folder, options.threads)
        if options.time:
            measure(options, folder)


if __name__ == "__main__":
    main()
