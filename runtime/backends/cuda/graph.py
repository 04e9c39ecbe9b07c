"""Tasks as a CUDA graph: each waits for those that it depends on, and for nothing else."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda.calls import Task
from bnfuse.runtime.backends.cuda.dependencies import dependencies
from bnfuse.runtime.backends.cuda.driver import Call, Driver, Handle, Stream


class Graph:
    """An executable graph. Arguments that changed since the last launch are brought up to date at the next one."""

    def __init__(self, driver: Driver, tasks: Sequence[Task]) -> None:
        self._driver = driver
        self._late: list[tuple[Handle, Call]] = []  # nodes whose arguments may change
        self._graph = driver.new_graph()
        nodes: list[Handle] = []
        parts = [(task, index) for task in tasks for index in range(len(task.accesses))]
        for (task, index), before in zip(parts, dependencies(t.accesses[i] for t, i in parts), strict=True):
            nodes.append(self._add(task, index, [nodes[earlier] for earlier in before]))
        self._executable = driver.instantiate(self._graph)
        self._versions = [call.arguments.version for _, call in self._late]
        weakref.finalize(self, release, driver, self._graph, self._executable)

    def _add(self, task: Task, index: int, after: list[Handle]) -> Handle:
        if task.copy is not None:
            return self._driver.add_copy(self._graph, after, *task.copy)
        call = task.calls[index]
        node = self._driver.add_kernel(self._graph, after, call)
        if call.arguments.is_late:
            self._late.append((node, call))
        return node

    def launch(self, stream: Stream) -> None:
        """Enqueue the graph, with scalars as they are now."""
        for index, (node, call) in enumerate(self._late):
            if call.arguments.version != self._versions[index]:
                self._driver.update_kernel(self._executable, node, call)
                self._versions[index] = call.arguments.version
        self._driver.launch_graph(self._executable, stream)


def release(driver: Driver, graph: Handle, executable: Handle) -> None:
    """Destroy a graph and what was made of it, in whatever thread the last reference goes."""
    with contextlib.suppress(BnfuseError), driver.active():
        driver.destroy_executable(executable)
        driver.destroy_graph(graph)
