"""Fused modules in plain torch loops, beside the modules themselves: do they train alike, and how fast.

    python benchmarks/front_door.py follow                      # 20 steps of each network, judged by float64
    python benchmarks/front_door.py time --batch 16 --image 224 # steps a second, in turns
    python benchmarks/front_door.py follow --target cuda --autocast bfloat16
    python benchmarks/front_door.py time --target cuda --only densenet121

Networks of torchvision and timm that are installed, and a U-Net. A line of JSON for each result; --output keeps them.

follow judges twice. `state`: losses and weights of whole runs, by those of a run in float64. `step`: each --every-th
step by itself, from the weights that the fused module has then: loss, gradients and new statistics, by those in float64
of the same weights. Either may be --factor times as far from float64 as torch in float32 is, which has three tries (as
it is, channels_last, with inputs rounded otherwise). With AdamW a network follows by its steps alone: Adam divides by
the size of a gradient, so that where that is nothing but rounding (a bias in front of a norm has none) the weights
of any two runs part by whole rates, in torch as here. `state` is told all the same. Of a tensor the median of the
steps counts: a ReLU whose input is nothing but rounding falls to either side, in one step, in torch as here, and moves
the gradients below it; what is wrong is wrong in every step.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import handwritten
from torch import nn

import bnfuse
import bnfuse.torch
from bnfuse.build import build
from bnfuse.torch import capture

TORCHVISION = (
    "resnet18",
    "resnet50",
    "densenet121",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "regnet_y_400mf",
    "convnext_tiny",
    "deeplabv3_resnet50",
)
TIMM = (
    "resnet18",
    "resnet50",
    "densenet121",
    "mobilenetv3_large_100",
    "efficientnet_b0",
    "regnety_004",
    "convnext_tiny",
)
CLASSES = 10


def networks() -> dict[str, Callable[[], nn.Module]]:
    """Makers of the networks, of those libraries that are installed."""
    found: dict[str, Callable[[], nn.Module]] = {"unet": lambda: handwritten.unet("bilinear", classes=CLASSES)}
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:
        print(f"without torchvision: {error}", file=sys.stderr)
    else:
        segmentation = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
        for name in TORCHVISION:
            options = segmentation if name.startswith("deeplab") else {"weights": None, "num_classes": CLASSES}
            found[f"torchvision/{name}"] = lambda name=name, options=options: models.get_model(name, **options)
    try:
        import timm
    except ImportError as error:
        print(f"without timm: {error}", file=sys.stderr)
    else:
        for name in TIMM:
            found[f"timm/{name}"] = lambda name=name: timm.create_model(name, num_classes=CLASSES)
    return found


def made(maker: Callable[[], nn.Module], *, draws: bool) -> nn.Module:
    """Make a network in training mode; without what it draws where runs are compared number by number."""
    torch.manual_seed(0)
    module = maker().train()
    for one in [] if draws else module.modules():
        for name in ("p", "drop_prob"):
            if isinstance(getattr(one, name, None), float):
                setattr(one, name, 0.0)
    return module


def loss_of(found: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of classes, by image or by pixel."""
    scores = found["out"] if isinstance(found, dict) else found
    wide = labels if scores.dim() == 2 else labels[:, None, None].expand(-1, *scores.shape[2:])
    return nn.functional.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), wide)


def optimizer_of(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW."""
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


@dataclasses.dataclass
class Trained:
    """What a loop gave."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def train(
    module: nn.Module,
    kind: str,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    autocast: Any,
    judge: Judge | None = None,
) -> Trained:
    """The plain loop."""
    optimizer, losses = optimizer_of(kind, module), []
    device = next(module.parameters()).device.type
    for step, (images, labels) in enumerate(batches):
        said = judge.look(step, module, images, labels, autocast) if judge is not None else None
        optimizer.zero_grad()
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            loss = loss_of(module(images), labels)
        loss.backward()
        if said is not None:
            said(loss.item())
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {name: one.detach().double() for name, one in module.state_dict().items()})


Gradients = dict[str, torch.Tensor]


def one_step(module: nn.Module, images: torch.Tensor, labels: torch.Tensor, autocast: Any) -> tuple[float, Gradients]:
    """Loss, gradients and new statistics of a step from the weights as they are; nothing is updated."""
    device = images.device.type
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        loss = loss_of(module(images), labels)
    loss.backward()
    found = {name: one.grad.double() for name, one in module.named_parameters() if one.grad is not None}
    moved = {name: one.double() for name, one in module.named_buffers() if one.is_floating_point()}
    return loss.item(), {**found, **moved}


Errors = tuple[float, dict[str, float]]  # of the loss of a step, and of its tensors


def apart(found: Gradients, exact: Gradients) -> dict[str, float]:
    """The error of each tensor, relative to it, or to a thousandth of the largest where it is less."""
    floor = 1e-3 * max(float(one.norm()) for one in exact.values())
    errors = {
        key: float((found[key] - one).norm()) / max(float(one.norm()), floor) if key in found else float("inf")
        for key, one in exact.items()
    }
    return errors | dict.fromkeys(found.keys() - exact.keys(), float("inf"))


def worst(steps: list[Errors]) -> tuple[float, float]:
    """The largest error of a loss, and the largest of a tensor, each tensor's being the median of the steps."""
    names = {key for _, errors in steps for key in errors}
    medians = [statistics.median_low([errors.get(key, float("inf")) for _, errors in steps]) for key in names]
    return max(loss for loss, _ in steps), max(medians)


@dataclasses.dataclass
class Judge:
    """Steps of a fused module that are judged one by one, by those of its module in float64."""

    start: nn.Module  # as it was given
    every: int
    errors: list[Errors] = dataclasses.field(default_factory=list)  # by step
    torchs: list[Errors] = dataclasses.field(default_factory=list)  # of its tries the largest

    def look(
        self, step: int, fused: nn.Module, images: torch.Tensor, labels: torch.Tensor, autocast: Any
    ) -> Callable[[float], None]:
        """Take the weights in front of a step, and give what takes its loss when the gradients are there."""
        if step % self.every:
            return lambda loss: None
        state = {name: one.detach().clone() for name, one in fused.state_dict().items()}

        def of(module: nn.Module, x: torch.Tensor, cast: Any) -> tuple[float, Gradients]:
            module.load_state_dict(state)
            return one_step(module, x, labels, cast)

        wanted = of(copy.deepcopy(self.start).double(), images.double(), None)
        last = torch.channels_last
        tries = [
            of(copy.deepcopy(self.start), images, autocast),
            of(copy.deepcopy(self.start).to(memory_format=last), images.to(memory_format=last), autocast),
            of(copy.deepcopy(self.start), images * (1 + 2**-23), autocast),
        ]
        errors = [(abs(loss - wanted[0]), apart(found, wanted[1])) for loss, found in tries]
        largest = {key: max(found.get(key, float("inf")) for _, found in errors) for key in wanted[1]}
        self.torchs.append((max(loss for loss, _ in errors), largest))

        def judge(loss: float) -> None:
            grads = {name: one.grad.double() for name, one in fused.named_parameters() if one.grad is not None}
            moved = {name: one.double() for name, one in fused.named_buffers() if one.is_floating_point()}
            self.errors.append((abs(loss - wanted[0]), apart({**grads, **moved}, wanted[1])))

        return judge

    def follows(self, factor: float) -> bool:
        """Tell whether the steps are as near to float64 as torch's, but for the factor."""
        pairs = zip(worst(self.errors), worst(self.torchs), strict=True)
        return all(ours <= factor * theirs + 1e-6 for ours, theirs in pairs)


def far(found: Trained, exact: Trained) -> tuple[float, float]:
    """How far losses and weights are from those in float64: the largest, relative to the whole state."""
    losses = max(abs(a - b) for a, b in zip(found.losses, exact.losses, strict=True))
    norm = sum(float(one.square().sum()) for one in exact.state.values()) ** 0.5
    apart = sum(float((found.state[name] - one).square().sum()) for name, one in exact.state.items()) ** 0.5
    return losses, apart / norm


def follow(name: str, maker: Callable[[], nn.Module], given: argparse.Namespace) -> dict[str, Any]:
    """Steps of torch in float64 and float32, and fused: ours may be as far from float64 as a small multiple of
    torch's own distance, the largest of three tries."""
    device, autocast = torch.device(given.target), getattr(torch, given.autocast) if given.autocast else None
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(given.batch, 3, given.image, given.image, generator=generator).to(device),
            torch.randint(CLASSES, (given.batch,), generator=generator).to(device),
        )
        for _ in range(given.steps)
    ]
    start = made(maker, draws=False).to(device)
    exact = train(copy.deepcopy(start).double(), given.optimizer, [(x.double(), y) for x, y in batches], None)
    last = torch.channels_last
    others = [
        train(copy.deepcopy(start), given.optimizer, batches, autocast),
        train(
            copy.deepcopy(start).to(memory_format=last),
            given.optimizer,
            [(x.to(memory_format=last), y) for x, y in batches],
            autocast,
        ),
        train(copy.deepcopy(start), given.optimizer, [(x * (1 + 2**-23), y) for x, y in batches], autocast),
    ]
    module, judge = copy.deepcopy(start), Judge(copy.deepcopy(start), given.every)
    begun = time.perf_counter()
    fused = bnfuse.torch.fuse(module, batches[0][0], fallback=given.fallback)
    seconds = time.perf_counter() - begun
    ours = train(fused, given.optimizer, batches, autocast, judge)
    start.load_state_dict(fused.state_dict())
    loads = all(torch.equal(one, fused.state_dict()[key]) for key, one in start.state_dict().items())
    loss, state = far(ours, exact)
    torch_loss, torch_state = map(max, zip(*(far(one, exact) for one in others), strict=True))
    state_follows = loss <= given.factor * torch_loss + 1e-6 and state <= given.factor * torch_state + 1e-6
    steps_follow = judge.follows(given.factor)
    return {
        "network": name,
        "optimizer": given.optimizer,
        "autocast": given.autocast,
        "target": given.target,
        "fuse_s": round(seconds, 1),
        "loss_error": loss,
        "torch_loss_error": torch_loss,
        "state_error": state,
        "torch_state_error": torch_state,
        "state_follows": state_follows,
        "step_errors": worst(judge.errors),
        "torch_step_errors": worst(judge.torchs),
        "steps_follow": steps_follow,
        "follows": steps_follow and (state_follows or given.optimizer == "adamw"),
        "state_dict_loads": loads,
        "parts": [str(part) for part in bnfuse.torch.report(fused).parts],
    }


def bare_step(
    module: nn.Module, images: torch.Tensor, target: str, precision: str | None, *, whole: bool = True
) -> Any:
    """The compiled step of the same network without torch: with its loss and optimiser, or without either."""
    with capture.as_found(module):
        proto = capture.as_onnx(capture.exported(module, ((images,), {}), "network"), "network")
    options = {} if whole else {"loss": "none"}
    fused = bnfuse.rewrite(build(proto, train_bn=True, running_variance="torch", **options).model)
    return bnfuse.compile(fused, target, bnfuse.SGD(lr=0.01, momentum=0.9) if whole else None, precision=precision)


def own_of(module: nn.Module, labels: torch.Tensor) -> Callable[[], Any]:
    """What of a loop is torch's whatever computes the gradients: the loss, and the optimiser."""
    scores = module(torch.zeros(len(labels), 3, 64, 64, device=labels.device))
    scores = {"out": scores["out"].detach()} if isinstance(scores, dict) else scores.detach()
    leaf = (scores["out"] if isinstance(scores, dict) else scores).requires_grad_()
    optimizer = optimizer_of("sgd", module)
    for one in module.parameters():
        one.grad = torch.zeros_like(one)

    def step() -> torch.Tensor:
        leaf.grad = None
        loss = loss_of(scores, labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def phases_of(step: Any, images: Any) -> Callable[[], Any]:
    """Forward and backward alone, as a fused module calls them."""
    (given,) = step.program.signature["output_gradients"].values()
    gradient = torch.full(step.program.inputs[given].shape, 1e-3)
    dy = gradient.numpy() if isinstance(images, np.ndarray) else gradient.to(images.device)

    def phases() -> None:
        ticket = step.run_forward(images, commit_statistics=True)
        step.backward_piece(step.pieces(1)[0], dy, ticket=ticket)

    return phases


def timed(name: str, maker: Callable[[], nn.Module], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of each way to run the loop, in turns: the median and the least of them."""
    device, autocast = torch.device(given.target), getattr(torch, given.autocast) if given.autocast else None
    torch.manual_seed(1)
    images = torch.randn(given.batch, 3, given.image, given.image, device=device)
    labels = torch.randint(CLASSES, (given.batch,), device=device)
    steps: dict[str, Callable[[], Any]] = {}

    def loop(module: nn.Module, images: torch.Tensor) -> Callable[[], Any]:
        optimizer = optimizer_of("sgd", module)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                loss = loss_of(module(images), labels)
            loss.backward()
            optimizer.step()
            return loss

        return step

    start = made(maker, draws=True).to(device)
    last = images.to(memory_format=torch.channels_last)
    for way in given.ways.split(","):
        module = copy.deepcopy(start)
        if way == "eager":
            steps[way] = loop(module, images)
        elif way == "channels_last":
            steps[way] = loop(module.to(memory_format=torch.channels_last), last)
        elif way == "compile":
            steps[way] = loop(torch.compile(module), images)
        elif way == "compile_last":
            steps[way] = loop(torch.compile(module.to(memory_format=torch.channels_last)), last)
        elif way == "own":
            steps[way] = own_of(module, labels)
        elif way == "fused":
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                steps[way] = loop(bnfuse.torch.fuse(module, images, fallback=given.fallback), images)
        else:
            precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(autocast) if device.type == "cuda" else None
            compiled = bare_step(module, images, given.target, precision, whole=way == "bare")
            arrays = (images, labels) if device.type == "cuda" else (images.numpy(), labels.numpy())
            if way == "bare":
                steps[way] = lambda compiled=compiled, arrays=arrays: compiled(*arrays)
            else:
                steps[way] = phases_of(compiled, arrays[0])
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(given.turns + 2):
        for way, step in steps.items():
            wait()
            begun = time.perf_counter()
            for _ in range(given.repeat):
                step()
            wait()
            if turn >= 2:
                seconds[way].append((time.perf_counter() - begun) / given.repeat)
    least = {way: min(found) for way, found in seconds.items()}
    result: dict[str, Any] = {
        "network": name,
        "target": given.target,
        "autocast": given.autocast,
        "batch": given.batch,
        "image": given.image,
        "threads": torch.get_num_threads(),
        "seconds": {way: {"min": least[way], "median": statistics.median(found)} for way, found in seconds.items()},
        "steps_per_second": {way: 1 / value for way, value in least.items()},
    }
    if "fused" in least and "bare" in least:
        result["overhead"] = least["fused"] / least["bare"] - 1
        if "phases" in least and "own" in least:  # of the wrapper alone
            result["wrapper"] = (least["fused"] - least["phases"] - least["own"]) / least["bare"]
    torchs = [value for way, value in least.items() if way not in ("fused", "bare", "phases", "own")]
    if "fused" in least and torchs:
        result["times_faster"] = min(torchs) / least["fused"]
    return result


def main() -> None:
    """Run what is asked for; exits with 1 where a network does not follow, or cannot be fused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("follow", "time"))
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="networks whose names contain one of these, by commas")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps of which one is judged by itself")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), default="")
    parser.add_argument("--fallback", choices=("error", "torch"), default="error")
    parser.add_argument("--factor", type=float, default=4.0, help="of torch's own distance from float64")
    parser.add_argument(
        "--ways", default="eager,channels_last,compile,fused,bare", help="also compile_last, own, phases"
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=1, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the lines of JSON")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    bad = 0
    for name, maker in networks().items():
        if given.only and not any(part in name for part in given.only.split(",")):
            continue
        try:
            result = (follow if given.what == "follow" else timed)(name, maker, given)
        except bnfuse.BnfuseError as error:
            result = {"network": name, "error": str(error)}
        bad += "error" in result or result.get("follows") is False
        print(json.dumps(result), flush=True)
        if given.output:
            with given.output.open("a") as file:
                file.write(json.dumps(result) + "\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
