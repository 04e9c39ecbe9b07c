"""Random convolution kernels against the numpy reference in float64: wider than the unit tests, as long as you like.

    python benchmarks/kernel_sweep.py [--kind forward|backward|all] [--count 100] [--seed 0] [--threads 2]

Every case is a random shape, window, stride, padding, dilation, grouping, slot, prologue and epilogue. Prints a line
for every case that is further from the reference than the tolerance, and exits with 1 if there was one; --only repeats
the case of that number. One in about a thousand backward cases has a ReLU mask that float32 rounding flips.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import numpy as np

from bnfuse.opset import reference
from bnfuse.opset.spec import (
    CONV_GRADS,
    MAPS_LIKE_DY,
    MAPS_LIKE_X,
    OpSpec,
    is_numbered_map,
    parse,
)
from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels.cpu.conv_backward import conv_backward
from bnfuse.runtime.kernels.cpu.conv_forward import conv_forward
from bnfuse.runtime.targets.target import CpuTarget

ACTIVATIONS = ("", "Relu", "Clip", "QuickGelu")
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    x: tuple[int, int, int, int]  # NCHW
    y: tuple[int, int, int, int]
    weight: tuple[int, int, int, int]
    attributes: dict[str, Any]
    slots: dict[str, tuple[int, int]]  # stride and offset of maps

    @property
    def spec(self) -> OpSpec:
        spec = parse(self.op)
        assert spec is not None
        return spec

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an operand, in NCHW or OIHW."""
        if name == "weight":
            return self.weight
        if name in MAPS_LIKE_DY:
            return self.y
        if name in (*MAPS_LIKE_X, "acc") or is_numbered_map(name):
            return self.x
        return (self.y if name in ("bias", "grad_a", "grad_b", "grad_p", "grad_q", "grad_w") else self.x)[1:2]


def pick(rng: np.random.Generator, *options: Any) -> Any:
    return options[rng.integers(len(options))]


def forward_op(rng: np.random.Generator) -> str:
    first = pick(rng, "", "Normalize") + pick(rng, *ACTIVATIONS)
    second = pick(rng, "", "", "Add", "AddNormalized", "SkipReluAddNormalized")
    last = pick(rng, "", "Relu") if second else ""
    return f"{first}{second}{last}Conv" + "".join(pick(rng, "", step) for step in ("Bias", "StoreInput", "Statistics"))


def backward_op(rng: np.random.Generator) -> str:
    activation = pick(rng, *ACTIVATIONS)
    core = pick(rng, *CONV_GRADS)
    way_in = pick(rng, "", "BatchNormGrad") + pick(rng, "", "Normalize") + activation
    if core == "ConvGradWeight":
        return way_in + core + pick(rng, "", "BiasGrad")
    mask = f"{activation}Grad{pick(rng, '', 'AddSkipGradient')}" if activation else ""
    reduce = pick(rng, "", "Reduce", "ReduceReduceOther", "ReduceReduceOtherReduceOther")
    steps = (pick(rng, "", "BiasGrad"), pick(rng, "", "AddGradient", "AddBatchNormGrad"), mask, reduce)
    return way_in + core + "".join(steps) + pick(rng, "", "Scale", "Accumulate")


def random_case(kind: str, rng: np.random.Generator) -> Case:
    op = forward_op(rng) if kind == "forward" else backward_op(rng)
    window = tuple(int(pick(rng, 1, 1, 2, 3, 3, 4, 5, 7, 11)) for _ in range(2))
    dilations = tuple(int(pick(rng, 1, 1, 1, 2, 3)) for _ in range(2))
    strides = tuple(int(pick(rng, 1, 1, 2, 3)) for _ in range(2))
    reach = [d * (k - 1) + 1 for k, d in zip(window, dilations, strict=True)]
    pads = tuple(int(rng.integers(0, reach[i % 2] + 1)) for i in range(4))
    size = [int(max(reach[i] - pads[i] - pads[i + 2], 1) + rng.integers(0, 40)) for i in range(2)]
    group = int(pick(rng, 1, 1, 1, 2, 3, 8))
    cin, cout = (group * int(pick(rng, 1, 2, 3, 5, 16, 17, 32, 40, 64 // group + 1, 500 // group)) for _ in range(2))
    if rng.random() < 0.2:
        group, cout = cin, cin * int(pick(rng, 1, 1, 2, 3))
    out = [(size[i] + pads[i] + pads[i + 2] - reach[i]) // strides[i] + 1 for i in range(2)]
    n = int(pick(rng, 1, 1, 2, 5))
    found = {
        "dilations": dilations,
        "group": group,
        "kernel_shape": window,
        "pads": pads,
        "strides": strides,
        "min": -0.5,
        "max": 0.75,
        "alpha": 1.702,
        "acc_start": 2,
        "acc_stop": 2 + cin,
    }
    spec = parse(op)
    assert spec is not None, op
    x, y = (n, cin, *size), (n, cout, *out)
    slots = {}
    for name in {"x", "y", "dy"} & {*spec.operands, *spec.results}:
        channels = (x if name == "x" else y)[1]
        slots[name] = (channels + int(rng.integers(5, 20)), int(rng.integers(0, 6)))
    attributes = {name: found[name] for name in spec.attributes}
    return Case(op, x, y, (cout, cin // group, *window), attributes, slots)


def errors(case: Case, rng: np.random.Generator, target: CpuTarget) -> dict[str, float]:
    """Relative error of every result."""
    operands = {}
    for name in case.spec.operands:
        value = rng.standard_normal(case.shape(name), np.float32)
        operands[name] = np.abs(value) + np.float32(0.5) if name.startswith("inv_std") else value
    attributes = dict(case.attributes)
    if "acc" in operands:
        n, c, h, w = case.x
        operands["acc"] = rng.standard_normal((n, c + 5, h, w), np.float32)
    wide = {name: value.astype(np.float64) for name, value in operands.items()}
    expected = reference.run(case.spec, wide, attributes)
    shapes = {name: value.shape for name, value in expected.items()}
    generator = conv_backward if case.spec.is_gradient else conv_forward
    found = execute.operator(generator, target, case.op, operands, shapes, attributes, case.slots)
    return {
        name: float(np.linalg.norm(found[name] - value) / (np.linalg.norm(value) + 1e-30))
        for name, value in expected.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("forward", "backward", "all"), default="all")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", type=int, help="run this case alone")
    arguments = parser.parse_args()
    target = resolve("cpu", arguments.threads)
    kinds = ("forward", "backward") if arguments.kind == "all" else (arguments.kind,)
    numbers = range(arguments.count) if arguments.only is None else (arguments.only,)
    worst, bad = 0.0, 0
    for number in numbers:
        for kind in kinds:
            rng = np.random.default_rng((arguments.seed, number))
            case = random_case(kind, rng)
            try:
                found = errors(case, rng, target)
            except Exception as error:  # a generator or the compiler failed: that is a finding, and the sweep goes on
                bad += 1
                print(f"{number} {kind}: {case}\n    {type(error).__name__}: {str(error).splitlines()[-1]}", flush=True)
                continue
            worst = max(worst, *found.values())
            if not all(error < TOLERANCE for error in found.values()):
                bad += 1
                print(f"{number} {kind}: {case}\n    {found}", flush=True)
    print(f"{len(numbers) * len(kinds)} kernels, worst error {worst:.1e}, {bad} beyond {TOLERANCE:.0e}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
