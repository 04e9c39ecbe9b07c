"""bnfuse: a graph compiler for ONNX training graphs.

    model = bnfuse.load("train.onnx")
    fused = bnfuse.rewrite(model, level="icf")
    step = bnfuse.compile(fused, optimizer=bnfuse.SGD(lr=0.1, momentum=0.9))
    loss = step(images, labels)
    print(bnfuse.diff(model, fused))

Names are looked up when they are first used, so that `import bnfuse` costs next to nothing. Modules are named for
what they hold (`bnfuse.diffing`, `bnfuse.verifying.verification`), because a submodule called `diff` would replace the
function.
"""

from __future__ import annotations

from bnfuse.core import interrupts  # noqa: F401 (first: on the command line Ctrl-C is one line from here on)

# isort: split
import importlib
import logging
from typing import TYPE_CHECKING, Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.version import __version__

if TYPE_CHECKING:
    from bnfuse.api import (
        add_batch,
        bench,
        compile,
        diff,
        estimate,
        evaluate,
        explore,
        export_inference,
        inspect,
        load,
        open_step,
        rewrite,
        save,
        search,
        train,
        verify,
    )
    from bnfuse.build import build_training_graph
    from bnfuse.graph.signature import GraphSignature
    from bnfuse.runtime.program.groups import Group
    from bnfuse.runtime.program.optim import EMA, SGD, Adam, AdamW, Lion, RMSprop

_HOMES = {
    **dict.fromkeys(
        (
            "add_batch",
            "bench",
            "compile",
            "diff",
            "estimate",
            "evaluate",
            "explore",
            "export_inference",
            "inspect",
            "load",
            "open_step",
            "rewrite",
            "save",
            "search",
            "train",
            "verify",
        ),
        "bnfuse.api",
    ),
    "build_training_graph": "bnfuse.build",
    "GraphSignature": "bnfuse.graph.signature",
    **dict.fromkeys(("EMA", "SGD", "Adam", "AdamW", "Lion", "RMSprop"), "bnfuse.runtime.program.optim"),
    "Group": "bnfuse.runtime.program.groups",
}

__all__ = [
    "EMA",
    "SGD",
    "Adam",
    "AdamW",
    "BnfuseError",
    "GraphSignature",
    "Group",
    "Lion",
    "RMSprop",
    "__version__",
    "add_batch",
    "bench",
    "build_training_graph",
    "compile",
    "diff",
    "estimate",
    "evaluate",
    "explore",
    "export_inference",
    "inspect",
    "load",
    "open_step",
    "rewrite",
    "save",
    "search",
    "train",
    "verify",
]


# results that nobody wants have no name, as ONNX says; onnx_ir warns of each of them inside functions
logging.getLogger("onnx_ir.serde").addFilter(lambda record: "Value name not set" not in record.getMessage())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bnfuse' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
