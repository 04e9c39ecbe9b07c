"""A network of each family of torchvision and timm, at small batches and images."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

CLASSES = 10
PIXEL_CLASSES = 5
LOSS = "cross-entropy"
AUXILIARY = {  # with the weights that the papers give them
    "googlenet_aux": "cross-entropy@0 + 0.3*cross-entropy@1 + 0.3*cross-entropy@2",
    "inception_v3_aux": "cross-entropy@0 + 0.4*cross-entropy@1",
}
Table = dict[str, tuple[Any, tuple[tuple[int, ...], ...], str]]

TORCHVISION = (
    *("alexnet", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn", "resnet18", "resnet34", "resnet50"),
    *("resnext50_32x4d", "wide_resnet50_2", "densenet121", "densenet161", "mobilenet_v2", "mobilenet_v3_small"),
    *("mobilenet_v3_large", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "mnasnet0_5", "mnasnet1_0"),
    *("efficientnet_b0", "efficientnet_v2_s", "regnet_x_400mf", "regnet_y_400mf", "squeezenet1_0", "squeezenet1_1"),
    *("convnext_tiny", "googlenet", "googlenet_aux", "inception_v3", "inception_v3_aux"),
)
SEGMENTATION = {
    "fcn_resnet50": "fcn_resnet50",
    "deeplabv3_mobilenet": "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50": "deeplabv3_resnet50",
    "lraspp": "lraspp_mobilenet_v3_large",
}
TIMM = (
    *("cspdarknet53", "cspresnet50", "dpn68", "hrnet_w18_small", "ghostnet_100", "lcnet_050"),
    *("mobilenetv3_small_100", "mobilenetv4_conv_small", "repvgg_a0", "res2net50_26w_4s", "seresnet18", "resnest14d"),
    *("tf_efficientnet_b0", "vovnet39a", "xception41", "inception_v4", "inception_resnet_v2", "resnetv2_50"),
    *("tresnet_m", "eca_resnet33ts", "coatnet_0_rw_224", "levit_128s", "mobilevit_s", "convmixer_768_32"),
    *("mobileone_s0", "densenetblur121d", "resnet50_gn", "convnextv2_atto", "dm_nfnet_f0", "nf_resnet26"),
    *("spnasnet_100", "gernet_s", "efficientnet_lite0", "mobilenetv1_100", "botnet26t_256"),
    # further families
    *("skresnet18", "regnetz_c16", "hardcorenas_a", "fbnetc_100", "rexnet_100", "edgenext_xx_small"),
    *("efficientformer_l1", "poolformer_s12", "cs3darknet_s", "selecsls42b", "dla34", "pvt_v2_b0"),
)
IMAGES = {  # of those that do not take 64x64
    "alexnet": 224, "vgg11_bn": 224, "vgg16_bn": 224, "googlenet_aux": 224, "inception_v3": 96, "inception_v3_aux": 299,
    "xception41": 96, "hrnet_w18_small": 96, "inception_v4": 128, "inception_resnet_v2": 128, "coatnet_0_rw_224": 224,
    "levit_128s": 224, "botnet26t_256": 256, "efficientformer_l1": 224, "pvt_v2_b0": 224,
}  # fmt: skip


def image_shape(name: str) -> tuple[tuple[int, ...], ...]:
    """Give the shape of a batch: 4 images, 2 where they are large."""
    size = IMAGES.get(name, 64)
    return ((2 if size >= 200 else 4, 3, size, size),)


@functools.cache
def operators_of_torchvision() -> Any:
    """Declare its own operators, where they were built for another torch and do not load: only its modules run."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def import_torchvision() -> types.ModuleType:
    """Import it, without its compiled operators where they do not load."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        operators_of_torchvision()
        return importlib.import_module("torchvision")


def torchvision_network(name: str) -> Any:
    """Make a classifier of torchvision; `_aux` keeps the auxiliary heads."""
    extra = {}
    if name.startswith(("googlenet", "inception_v3")):
        extra = {"aux_logits": name.endswith("_aux"), "init_weights": False}
    models = import_torchvision().models
    return getattr(models, name.removesuffix("_aux"))(weights=None, num_classes=CLASSES, **extra)


def segmentation_network(name: str) -> Any:
    """Make a segmenter of torchvision that gives the scores of its main head."""
    from torch import nn

    models = import_torchvision().models.segmentation
    network = getattr(models, name)(weights=None, weights_backbone=None, num_classes=PIXEL_CLASSES)

    class MainHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, images):
            return self.network(images)["out"]

    return MainHead()


def timm_network(name: str) -> Any:
    """Make a classifier of timm."""
    import_torchvision()  # which timm imports
    return importlib.import_module("timm").create_model(name, pretrained=False, num_classes=CLASSES)


def torchvision_networks() -> Table:
    """List the classifiers of torchvision."""
    return {
        f"tv_{name}": (functools.partial(torchvision_network, name), image_shape(name), AUXILIARY.get(name, LOSS))
        for name in TORCHVISION
    }


def segmentation_networks() -> Table:
    """List the segmenters of torchvision."""
    return {
        f"tv_{name}": (functools.partial(segmentation_network, full), image_shape(name), "cross-entropy")
        for name, full in SEGMENTATION.items()
    }


def timm_networks() -> Table:
    """List the classifiers of timm."""
    return {
        f"timm_{name}": (functools.partial(timm_network, name), image_shape(name), "cross-entropy") for name in TIMM
    }
