"""What statistics of few images cost: resnet20 on Fashion-MNIST by 4 ranks of 8 images, SyncBN and its cheaper forms.

    python benchmarks/ranks_accuracy.py --out accuracy.jsonl            # 8 forms, 3 seeds; again: what is missing
    python benchmarks/ranks_accuracy.py --out accuracy.jsonl --ranks 4  # the same by mpirun
    python benchmarks/ranks_accuracy.py --out accuracy.jsonl --show     # a table

sync     statistics of all 32 images
local    those of a rank's 8, as under DistributedDataParallel
fs       of a patch of every rank's maps
ranks    of the first one or two ranks' images (batch sampling over ranks, [Chen18], section 4.3)
vdn      of virtual samples, which all ranks draw alike; fs+vdn: of both

By default one process trains with all 32 images, whose statistics it takes as the ranks would: of all, of groups of 8,
of a run of 8 or 16. Four ranks do the same but for the order of sums (ranks_equal.py), and far slower where they
share a core. fashion_accuracy.py says how they train. Ranks need bnfuse[mpi].
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from fashion_accuracy import IMAGE, Line, lines_of, parser_of, run_missing, train

import bnfuse
from bnfuse.build import build_training_graph
from bnfuse.models import build_forward

RANKS, EACH = 4, 8
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # arguments of rewrite: of a rank, of one process
    "sync": ({"sync": True}, {}),
    "local": ({}, {"local_bn": EACH}),
    "fs:1/16": ({"sync": True, "sample": "fs:1/16"}, {"sample": "fs:1/16"}),
    "fs:1/32": ({"sync": True, "sample": "fs:1/32"}, {"sample": "fs:1/32"}),
    "2 ranks": ({"sync": True, "sync_ranks": 2}, {"sample": f"bs:{2 * EACH}"}),
    "1 rank": ({"sync": True, "sync_ranks": 1}, {"sample": f"bs:{EACH}"}),
    "vdn:2": ({"sync": True, "sample": "vdn:2"}, {"sample": "vdn:2"}),
    "fs:1/32+vdn:2": ({"sync": True, "sample": "fs:1/32+vdn:2"}, {"sample": "fs:1/32+vdn:2"}),
}


def graph_of(form: str, seed: int, network: str, ranks: int) -> Any:
    """Build and rewrite the training graph of a rank, or of one process; the seed draws the initial values."""
    forward = build_forward(network, batch=EACH * RANKS // ranks, image=IMAGE, channels=1, classes=10, seed=seed)
    return bnfuse.rewrite(build_training_graph(forward), level="icf", **FORMS[form][ranks == 1]).model


def show(lines: list[dict[str, Any]]) -> str:
    """Make a table: accuracies in percent, and how far their mean is from that of `sync` with the same seeds."""
    runs = {(line["form"], line["seed"]): 100 * line["accuracy"] for line in lines}
    rows = ["| statistics | " + " | ".join(f"seed {s}" for s in seeds_of(runs)) + " | mean | less `sync` |"]
    rows.append("| --- |" + " ---: |" * (len(seeds_of(runs)) + 2))
    for form in FORMS:
        found = {seed: runs[form, seed] for seed in seeds_of(runs) if (form, seed) in runs}
        if found:
            apart = [value - runs["sync", seed] for seed, value in found.items() if ("sync", seed) in runs]
            cells = [f"{found[seed]:.2f}" if seed in found else "" for seed in seeds_of(runs)]
            cells += [f"{statistics.mean(found.values()):.2f}", f"{statistics.mean(apart):+.2f}" if apart else ""]
            rows.append(f"| {form} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def seeds_of(runs: dict[tuple[str, int], float]) -> list[int]:
    return sorted({seed for _, seed in runs})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, choices=(1, RANKS), default=1)
    parser.add_argument("--form", action="append", choices=(*FORMS,), help="these alone")
    options = parser.parse_args()
    if options.show:
        print(show([line for line in lines_of(options.out) if line["ranks"] == options.ranks]))
        return
    launcher = ("mpirun", "-n", str(RANKS)) if options.ranks > 1 else ()

    def once(form: str, seed: int, data: Path) -> Line:
        model = graph_of(form, seed, options.network, options.ranks)
        return train(model, seed, data, options, "--threads", "1", launcher=launcher)

    run_missing(options, "form", options.form or FORMS, {"ranks": options.ranks}, once)


if __name__ == "__main__":
    main()
