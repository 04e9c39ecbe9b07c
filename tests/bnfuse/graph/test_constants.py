"""What follows from constants: small results are computed, absurd ones refused before they are made."""

import numpy as np
import onnx_ir as ir
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.constants import evaluate


def test_a_node_of_constants_is_computed():
    node = ir.node("Add", [ir.val("a"), ir.val("b")], outputs=[ir.val("y")], name="sum")
    (found,) = evaluate(node, [np.float32([1, 2]), np.float32([3, 4])], 17)
    np.testing.assert_array_equal(found, np.float32([4, 6]))


def test_a_result_of_absurd_size_is_refused_with_the_file_and_the_node():
    node = ir.node("Tile", [ir.val("x"), ir.val("times")], outputs=[ir.val("y")], name="big")
    with pytest.raises(BnfuseError, match=r"train\.onnx: node 'big' \(Tile\) makes a constant of 20000000000 elements"):
        evaluate(node, [np.int64([1]), np.int64([20_000_000_000])], 17, "train.onnx")
