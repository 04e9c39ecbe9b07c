"""Every kind of kernel, once: the lowering names them from here, and whoever is to make one finds its generator.

Nothing of a target's kernels is imported before one is made: the names of a step for a GPU are known where TVM is not.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from bnfuse.runtime.kernels.kernel import Choice, Kernel, Problem
from bnfuse.runtime.targets.target import Target

KERNELS = "bnfuse.runtime.kernels"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of kernel: `function` of `module`, by the same names in the folder of each target that has it (`on`).

    The functions of all targets take the same arguments, of which one is the target.
    """

    module: str
    function: str
    on: tuple[str, ...] = ("cpu", "cuda")

    def __str__(self) -> str:
        return self.function

    def generator(self, target: str) -> Callable[..., Kernel]:
        """Give what makes the kernels of this kind for a target, by the name of its folder."""
        return getattr(self._module(target), self.function)  # type: ignore[no-any-return]

    def choices(self, target: str) -> Callable[..., tuple[Choice, ...]] | None:
        """Give what tells all ways to make one; None where its module knows one way only."""
        return getattr(self._module(target), "choices", None)

    def takes_image_sums(self, problem: Problem, target: Target) -> bool:
        """Tell whether a kernel of this kind takes the sums over images of a problem, which a sweep has to otherwise.

        A module that knows says so by a function of this name.
        """
        able = getattr(self._module(target.backend), "takes_image_sums", None)
        return able is not None and bool(able(problem, target))

    def _module(self, target: str) -> object:
        assert target in self.on, f"no {self} for {target}"
        return importlib.import_module(f"{KERNELS}.{target}.{self.module}")


CONV_FORWARD = Kind("conv_forward", "conv_forward")
CONV_BACKWARD = Kind("conv_backward", "conv_backward")
PACK_WEIGHTS = Kind("weights", "pack_weights", on=("cuda",))

POINTWISE_FORWARD = Kind("pointwise", "pointwise_forward")
POINTWISE_BACKWARD = Kind("pointwise", "pointwise_backward")
POOL_FORWARD = Kind("pool", "pool_forward")
POOL_BACKWARD = Kind("pool", "pool_backward")
SUM_MAPS = Kind("sum_maps", "sum_maps")
IMAGE_SUMS = Kind("images", "image_sums")
TAPS = Kind("taps", "taps")
RESAMPLE_FORWARD = Kind("resample", "resample_forward")
RESAMPLE_BACKWARD = Kind("resample", "resample_backward")
GENERIC = Kind("generic", "generic")
CHAIN = Kind("chain", "chain")

GEMM = Kind("dense", "gemm")
SOFTMAX_LOSS = Kind("loss", "softmax_loss")
SOFTMAX_LOSS_GRAD = Kind("loss", "softmax_loss_grad")

BATCH_NORM_STATISTICS = Kind("norm", "batch_norm_statistics")
BATCH_NORM_GRAD_REDUCE = Kind("norm", "batch_norm_grad_reduce")
LAYER_NORM = Kind("layer_norm", "layer_norm")
LAYER_NORM_GRAD = Kind("layer_norm", "layer_norm_grad")
COEFFICIENTS = Kind("coefficients", "coefficients")  # all that is computed per channel
GROUP_NORM_STATISTICS = Kind("group_norm", "group_norm_statistics")
GROUP_NORM_GRAD_REDUCE = Kind("group_norm", "group_norm_grad_reduce")
GROUP_COEFFICIENTS = Kind("group_norm", "group_coefficients")
SAMPLED_STATISTICS = Kind("norm_sampled", "sampled_statistics")
POINT_STATISTICS = Kind("norm_sampled", "point_statistics")
ADD_SAMPLED = Kind("norm_sampled", "add_sampled")
ADD_AT_POINTS = Kind("norm_sampled", "add_at_points")
L1_STATISTICS = Kind("norm_baseline", "l1_statistics")
L1_GRAD_INPUT = Kind("norm_baseline", "l1_grad_input")
RANGE_STATISTICS = Kind("norm_baseline", "range_statistics")
RANGE_GRAD_INPUT = Kind("norm_baseline", "range_grad_input")

NCHW_TO_NHWC = Kind("layout", "nchw_to_nhwc")
NHWC_TO_NCHW = Kind("layout", "nhwc_to_nchw")
COPY_MAP = Kind("layout", "copy_map")
COPY = Kind("layout", "copy")

UPDATE = Kind("optim", "update")  # of an UpdateProblem, which names the optimiser
GRADIENT_NORM = Kind("optim", "gradient_norm")
ACCUMULATE = Kind("optim", "accumulate")
AVERAGE = Kind("optim", "average")
