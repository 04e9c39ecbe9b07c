"""Registering operators leaves onnx's own modules usable."""

import subprocess
import sys

CODE = "from bnfuse.opset.schemas import register_training_ops as r; r(); import bnfuse.runtime.lowering.values"


def test_the_reference_evaluator_loads_after_the_training_operators_are_known():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
