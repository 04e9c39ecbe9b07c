"""Exports networks of PaddlePaddle by paddle2onnx: `python by_paddle.py FOLDER IMAGE BATCH`, where both are."""

import sys
from pathlib import Path

import paddle

NETWORKS = ("mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_25")


def main() -> None:
    """Export all networks."""
    folder, image, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    paddle.set_device("cpu")
    for name in NETWORKS:
        network = getattr(paddle.vision.models, name)(num_classes=10)
        network.eval()
        spec = [paddle.static.InputSpec([batch, 3, image, image], "float32", "x")]
        paddle.onnx.export(network, str(Path(folder) / f"{name}-paddle"), input_spec=spec, opset_version=17)


if __name__ == "__main__":
    main()
