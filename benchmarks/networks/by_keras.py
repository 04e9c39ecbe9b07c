"""Exports networks of Keras by tf2onnx: `python by_keras.py FOLDER IMAGE BATCH`, in a Python that has both.

Each as trained (training=True, which keeps its BatchNorms) and as deployed (training=False, which folds them away).
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf
import tf2onnx

NETWORKS = ("EfficientNetB0", "MobileNetV2", "ResNet50")


def main() -> None:
    """Export all networks."""
    folder, image, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for name in NETWORKS:
        network = getattr(keras.applications, name)(
            weights=None, input_shape=(image, image, 3), classes=10, classifier_activation=None
        )
        rng = np.random.default_rng(0)
        for layer in network.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.set_weights([rng.uniform(0.5, 1.5, weight.shape) for weight in layer.get_weights()])
            elif isinstance(layer, keras.layers.Dropout):
                layer.rate = 0.0
        signature = [tf.TensorSpec((batch, image, image, 3), tf.float32, name="x")]
        for mode, training in (("trained", True), ("deployed", False)):
            function = tf.function(lambda x, net=network, on=training: net(x, training=on), input_signature=signature)
            path = str(Path(folder) / f"{name}-{mode}.onnx")
            tf2onnx.convert.from_function(function, input_signature=signature, opset=17, output_path=path)


if __name__ == "__main__":
    main()
