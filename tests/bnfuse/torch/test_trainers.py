"""A fused module in trainers of others: losses and weights follow those of a plain loop."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]

STEPS = 3


@pytest.fixture
def plain():
    """Losses and weights of torch's own loop, in float64."""
    import torch
    from fused_networks import doubled, images, loss_of, made, state

    module, x = doubled(made()), images().double()
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(module, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state(module)


def check(fused, losses, plain):
    from fused_networks import distance, state

    assert losses == pytest.approx(plain[0], rel=1e-5)
    assert distance(state(fused), plain[1]) < 1e-5


@pytest.mark.accelerate
def test_accelerate(fused, plain):
    import torch
    from accelerate import Accelerator
    from fused_networks import images, loss_of, made

    fused.load_state_dict(made().state_dict())
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(fused, torch.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, images())
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    check(fused, losses, plain)
    assert accelerator.unwrap_model(model) is fused


@pytest.mark.lightning
def test_lightning(fused, plain, tmp_path):
    import pytorch_lightning as lightning
    import torch
    from fused_networks import images, labels, made

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = fused, []

        def training_step(self, batch, _):
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    fused.load_state_dict(made().state_dict())
    model, data = Trained(), torch.utils.data.TensorDataset(images(), labels())
    trainer = lightning.Trainer(
        max_epochs=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    check(fused, model.losses, plain)
