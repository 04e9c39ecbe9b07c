"""The two sides of a convolution, and which maps of an operator lie there.

Every operator with a weight is a step of one convolution, from the map at its input to the map at its output:

    core                         at the input    at the output
    Conv                         x               y                  goes towards the output
    ConvGradInput, ConvGrad      x, dx           dy                 goes towards the input
    ConvTranspose                y               x                  goes towards the input
    ConvTransposeGradInput       dy              x, dx              goes towards the output
    ConvGradWeight               x               dy                 sums over both
    ConvTransposeGradWeight      dy              x                  sums over both

So a transposed convolution runs on the kernels of the gradients, and its input gradient on the forward one: they ask
here for what they read. Its weight [C, M/group, kH, kW] is that convolution's, OIHW.
"""

from __future__ import annotations

from bnfuse.opset.spec import MAPS_LIKE_DY, OpSpec

TOWARDS_OUTPUT = ("Conv", "ConvTransposeGradInput")
TOWARDS_INPUT = ("ConvGrad", "ConvGradInput", "ConvGradWeight", "ConvTranspose", "ConvTransposeGradWeight")
OF_RESULT = ("y", "grad_gate", *MAPS_LIKE_DY)  # maps like an operator's result; all others are like its x


def sides(spec: OpSpec) -> tuple[str, str]:
    """Name the map at the input of the convolution (or pooling), and the one at its output."""
    result = "dy" if spec.is_gradient else "y"
    return (result, "x") if spec.is_transposed else ("x", result)
