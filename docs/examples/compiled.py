"""torch.compile with bnfuse as its backend: what dynamo cuts out of the model runs as a fused step.

    python docs/examples/compiled.py

bnfuse has to be installed: that is how torch knows the backend. Needs torch and onnxscript: '.[torch]'.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from bnfuse.data import load_data


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + x)


parser = argparse.ArgumentParser()
parser.add_argument("--image", type=int, default=16)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--depth", type=int, default=3)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, help="of an epoch, at most")
given = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = load_data("digits", image=given.image, channels=1)
images = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
loader = DataLoader(images, given.batch, shuffle=True, drop_last=True)

width = given.width
stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
blocks = [Residual(width) for _ in range(given.depth)]
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, data.classes)]
model = nn.Sequential(*stem, *blocks, *head).to(device)
model = torch.compile(model, backend="bnfuse")  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * len(loader))

times = []
for _ in range(given.epochs):
    for step, (x, y) in enumerate(loader):
        if step == given.steps:
            break
        start = time.perf_counter()
        loss = functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        times.append(time.perf_counter() - start)

model.eval()
with torch.no_grad():
    scores = model(torch.from_numpy(data.test_x).to(device)).cpu()
right = (scores.argmax(1) == torch.from_numpy(data.test_y)).float().mean().item()
median = sorted(times)[len(times) // 2]
print(f"loss {loss.item():.4f}, {right:.1%} right on held-out images, {1e3 * median:.1f} ms a step")
