"""A timm model, fine-tuned on a folder of images in a plain torch loop, and exported to ONNX for inference.

    python docs/examples/timm_loop.py --data photos --model resnet18 --pretrained

The folder has `train/` and `val/` with a folder of images for each class. Without --data the handwritten digits are
written out as one, and a small model is trained from scratch. Needs torch, onnxscript ('.[torch]'), timm and
torchvision.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import bnfuse.torch
from bnfuse.data import load_data


def digits(folder: Path) -> Path:
    data = load_data("digits")
    for part, (images, labels) in {"train": (data.train_x, data.train_y), "val": (data.test_x, data.test_y)}.items():
        for k, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / part / str(label) / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((255 * image[0]).astype(np.uint8)).save(path)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--image", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of an epoch, at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--export", default="model.onnx")
    given = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = given.data or digits(Path(tempfile.mkdtemp()))
    classes = len(ImageFolder(folder / "train").classes)
    model = timm.create_model(given.model, pretrained=given.pretrained, num_classes=classes).to(device)
    config = {**resolve_model_data_config(model), "input_size": (3, given.image, given.image)}
    changes = create_transform(**config, is_training=True, scale=(0.6, 1.0), hflip=0.5 if given.data else 0.0)
    train = ImageFolder(folder / "train", changes)
    held_out = ImageFolder(folder / "val", create_transform(**config))
    loader = DataLoader(train, given.batch, shuffle=True, drop_last=True, num_workers=given.workers)

    model = bnfuse.torch.fuse(model, torch.zeros(given.batch, *config["input_size"], device=device))  # the one line
    average = ModelEmaV3(model, decay=0.99, use_warmup=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    updates = given.epochs * min(len(loader), given.steps or len(loader))
    schedule = CosineLRScheduler(optimizer, updates, warmup_t=updates // 10, warmup_lr_init=1e-5, t_in_epochs=False)

    update = 0
    for _ in range(given.epochs):
        for step, (images, labels) in enumerate(loader):
            if step == given.steps:
                break
            schedule.step_update(update)
            scores = model(images.to(device))
            loss = functional.cross_entropy(scores, labels.to(device), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update += 1
            average.update(model, update)

    best = timm.create_model(given.model, num_classes=classes).eval()
    best.load_state_dict(average.module.state_dict())
    example, sizes = torch.zeros(2, *config["input_size"]), {0: torch.export.Dim("batch")}
    names = {"input_names": ["images"], "output_names": ["scores"]}
    torch.onnx.export(best, (example,), given.export, dynamic_shapes=(sizes,), verbose=False, **names)
    session = onnxruntime.InferenceSession(given.export, providers=["CPUExecutionProvider"])
    right = count = 0
    for images, labels in DataLoader(held_out, given.batch, num_workers=given.workers):
        (scores,) = session.run(None, {"images": images.numpy()})
        right, count = right + int((scores.argmax(1) == labels.numpy()).sum()), count + len(labels)
    print(f"loss {loss.item():.4f}, {right / count:.1%} right on held-out images, by {given.export} in onnxruntime")


if __name__ == "__main__":
    main()
