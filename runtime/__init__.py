"""The runtime: lowers a training graph to kernels made by TVM, plans its memory, runs it. Nothing else imports TVM.

    step = compile_step(model, optimizer=SGD(lr=0.1, momentum=0.9))
    loss = step(images, labels)
    step.export("step.bnf");  step = load_step("step.bnf")

Names are looked up when they are first used: an optimiser can be written down without loading TVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bnfuse.runtime.compile import compile_step
    from bnfuse.runtime.loading import load_step
    from bnfuse.runtime.program.groups import Group
    from bnfuse.runtime.program.optim import EMA, SGD, Adam, AdamW, Lion, RMSprop
    from bnfuse.runtime.session import Step

_HOMES = {
    "add_batch": "compile",
    "compile_step": "compile",
    "load_step": "loading",
    "Step": "session",
    **dict.fromkeys(("EMA", "SGD", "Adam", "AdamW", "Lion", "RMSprop"), "program.optim"),
    "Group": "program.groups",
}

__all__ = ["EMA", "SGD", "Adam", "AdamW", "Group", "Lion", "RMSprop", "Step", "add_batch", "compile_step", "load_step"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bnfuse.runtime' has no attribute '{name}'")
    if name in ("add_batch", "compile_step"):  # those that run a step leave it to its backend: a GPU's needs no TVM
        from bnfuse.runtime.targets.tvm import import_tvm

        import_tvm()
    return getattr(importlib.import_module(f"bnfuse.runtime.{_HOMES[name]}"), name)
