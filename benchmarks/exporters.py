"""Whether the recipe of the README for PyTorch keeps a network as it is, on ten networks of torchvision and timm.

    python benchmarks/exporters.py [--only PATTERN] [--image 64] [--batch 4]

Each network, in training mode and with statistics that are not new, is exported with dynamo=True, optimize=False and
built with train_bn=True. Then, a column each:

    module       parameters, buffers and mode are after the export bit for bit what they were before
    state        the file has the names of the module's state_dict, and the same values bit for bit
    dropout      as many Dropouts are in the file as the module has, each with its rate
    loss, grad   of one step in onnxruntime, against the module in float64, beside torch's own float32 error
    statistics   the new running statistics, against torch's float32, with the biased variance that ONNX prescribes

Errors are relative, that of the gradients over all of them together. For the step, dropout is set to 0 on both sides;
dropout in place is written as a random mask, which has no rate to set, so networks with it (MNASNet) are left out.

Needs torch, onnxscript, torchvision and timm; downloads nothing. The exit status is 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import fnmatch
import functools
import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from networks.libraries import import_torchvision
from onnx import numpy_helper

from bnfuse.build import Built, build
from bnfuse.graph.signature import METADATA_KEY, GraphSignature

ROUNDING = 1e-5  # of the statistics, and of the loss at least
LEAST = 1e-4  # of the gradients at least
ROUNDINGS_OF_TORCH = 5.0  # how much larger than torch's own float32 errors those of loss and gradients may be


def torchvision_network(name: str) -> torch.nn.Module:
    extra = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    return getattr(import_torchvision().models, name)(weights=None, num_classes=10, **extra)


def timm_network(name: str) -> torch.nn.Module:
    import_torchvision()  # which timm imports
    return importlib.import_module("timm").create_model(name, pretrained=False, num_classes=10)


Maker = Callable[[str], torch.nn.Module]
NETWORKS: dict[str, Maker] = {
    **dict.fromkeys(
        ("resnet18", "densenet121", "mobilenet_v2", "googlenet", "shufflenet_v2_x0_5", "regnet_x_400mf"),
        torchvision_network,
    ),
    **dict.fromkeys(("gernet_s", "seresnet18", "repvgg_a0", "spnasnet_100"), timm_network),
}


@dataclasses.dataclass
class Found:
    module: bool
    state: bool
    dropout: bool
    loss: float
    torch_loss: float
    gradients: float
    torch_gradients: float
    statistics: float

    @property
    def holds(self) -> bool:
        near = (
            self.loss <= max(ROUNDING, ROUNDINGS_OF_TORCH * self.torch_loss)
            and self.gradients <= max(LEAST, ROUNDINGS_OF_TORCH * self.torch_gradients)
            and self.statistics <= ROUNDING
        )
        return self.module and self.state and self.dropout and near

    def cells(self) -> list[str]:
        flags = ["yes" if flag else "NO" for flag in (self.module, self.state, self.dropout)]
        numbers = (self.loss, self.torch_loss, self.gradients, self.torch_gradients, self.statistics)
        return [*flags, *(f"{value:.1e}" for value in numbers)]


def make(name: str, batch: int, image: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The network in training mode after some steps' worth of statistics, and images."""
    torch.manual_seed(0)
    network = NETWORKS[name](name)
    images = torch.randn(batch, 3, image, image)
    for module in network.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2.0)
            module.num_batches_tracked.fill_(7)
    return network.train(), images


def snapshot(network: torch.nn.Module) -> dict[str, np.ndarray]:
    """Parameters and buffers, those too that a state_dict leaves out, and the mode of every module."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    values = {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}
    return values | {f"{name}: training": np.array(module.training) for name, module in network.named_modules()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def exported(network: torch.nn.Module, images: torch.Tensor) -> Built:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "net.onnx")
        torch.onnx.export(network, (images,), path, dynamo=True, optimize=False, verbose=False)
        return build(path, train_bn=True)


def signature_of(model: onnx.ModelProto) -> GraphSignature:
    return GraphSignature.from_json(next(entry.value for entry in model.metadata_props if entry.key == METADATA_KEY))


def state_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    signature = signature_of(model)
    kept = {*signature.trainable, *signature.frozen, *signature.running}
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in kept}


def rates(network: torch.nn.Module) -> list[float]:
    kinds = (torch.nn.Dropout, torch.nn.Dropout2d)
    return sorted(module.p for module in network.modules() if isinstance(module, kinds) and module.p)


def rates_of(model: onnx.ModelProto, *, then: float) -> list[float]:
    """The rates of the file's Dropouts, which become `then`."""
    names = {node.input[1] for node in model.graph.node if node.op_type in ("Dropout", "DropoutGrad", "BiasDropout")}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {name for name in names if name in constants and constants[name].data_type == onnx.TensorProto.FLOAT}
    found = []
    for node in model.graph.node:
        if node.op_type == "Dropout":
            found.append(round(float(numpy_helper.to_array(constants[node.input[1]]).item()), 6))
    for name in names:
        constants[name].CopyFrom(numpy_helper.from_array(np.array(then, np.float32), name))
    return sorted(found)


def step_of(model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    signature = signature_of(model)
    names = [value.name for value in session.get_outputs()]
    feeds = {signature.data[0]: images, signature.labels[0]: labels}
    return dict(zip(names, session.run(names, feeds), strict=True))


def step_of_torch(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, kind: torch.dtype):
    """Loss, gradients by name, and the running statistics after the step, with the biased variance."""
    network = copy.deepcopy(network).to(kind)
    counts: dict[str, int] = {}
    old = {name: value.clone() for name, value in network.named_buffers()}
    norms = {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.Dropout2d):
            module.p = 0.0
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            norms[name] = module
            module.register_forward_hook(functools.partial(_count, counts, name))
    loss = torch.nn.functional.cross_entropy(network(images.to(kind)), labels)
    loss.backward()
    gradients = {name: value.grad.numpy() for name, value in network.named_parameters() if value.grad is not None}
    statistics = {}
    for name, module in norms.items():
        kept = old[f"{name}.running_var"] * (1 - module.momentum)
        n = counts[name]
        statistics[f"{name}.running_mean"] = module.running_mean.numpy()
        statistics[f"{name}.running_var"] = (kept + (module.running_var - kept) * (n - 1) / n).numpy()
    return float(loss), gradients, statistics


def _count(counts: dict[str, int], name: str, module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    counts[name] = output.numel() // output.shape[1]


def distance(ours: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """Of all of them together, relative to the exact ones."""
    error = sum(float(np.sum((ours[name].astype(np.float64) - exact[name]) ** 2)) for name in exact)
    return (error / max(sum(float(np.sum(np.square(value))) for value in exact.values()), 1e-300)) ** 0.5


def check(name: str, batch: int, image: int) -> Found:
    network, images = make(name, batch, image)
    labels = torch.arange(batch) % 10
    before = snapshot(network)
    model = exported(network, images).model
    unchanged = same(before, snapshot(network))
    expected = {key: value.numpy() for key, value in network.state_dict().items() if value.is_floating_point()}
    ours, signature = state_of(model), signature_of(model)
    extra = [key for key in ours if key not in expected and key not in signature.frozen]
    kept = not extra and all(key in ours and np.array_equal(ours[key], value) for key, value in expected.items())
    dropout = rates_of(model, then=0.0) == rates(network)
    results = step_of(model, images.numpy(), labels.numpy())
    exact_loss, exact, _ = step_of_torch(network, images, labels, torch.float64)
    single_loss, single, running = step_of_torch(network, images, labels, torch.float32)
    gradients = {key: results[output] for key, output in signature.gradients.items()}
    statistics = {key: results[output] for key, output in signature.running.items()}
    return Found(
        unchanged,
        kept and gradients.keys() == exact.keys(),
        dropout,
        abs(float(results[signature.loss]) - exact_loss) / abs(exact_loss),
        abs(single_loss - exact_loss) / abs(exact_loss),
        distance(gradients, exact) if gradients.keys() == exact.keys() else float("inf"),
        distance(single, exact),
        distance(statistics, running) if statistics.keys() == running.keys() else float("inf"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--image", type=int, default=64)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| network | module | state | dropout | loss | torch's | gradients | torch's | statistics | holds |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    held = True
    for name in fnmatch.filter(NETWORKS, options.only):
        found = check(name, options.batch, options.image)
        held &= found.holds
        print(f"| {name} | {' | '.join(found.cells())} | {'yes' if found.holds else 'NO'} |", flush=True)
    print("all hold" if held else "not all hold")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
