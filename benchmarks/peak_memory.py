"""Peak memory of a densenet121 training step, ours and torch's.

    python benchmarks/peak_memory.py [--batch 16] [--image 224]

Each candidate runs in a fresh process: the high-water mark of its resident memory after three steps, less what it had
before the model was made (its imports and, for ours, the compiled kernels' code). Needs torch.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

STEPS = 3


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def batch_of(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((args.batch, 3, args.image, args.image)).astype(np.float32)
    return x, rng.integers(0, 1000, args.batch)


def torch_step(args: argparse.Namespace) -> None:
    import torch
    from torch_densenet import DenseNet121

    torch.set_num_threads(args.threads)
    x, labels = (torch.from_numpy(array) for array in batch_of(args))
    before = peak()
    layout = torch.channels_last if args.one == "torch channels_last" else torch.contiguous_format
    net = DenseNet121().to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(net(x.to(memory_format=layout)), labels).backward()
        optimizer.step()
    print(f"{args.one} {peak() - before:.0f}")


def own_step(args: argparse.Namespace) -> None:
    from bnfuse.runtime.artefact import load_step

    x, labels = batch_of(args)
    before = peak()
    step = load_step(args.step)
    for _ in range(STEPS):
        step(x, labels)
    print(f"{args.one} {peak() - before:.0f}")


def export_steps(args: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Compiled in processes of their own, so that no compiler's memory is counted."""
    code = (
        "import sys, bnfuse, onnx_ir as ir; from bnfuse.models import build_forward;"
        "from bnfuse.build import build_training_graph; from bnfuse.runtime import SGD, compile_step;"
        "forward = build_forward('densenet121', batch=int(sys.argv[1]), image=int(sys.argv[2]));"
        "g = ir.from_proto(build_training_graph(forward));"
        "g = bnfuse.rewrite(g, level=sys.argv[3]).model;"
        "compile_step(g, optimizer=SGD(lr=0.1, momentum=0.9), threads=int(sys.argv[4])).export(sys.argv[5])"
    )
    paths = {level: folder / f"{level}.bnf" for level in ("none", "icf")}
    for level, path in paths.items():
        sizes = [str(args.batch), str(args.image), level, str(args.threads), str(path)]
        subprocess.run([sys.executable, "-c", code, *sizes], check=True)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return torch_step(args) if args.one.startswith("torch") else own_step(args)
    common = [f"--batch={args.batch}", f"--image={args.image}", f"--threads={args.threads}"]
    with tempfile.TemporaryDirectory() as folder:
        steps = export_steps(args, Path(folder))
        candidates = [("torch eager", []), ("torch channels_last", [])]
        candidates += [(f"bnfuse {level}", [f"--step={path}"]) for level, path in steps.items()]
        results = []
        for name, more in candidates:
            command = [sys.executable, __file__, f"--one={name}", *common, *more]
            results.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    first = float(results[0].rsplit(" ", 1)[1])
    for line in results:
        name, mebibytes = line.rsplit(" ", 1)
        print(f"{name:22} {float(mebibytes):7.0f} MiB  {float(mebibytes) / first:.2f}x torch eager")
    return None


if __name__ == "__main__":
    main()
