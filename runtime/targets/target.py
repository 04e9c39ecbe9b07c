"""Where kernels run."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """Where kernels run.

    On a CPU (`kind` llvm) `mcpu` is an LLVM CPU name, `lanes` the float32 lanes of a vector. On a GPU (`kind` cuda)
    `mcpu` is an architecture such as sm_90, `lanes` a warp, `threads` the multiprocessors, and `precision` is that of
    the convolutions: fp32 (three products of TF32 for one of float32), tf32, bf16 or fp16.
    """

    kind: str
    mcpu: str
    lanes: int
    threads: int
    precision: str = "fp32"

    @property
    def kernels(self) -> str:
        """The folder of the kernels for it, under runtime/kernels."""
        return "cuda" if self.kind == "cuda" else "cpu"

    @property
    def map_dtype(self) -> str:
        """The type in which feature maps are stored."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.precision, "float32")
