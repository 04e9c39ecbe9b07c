"""A loop of Hugging Face's accelerate around a fused module, with gradients accumulated over two batches.

    python docs/examples/accelerate_loop.py
    accelerate launch --num_processes 2 docs/examples/accelerate_loop.py    # on two GPUs

Needs torch, onnxscript ('.[torch]') and accelerate.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bnfuse.torch
from bnfuse.data import load_data

parser = argparse.ArgumentParser()
parser.add_argument("--image", type=int, default=16)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, help="of an epoch, at most")
given = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
data = load_data("digits", image=given.image, channels=1)
train = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
held_out = TensorDataset(torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


width = given.width
blocks = [block(1, width), block(width, 2 * width, 2), block(2 * width, 2 * width)]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, data.classes))
model = model.to(accelerator.device)
example = torch.zeros(given.batch, 1, given.image, given.image, device=accelerator.device)
model = bnfuse.torch.fuse(model, example)  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, train, held_out = accelerator.prepare(
    model,
    optimizer,
    DataLoader(train, given.batch, shuffle=True, drop_last=True),
    DataLoader(held_out, given.batch),
)

for _ in range(given.epochs):
    model.train()
    for step, (images, labels) in enumerate(train):
        if step == given.steps:
            break
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

model.eval()
right = []
with torch.no_grad():
    for images, labels in held_out:
        right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
loss = accelerator.reduce(loss.detach(), "mean")
accelerator.print(f"loss {loss.item():.4f}, {torch.cat(right).float().mean().item():.1%} right on held-out images")
