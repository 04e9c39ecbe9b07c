"""Training in several processes: DistributedDataParallel around a fused module.

    torchrun --nproc-per-node 2 docs/examples/ddp.py

Over gloo on CPUs, over NCCL with a GPU for each process. All begin with equal weights and see different images;
gradients are averaged while the earlier layers' are still computed. Needs torch and onnxscript: '.[torch]'.
"""

import argparse
import os

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
given = parser.parse_args()

on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if on_gpus else "gloo")

data = load_data("digits", image=given.image, channels=1)
images = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
sampler = DistributedSampler(images, seed=0)
loader = DataLoader(images, given.batch, sampler=sampler, drop_last=True)


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


torch.manual_seed(0)
width = given.width
blocks = [block(1, width), block(width, 2 * width, 2), block(2 * width, 2 * width)]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, data.classes)).to(device)
example = torch.zeros(given.batch, 1, given.image, given.image, device=device)
model = bnfuse.torch.fuse(model, example)  # the one line
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * len(loader))

for epoch in range(given.epochs):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        if step == given.steps:
            break
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

losses = loss.detach()
distributed.all_reduce(losses)
if distributed.get_rank() == 0:
    module = model.module.eval()
    with torch.no_grad():
        scores = module(torch.from_numpy(data.test_x).to(device)).cpu()
    right = (scores.argmax(1) == torch.from_numpy(data.test_y)).float().mean().item()
    count = distributed.get_world_size()
    print(f"{count} processes: loss {losses.item() / count:.4f}, {right:.1%} right on held-out images")
distributed.destroy_process_group()
