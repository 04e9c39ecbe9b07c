"""The pass reference from the passes' docstrings: `python -m bnfuse.passes.pages > docs/passes.md`."""

from __future__ import annotations

import importlib
import re

PAGES = {
    "Removal": "removal.remove",
    "Moving averages": "sampling.decay",
    "Virtual samples": "sampling.virtual",
    "Sampled statistics": "sampling.sample",
    "L1BN and RBN": "sampling.baseline_statistics",
    "Local statistics": "sampling.local",
    "SyncBN": "sampling.sync",
    "Canonical form": "dialect.canonical",
    "Canonical form, channel shuffles": "dialect.shuffle",
    "Canonical form, Splits": "dialect.splits",
    "Canonical form, stacks of maps": "dialect.stacks",
    "Canonical form, BatchNorms of rows": "dialect.rows",
    "Canonical form, Resize": "dialect.resample",
    "Pool first": "fusion.pool_first",
    "RCF and the forward half of BNFF": "fusion.pointwise",
    "Bias before a BN": "removal.drop_bias",
    "MVF": "fission.batch_norm",
    "BNFF, splitting the gradient": "fission.batch_norm_grad",
    "BNFF, GroupNorms": "fission.group_norm",
    "BNFF, sums of images": "fusion.image_sums",
    "BNFF, layer scales": "fusion.layer_scale",
    "BNFF, gates": "fusion.gate",
    "BNFF, sums behind gates": "fusion.gate_sums",
    "BNFF, sums of gradients": "fusion.gradient_sum",
    "BNFF, masks and reductions": "fusion.mask",
    "BNFF, masks of gradients that others read": "fusion.shared_mask",
    "BNFF, differences": "fusion.difference",
    "BNFF, sums of many": "fusion.long_sum",
    "BNFF, sums that few read": "fusion.sum_in",
    "BNFF, a Relu in front of a BN": "fusion.relu_out",
    "BNFF, a sum and its mask": "fusion.sum_mask",
    "BNFF, the scale of a sampled gradient": "fusion.scale",
    "BNFF, statistics": "fusion.statistics",
    "BNFF, input gradients": "fusion.batch_norm_grad",
    "ICF, what sinks": "concat.forward",
    "ICF, BN before a Concat": "concat.sink",
    "ICF, BN before a Split": "concat.split",
    "ICF, BN before a channel shuffle": "concat.shuffle",
    "ICF, what comes back": "concat.backward",
    "ICF, masks behind the Split of a Concat's gradient": "concat.mask",
    "ICF, a BN behind one operand of a Concat": "concat.part",
    "ICF, statistics": "concat.statistics",
    "ICF, gradients": "concat.gradient",
}

HEAD = """# Passes

What each pass matches, what it makes of it, and when it refuses. Every refusal is in the rewrite's report with its node
and reason. `bnfuse rewrite --level` takes none, rcf, mvf, bnff or icf; each level includes the ones before it:

"""


def page() -> str:
    """Write the text of docs/passes.md."""
    pipeline = importlib.import_module("bnfuse.passes.pipeline").__doc__ or ""
    levels = "\n".join(line for line in pipeline.splitlines() if line.startswith("    "))
    parts = [HEAD + levels]
    for title, name in PAGES.items():
        module = importlib.import_module(f"bnfuse.passes.{name}")
        parts.append(f"## {title}\n\n`passes/{name.replace('.', '/')}.py`\n\n{(module.__doc__ or '').strip()}")
    text = "\n\n".join(parts) + "\n"
    return f"{text}\n{definitions(text)}"


def definitions(text: str) -> str:
    """Where the citations of a page lead, as Markdown's link definitions, a line each."""
    keys = sorted(set(re.findall(r"\[([A-Z][a-z]+\d\d)\]", text)))
    return "".join(f"[{key}]: papers.md#{key.lower()}\n" for key in keys)


if __name__ == "__main__":
    print(page(), end="")
