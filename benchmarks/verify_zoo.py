"""Verify every network of the zoo, at every level, in onnxruntime and compiled.

    python benchmarks/verify_zoo.py [NAME ...] [--level L] [--runtime ort|tvm]

Small images. One line for each rewrite: the worst tensor's error, its tolerance (docs/numerics.md), and the BNs that
stayed unfused. "?" is a graph that rounding noise moves too far for a verdict. Exits with 1 where one says no.
"""

from __future__ import annotations

import argparse
import sys
import time

import onnx_ir as ir

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.models import MODELS, build_forward
from bnfuse.passes import LEVELS
from bnfuse.verifying.verdict import is_wrong

SMALL = ("densenet40", "resnet20", "resnet56")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--runtime", action="append", choices=("ort", "tvm"))
    parser.add_argument("--level", action="append", choices=LEVELS)
    args = parser.parse_args()
    failures = 0
    for name in args.names:
        image = 32 if name in SMALL else 64
        forward = build_forward(name, batch=args.batch, image=image, classes=10)
        model = ir.from_proto(build_training_graph(forward))
        for level in args.level or LEVELS:
            fused = bnfuse.rewrite(model, level=level)
            for runtime in args.runtime or ("ort", "tvm"):
                start = time.perf_counter()
                found = bnfuse.verify(model, fused.model, runtime=runtime)
                wrong = is_wrong(found)
                failures += wrong
                said, worst = "yes" if found.equal else "NO" if wrong else "?", found.worst
                print(
                    f"{said:3} {name:16} {level:5} {runtime}  {worst.error:.1e} of "
                    f"{worst.tolerance:.1e}  {worst.tensor}  unfused {len(fused.report.unfused)}  "
                    f"{time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
