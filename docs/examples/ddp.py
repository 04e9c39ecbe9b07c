"""Training in several processes: DistributedDataParallel around a fused module.

    torchrun --nproc-per-node 2 docs/examples/ddp.py

Over gloo on CPUs, over NCCL with a GPU for each process. All begin with equal weights and see different images;
gradients are averaged while the earlier layers' are still computed. In the end one process repeats the first steps at
the same global batch, and the last line says whether its losses are equal. Needs torch and onnxscript: '.[torch]'.
"""

import argparse
import os
from collections.abc import Iterator

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bnfuse.torch
from bnfuse.data import load_data

parser = argparse.ArgumentParser()
parser.add_argument("--image", type=int, default=16)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--batch", type=int, default=32, help="of each process")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--steps", type=int, help="of an epoch, at most")
parser.add_argument("--repeated", type=int, default=10, help="steps that one process repeats in the end")
given = parser.parse_args()

on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if on_gpus else "gloo")
rank, count = distributed.get_rank(), distributed.get_world_size()

data = load_data("digits", image=given.image, channels=1)
images = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
length = len(DataLoader(images, given.batch * count, drop_last=True))  # of an epoch
length = min(length, given.steps or length)


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def made() -> nn.Module:
    torch.manual_seed(0)
    width = given.width
    blocks = [block(1, width), block(width, 2 * width, 2), block(2 * width, 2 * width)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, data.classes)).to(device)


def batches(process: int) -> Iterator[list[torch.Tensor]]:
    """Batches of one of the processes, epoch after epoch."""
    sampler = DistributedSampler(images, count, process, seed=0)
    loader = DataLoader(images, given.batch, sampler=sampler, drop_last=True)
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        for _, batch in zip(range(length), loader, strict=False):
            yield [one.to(device) for one in batch]


def train(processes: list[int], steps: int) -> tuple[nn.Module, torch.Tensor]:
    """Train on the batches of some processes, whose gradients add up. Gives the module and the losses."""
    model, example = made(), torch.zeros(given.batch, 1, given.image, given.image, device=device)
    model = bnfuse.torch.fuse(model, example)  # the one line
    if distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * length)
    losses = []
    for _, *parts in zip(range(steps), *map(batches, processes), strict=False):
        optimizer.zero_grad()
        found = []
        for x, y in parts:
            loss = functional.cross_entropy(model(x), y)
            (loss / len(parts)).backward()
            found.append(loss.detach())
        optimizer.step()
        schedule.step()
        losses.append(torch.stack(found).mean())
    return model, torch.stack(losses)


model, losses = train([rank], given.epochs * length)
distributed.all_reduce(losses)
losses /= count
distributed.destroy_process_group()
if rank == 0:
    module = model.module.eval()
    with torch.no_grad():
        scores = module(torch.from_numpy(data.test_x).to(device)).cpu()
    right = (scores.argmax(1) == torch.from_numpy(data.test_y)).float().mean().item()
    print(f"{count} processes: loss {losses[-1]:.4f}, {right:.1%} right on held-out images")
    # BatchNorms have the statistics of their own process: the one process takes its batch in as many parts
    _, alone = train([*range(count)], given.repeated)
    apart = (losses[: len(alone)] / alone - 1).abs().max().item()
    said = "equal" if apart < 1e-4 else "NOT EQUAL"
    print(f"{said} to one process at the same global batch: losses of {len(alone)} steps are {apart:.1e} apart at most")
