"""Tasks as a CUDA graph: each waits for those that it depends on, and for nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda.calls import Task
from bnfuse.runtime.backends.cuda.dependencies import dependencies
from bnfuse.runtime.backends.cuda.driver import Call, Driver, Handle, Stream


def add_tasks(driver: Driver, graph: Handle, tasks: Sequence[Task], after: Sequence[Handle]) -> Added:
    """Add a node for each device kernel and copy, in front of which those of `after` are done."""
    parts = [(task, index) for task in tasks for index in range(len(task.accesses))]
    edges = dependencies(task.accesses[index] for task, index in parts)
    nodes: list[Handle] = []
    late: list[tuple[Handle, Call]] = []
    for (task, index), before in zip(parts, edges, strict=True):
        waits = [nodes[earlier] for earlier in before] or list(after)
        if task.copy is not None:
            nodes.append(driver.add_copy(graph, waits, *task.copy))
            continue
        call = task.calls[index]
        nodes.append(driver.add_kernel(graph, waits, call))
        if call.arguments.is_late:
            late.append((nodes[-1], call))
    inner = {earlier for before in edges for earlier in before}
    return Added([node for index, node in enumerate(nodes) if index not in inner], late)


@dataclasses.dataclass(frozen=True)
class Added:
    """Nodes of a graph: those that none of the others waits for, and those whose arguments may change."""

    last: list[Handle]
    late: list[tuple[Handle, Call]]


def capture(driver: Driver, tasks: Sequence[Task], stream: Stream) -> None:
    """Add tasks to the graph that a stream is captured into, with their arguments as they are now."""
    graph, before = driver.captured(stream)
    added = add_tasks(driver, graph, tasks, before)
    if added.last:
        driver.go_on_behind(stream, added.last)


class Graph:
    """An executable graph. Arguments that changed since the last launch are brought up to date at the next one."""

    def __init__(self, driver: Driver, tasks: Sequence[Task]) -> None:
        self._driver = driver
        self._graph = driver.new_graph()
        self._late = add_tasks(driver, self._graph, tasks, ()).late
        self._executable = driver.instantiate(self._graph)
        self._versions = [call.arguments.version for _, call in self._late]
        weakref.finalize(self, release, driver, self._graph, self._executable)

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
