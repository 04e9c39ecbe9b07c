"""A U-Net that gives a class for each pixel, fused, with a loss of torch's own making.

    python docs/examples/segmentation.py

Pixels of ink have the class of their digit, the others the class "background". The loss is cross-entropy and Dice, in
torch. Needs torch and onnxscript: '.[torch]'.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bnfuse.torch
from bnfuse.data import load_data

BACKGROUND, CLASSES = 10, 11


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList(map(convolutions, [1, *widths], widths[:-1]))
        self.deep = convolutions(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in widths[-2::-1])
        self.out = nn.ModuleList(convolutions(2 * n, n) for n in widths[-2::-1])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layers in self.down:
            kept.append(layers(x))
            x = functional.max_pool2d(kept[-1], 2)
        x = self.deep(x)
        for up, layers in zip(self.up, self.out, strict=True):
            x = layers(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


def masks(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.where(images[:, 0] > 0.3, labels[:, None, None], BACKGROUND)


def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    shares, truth = scores.softmax(1), functional.one_hot(wanted, CLASSES).movedim(3, 1).float()
    both = (shares * truth).sum((0, 2, 3))
    dice = (2 * both + 1) / (shares.sum((0, 2, 3)) + truth.sum((0, 2, 3)) + 1)
    return functional.cross_entropy(scores, wanted) + 1 - dice.mean()


parser = argparse.ArgumentParser()
parser.add_argument("--image", type=int, default=16)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--depth", type=int, default=2, help="how often the image is halved")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, help="of an epoch, at most")
given = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = load_data("digits", image=given.image, channels=1)
images, test_images = torch.from_numpy(data.train_x), torch.from_numpy(data.test_x).to(device)
train = TensorDataset(images, masks(images, torch.from_numpy(data.train_y)))
loader = DataLoader(train, given.batch, shuffle=True, drop_last=True)

model = UNet(given.width, given.depth).to(device)
model = bnfuse.torch.fuse(model, images[: given.batch].to(device))  # the one line
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(given.epochs):
    for step, (x, y) in enumerate(loader):
        if step == given.steps:
            break
        loss = loss_of(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval()
wanted = masks(test_images, torch.from_numpy(data.test_y).to(device))
with torch.no_grad():
    found = model(test_images).argmax(1)
ink = wanted != BACKGROUND
shares = [((found == k) & (wanted == k)).sum() / ((found == k) | (wanted == k)).sum() for k in range(CLASSES)]
right = (found == wanted)[ink].float().mean().item()
print(f"loss {loss.item():.4f}, mean IoU {torch.stack(shares).mean().item():.3f}, {right:.1%} of the ink right")
