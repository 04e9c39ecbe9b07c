"""Poolings of any window against torch in float64: values and the gradient of the input.

    python benchmarks/poolings.py [--cases 500] [--seed 0] [--compiled 20]

Kernel, strides, even and uneven padding, dilations, ceil_mode, count_include_pad and auto_pad are drawn. Each case is
equal in onnxruntime and in the numpy reference and has kernels for the CPU and a GPU, or is refused by `build`; the
first ones are compiled for the CPU and run, too. Prints how many of each, by reason, and what is wrong; the exit status
is 1 where anything is. Needs torch; a minute for 500 cases and three seconds for each that is compiled.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from pooling_cases import draw, judge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", type=int, default=20)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    wrong = []
    for number in range(args.cases):
        case = draw(rng)
        outcome = judge(case, number, compiled=number < args.compiled)
        counts[case.op, general(outcome)] += 1
        if outcome.startswith("WRONG"):
            wrong.append(f"{case}: {outcome}")
    for (op, outcome), count in sorted(counts.items(), key=lambda entry: (entry[0][0], -entry[1])):
        print(f"{count:5}  {op:12} {outcome}")
    print(f"{sum(counts.values()):5}  in all, {len(wrong)} wrong", *wrong, sep="\n")
    return 1 if wrong else 0


def general(outcome: str) -> str:
    """The outcome without this case's node and numbers."""
    text = re.sub(r"node '\w+' \(\w+\) ", "", outcome)
    return re.sub(r"\[[\d, ]*\]|\d+(x\d+)+", "…", text)


if __name__ == "__main__":
    sys.exit(main())
