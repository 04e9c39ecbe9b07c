"""Our compiled step as a candidate: inputs that lie on the GPU, times by events on the step's own stream."""

from __future__ import annotations

from typing import Any

import numpy as np

from bnfuse.baselines.names import import_torch
from bnfuse.core.times import STEPS_A_RUN, Times
from bnfuse.runtime.backends.cuda.driver import open_driver

Arrays = dict[str, np.ndarray]


class CudaCandidate:
    """A compiled step on one batch, its update included. It never leaves the GPU: the loss is not read."""

    def __init__(self, name: str, step: Any, feeds: Arrays) -> None:
        self.name, self.step = name, step
        self.feeds = on_device([feeds[key] for key in step.inputs])
        step.lr = 0.0  # as everywhere in the benchmark: all of the update's work is done, and nothing is learned
        step.stream  # noqa: B018  # brings program and state to the GPU

    def run(self) -> Times:
        """Give the mean of some steps in a row: gaps between steps are in it, the host's clock is not."""
        return Times(self.seconds(STEPS_A_RUN), None)

    def seconds(self, steps: int) -> float:
        """Time `steps` steps in a row on the GPU's own clock, in seconds."""
        driver = open_driver()
        with driver.active():
            start, end = (driver.new_event(timing=True) for _ in range(2))
            driver.record(start, self.step.stream)
            for _ in range(steps):
                self.step(*self.feeds)
            driver.record(end, self.step.stream)
            driver.wait_for(end)
            seconds = driver.seconds(start, end)
            for event in (start, end):
                driver.destroy_event(event)
        return seconds / steps


def on_device(arrays: list[np.ndarray]) -> list[Any]:
    """Put arrays on the GPU as torch's tensors, NCHW as in the file, ready before anything else starts."""
    torch = import_torch()
    found = [torch.from_numpy(np.array(array)).cuda() for array in arrays]
    torch.cuda.synchronize()
    return found
