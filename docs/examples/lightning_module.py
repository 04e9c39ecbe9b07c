"""A LightningModule whose network is fused; the trainer is as ever.

    python docs/examples/lightning_module.py

Needs torch, onnxscript ('.[torch]') and pytorch-lightning.
"""

import argparse

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bnfuse.torch
from bnfuse.data import load_data


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Digits(lightning.LightningModule):
    def __init__(self, width: int, batch: int, image: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        blocks = [block(1, width), block(width, 2 * width, 2), block(2 * width, 2 * width)]
        self.network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
        self.network = bnfuse.torch.fuse(self.network, torch.zeros(batch, 1, image, image))  # the one line

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, labels = batch
        self.log("right", (self.network(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


parser = argparse.ArgumentParser()
parser.add_argument("--image", type=int, default=16)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=float, default=1.0, help="of an epoch: a share, or a number above 1")
given = parser.parse_args()

lightning.seed_everything(0, verbose=False)
data = load_data("digits", image=given.image, channels=1)
train = TensorDataset(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
held_out = TensorDataset(torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))
limit = given.steps if given.steps <= 1 else int(given.steps)
trainer = lightning.Trainer(
    max_epochs=given.epochs,
    limit_train_batches=limit,
    gradient_clip_val=5.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(
    Digits(given.width, given.batch, given.image),
    DataLoader(train, given.batch, shuffle=True, drop_last=True),
    DataLoader(held_out, given.batch),
)
values = trainer.callback_metrics
print(f"loss {values['loss'].item():.4f}, {values['right'].item():.1%} right on held-out images")
