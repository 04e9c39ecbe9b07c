"""The pass reference from the passes' docstrings: `python -m bnfuse.passes.pages > docs/passes.md`."""

from __future__ import annotations

import importlib

PAGES = {
    "Removal": "remove",
    "Moving averages": "decay",
    "Virtual samples": "virtual",
    "Sampled statistics": "sample",
    "L1BN and RBN": "baseline_statistics",
    "Local statistics": "local",
    "Canonical form": "canonical",
    "Pool first": "pool_first",
    "RCF and the forward half of BNFF": "fuse_map",
    "Bias before a BN": "drop_bias",
    "MVF": "batch_norm",
    "BNFF, splitting the gradient": "batch_norm_grad",
    "BNFF, sums of gradients": "fuse_gradient_sum",
    "BNFF, masks and reductions": "fuse_mask",
    "BNFF, the scale of a sampled gradient": "fuse_scale",
    "BNFF, statistics": "fuse_statistics",
    "BNFF, input gradients": "fuse_batch_norm_grad",
    "ICF, BN before a Concat": "concat_sink",
    "ICF, statistics": "concat_statistics",
    "ICF, gradients": "concat_gradient",
}

HEAD = """# Passes

What each pass matches, what it makes of it, and when it refuses. Every refusal is in the rewrite's report with its node
and reason. `bnfuse rewrite --level` takes none, rcf, mvf, bnff or icf; each level includes the ones before it:

"""


def page() -> str:
    """The text of docs/passes.md."""
    manager = importlib.import_module("bnfuse.passes.pipeline").__doc__ or ""
    levels = "\n".join(line for line in manager.splitlines() if line.startswith("    "))
    parts = [HEAD + levels]
    for title, name in PAGES.items():
        module = importlib.import_module(f"bnfuse.passes.{name}")
        parts.append(f"## {title}\n\n`passes/{name}.py`\n\n{(module.__doc__ or '').strip()}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
