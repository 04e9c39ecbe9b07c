"""A training loop in torch, as people write it, with one line that makes its steps faster.

    python docs/examples/torch_loop.py            # plain torch
    python docs/examples/torch_loop.py --fused    # the same loop, the module's forward and backward by bnfuse

Trains a small DenseNet on the handwritten digits, enlarged to --image pixels. Needs torch and onnxscript: '.[torch]'.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional

import bnfuse.torch
from bnfuse.data import load_data


class Layer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(self.relu(self.norm(x)))], 1)


def densenet(growth: int, depth: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(1, 2 * growth, 3, padding=1, bias=False)]
    channels = 2 * growth
    for block in range(3):
        parts += [Layer(channels + k * growth, growth) for k in range(depth)]
        channels += depth * growth
        if block < 2:
            half = nn.Conv2d(channels, channels // 2, 1, bias=False)
            parts += [nn.BatchNorm2d(channels), nn.ReLU(), half, nn.AvgPool2d(2)]
            channels //= 2
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*parts, *head)


parser = argparse.ArgumentParser()
parser.add_argument("--fused", action="store_true")
parser.add_argument("--image", type=int, default=32)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--steps", type=int, default=100)
given = parser.parse_args()

torch.manual_seed(0)
data = load_data("digits", image=given.image, channels=1)
images, labels = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
model = densenet(growth=16, depth=given.depth)
if given.fused:
    model = bnfuse.torch.fuse(model, images[: given.batch])  # the one line
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=given.steps)

start = time.perf_counter()
for _ in range(given.steps):
    chosen = torch.randint(len(images), (given.batch,))
    loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
seconds = (time.perf_counter() - start) / given.steps

model.eval()
with torch.no_grad():
    scores = model(torch.from_numpy(data.test_x))
right = (scores.argmax(1) == torch.from_numpy(data.test_y)).float().mean().item()
print(f"loss {loss.item():.4f}, {right:.1%} right on held-out images, {1e3 * seconds:.1f} ms a step")
