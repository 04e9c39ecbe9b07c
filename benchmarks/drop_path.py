"""Networks with drop path beside torch: the same masks give the same training, and evaluation has none.

    python benchmarks/drop_path.py                       # needs torch and timm; some minutes on two cores
    python benchmarks/drop_path.py --networks resnet18 --steps 5 --level none

Each network of timm is exported, built, rewritten and compiled. Then it is trained beside torch in float32 and torch in
float64, all three with the same draws in the place of their own, on the same batches. The yardstick is torch's own
rounding: what float32 is off from float64 there, ours may be off `FACTOR` times; where that alone is more than `MOST`,
nothing is judged, and that is a failure too. Without values fed the step must draw
other masks in each step, the same ones in two runs of a seed, and its evaluation and its export must be torch's in
evaluation mode. Exits with 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

import bnfuse
from bnfuse.build import build_training_graph

try:
    import timm
except RuntimeError:  # a torchvision that was built for another torch lacks its operators: none of them is needed
    for module in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
        del sys.modules[module]
    stub = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        stub.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm

BATCH, IMAGE, CLASSES, DROP = 4, 64, 10, 0.3
MOMENTUM = 0.9
FACTOR = 8.0  # as in `bnfuse verify`
LEAST = 1e-6  # relative: no result is held to less than a few roundings
MOST = 1e-2  # relative: a yardstick that is longer measures nothing
# with learning rates at which float32 stays near float64: efficientnet's last BatchNorms see 16 values a channel at
# this size, and at 1e-3 torch's own float32 has parted from float64 by 4 % after seven steps
NETWORKS = {"efficientnet_b0": 1e-5, "resnet18": 0.01}


class Fed(torch.nn.Module):
    """A DropPath whose uniform draws are given."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep = keep
        self.draws: np.ndarray | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mask = torch.from_numpy(self.draws < np.float32(self.keep)).to(x.dtype)
        return x * (mask / self.keep)


def exported(net: torch.nn.Module, folder: Path) -> Any:
    """The training graph, by the recipe of the README."""
    path = folder / "net.onnx"
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    training = torch.onnx.TrainingMode.TRAINING
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, images, str(path), training=training, do_constant_folding=False, dynamo=False)
    return build_training_graph(path)


def fed_copy(name: str, state: dict[str, np.ndarray], dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Fed]]:
    """The network in torch, from our state; its DropPaths by their names."""
    net = timm.create_model(name, num_classes=CLASSES, drop_path_rate=DROP)
    places: dict[str, Fed] = {}
    for path, module in list(net.named_modules()):
        if type(module).__name__ == "DropPath":
            parent, _, own = path.rpartition(".")
            places[path] = Fed(1 - module.drop_prob)
            setattr(net.get_submodule(parent), own, places[path])
    missing = net.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()}, strict=False).missing_keys
    assert all(key.endswith("num_batches_tracked") for key in missing), missing
    return net.to(dtype), places


def place_of(draw: str) -> str:
    """/layer1/layer1.0/drop_path/RandomUniformLike_output_0: layer1.0.drop_path."""
    return ".".join(draw.split("/")[-3:-1])


def train_torch(net: torch.nn.Module, places: dict[str, Fed], batches: Any, masks: Any, lr: float) -> list[float]:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=MOMENTUM)
    losses, dtype = [], next(net.parameters()).dtype
    for (x, y), draws in zip(batches, masks, strict=True):
        for name, values in draws.items():
            places[place_of(name)].draws = values
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x).to(dtype)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def off(found: Any, exact: Any) -> float:
    """The largest difference, relative to the largest value."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def by_evaluation(net: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    net.eval()
    with torch.no_grad():
        return net(torch.from_numpy(x).to(next(net.parameters()).dtype)).numpy()


def run(name: str, lr: float, level: str, steps: int, threads: int | None) -> list[tuple[str, float, float, bool]]:
    """What was compared, our error, torch's own in float32, and whether ours is no worse."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = exported(timm.create_model(name, num_classes=CLASSES, drop_path_rate=DROP), folder)
        graph = bnfuse.rewrite(model, level=level)
        step = bnfuse.compile(graph, optimizer=bnfuse.SGD(lr=lr, momentum=MOMENTUM), threads=threads)
        state = step.state_dict()
        (single, one), (double, two) = (fed_copy(name, state, kind) for kind in (torch.float32, torch.float64))
        draws = step.sampling.random
        used = {place_of(draw) for draw in draws}  # timm makes some that no block calls
        assert len(used) == len(draws) > 0 and used <= set(one), (draws, list(one))
        rng = np.random.default_rng(0)
        batches = [
            (rng.standard_normal((BATCH, 3, IMAGE, IMAGE), np.float32), rng.integers(0, CLASSES, BATCH))
            for _ in range(steps)
        ]
        masks = [{d: rng.random((BATCH, 1, 1, 1), np.float32) for d in draws} for _ in range(steps)]

        ours = []
        for (x, y), values in zip(batches, masks, strict=True):
            step.fix(values)
            ours.append(step(x, y))
        step.fix(None)
        theirs, exact = (train_torch(net, places, batches, masks, lr) for net, places in ((single, one), (double, two)))
        found = [judged(f"losses of {steps} steps", ours, theirs, exact)]

        trained = step.state_dict()
        evaluated = [fed_copy(name, trained, kind)[0] for kind in (torch.float32, torch.float64)]
        x = batches[0][0]
        theirs, exact = (by_evaluation(net, x) for net in evaluated)
        found.append(judged("evaluation", step.evaluate(x), theirs, exact))
        bnfuse.export_inference(step, folder / "trained.onnx")
        session = ort.InferenceSession(str(folder / "trained.onnx"), providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {session.get_inputs()[0].name: x[:3]})
        found.append(judged("export, a batch of 3", logits, theirs[:3], exact[:3]))

        runs = []
        for _ in range(2):
            still = bnfuse.compile(graph, optimizer=bnfuse.SGD(lr=0.0), threads=threads)
            still.load_state_dict(trained)  # a branch may end in a scale that is 0 before the training
            runs.append([still(*batches[0]) for _ in range(6)])
        found.append(("masks differ from step to step", 0.0, 0.0, len(set(runs[0])) == len(runs[0])))
        found.append(("two runs of a seed are the same", off(runs[0], runs[1]), 0.0, runs[0] == runs[1]))
        return found


def judged(what: str, ours: Any, theirs: Any, exact: Any) -> tuple[str, float, float, bool]:
    own, yardstick = off(ours, exact), off(theirs, exact)
    return what, own, yardstick, yardstick <= MOST and own <= max(FACTOR * yardstick, LEAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--level", default="icf")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=None)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    good = True
    print(f"{'network':18}{'compared':34}{'ours':>10}{'torch f32':>11}  verdict")
    for name in asked.networks:
        for what, own, yardstick, ok in run(name, NETWORKS[name], asked.level, asked.steps, asked.threads):
            print(f"{name:18}{what:34}{own:10.1e}{yardstick:11.1e}  {'holds' if ok else 'DOES NOT HOLD'}", flush=True)
            good &= ok
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
