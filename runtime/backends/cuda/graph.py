"""Tasks as a CUDA graph: each waits for those that it depends on, and for nothing else.

A kernel that waits for other kernels itself is on the GPU before they are done (programmatic dependent launch): its
blocks need not be brought there, and its first instructions read, when their last block has ended. Not so behind a
kernel that waits for other ranks: who waits for it would hold room that these ranks' next exchange may need here.

An exchange between ranks is whatever NCCL enqueues on a stream. So a graph with exchanges is begun as the capture of a
stream of its own: kernels are added to it node by node as elsewhere, and for an exchange the stream is set behind the
nodes that it waits for, and NCCL called. What the stream would wait for then are the exchange's last nodes: a branch
beside the kernels, which its readers wait for alone. All of it is one capture, in which NCCL keeps its own order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence

from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.backends.cuda.calls import Task
from bnfuse.runtime.backends.cuda.dependencies import Access, dependencies
from bnfuse.runtime.backends.cuda.driver import Call, Driver, Handle, Stream
from bnfuse.runtime.program import program as p

Nodes = tuple[Handle, ...]


def add_tasks(
    driver: Driver, graph: Handle, tasks: Sequence[Task], after: Sequence[Handle], stream: Stream | None = None
) -> Added:
    """Add a node for each device kernel and copy, in front of which those of `after` are done.

    Exchanges are captured on `stream`, which is being captured into the graph.
    """
    parts = [(task, index) for task in tasks for index in range(len(task.accesses))]
    edges = dependencies(in_turns(task.accesses[index]) for task, index in parts)
    nodes: list[Nodes] = []
    late: list[tuple[Handle, Call]] = []
    kernels: set[int] = set()
    for (task, index), before in zip(parts, edges, strict=True):
        waits = distinct(itertools.chain.from_iterable(nodes[earlier] for earlier in before)) or list(after)
        if task.exchange is not None:
            assert stream is not None, "exchanges are captured on a stream"
            driver.go_on_behind(stream, waits)
            task.exchange(stream)
            nodes.append(tuple(driver.captured(stream)[1]))
        elif task.copy is not None:
            nodes.append((driver.add_copy(graph, waits, *task.copy),))
        else:
            call = task.calls[index]
            own = [node for node in waits if call.waits and int(node) in kernels]
            node = driver.add_kernel(graph, [node for node in waits if node not in own], call, own)
            if not any(access.region == p.MAPPED for access in task.accesses[index]):
                kernels.add(int(node))
            nodes.append((node,))
            if call.arguments.is_late:
                late.append((node, call))
    inner = {earlier for before in edges for earlier in before}
    last = (found for index, found in enumerate(nodes) if index not in inner)
    return Added(distinct(itertools.chain.from_iterable(last)), late)


def in_turns(accesses: Sequence[Access]) -> list[Access]:
    """Let kernels that wait for other ranks go one behind the other, by the header that all of them read: two could
    fill the GPU of one rank with the first and that of another with the second, and wait for ever."""
    return [dataclasses.replace(each, writes=True) if each.region == p.MAPPED else each for each in accesses]


def distinct(nodes: Iterable[Handle]) -> list[Handle]:
    """List each node once: an exchange that enqueues nothing ends with what it was to wait for."""
    return list({int(node): node for node in nodes}.values())


@dataclasses.dataclass(frozen=True)
class Added:
    """Nodes of a graph: those that none of the others waits for, and those whose arguments may change."""

    last: list[Handle]
    late: list[tuple[Handle, Call]]


def capture(driver: Driver, tasks: Sequence[Task], stream: Stream) -> Added:
    """Add tasks to the graph that a stream is captured into, with their arguments as they are now."""
    graph, before = driver.captured(stream)
    added = add_tasks(driver, graph, tasks, before, stream)
    if added.last:
        driver.go_on_behind(stream, added.last)
    return added


class Graph:
    """An executable graph. Arguments that changed since the last launch are brought up to date at the next one.

    `side` is the stream on which exchanges are captured; a graph without any needs none.
    """

    def __init__(self, driver: Driver, tasks: Sequence[Task], side: Stream | None = None) -> None:
        self._driver = driver
        if any(task.exchange is not None for task in tasks):
            assert side is not None, "exchanges need a stream to be captured on"
            self._graph, self._late = captured_graph(driver, tasks, side)
        else:
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


def captured_graph(driver: Driver, tasks: Sequence[Task], side: Stream) -> tuple[Handle, list[tuple[Handle, Call]]]:
    """Make a graph of tasks that exchange: it, and the nodes whose arguments may change."""
    driver.begin_capture(side)
    try:
        added = capture(driver, tasks, side)
    except BaseException:
        with contextlib.suppress(BnfuseError):  # the stream is to be usable again, and the first error to be seen
            driver.destroy_graph(driver.end_capture(side))
        raise
    return driver.end_capture(side), added.late


def release(driver: Driver, graph: Handle, executable: Handle) -> None:
    """Destroy a graph and what was made of it, in whatever thread the last reference goes."""
    with contextlib.suppress(BnfuseError), driver.active():
        driver.destroy_executable(executable)
        driver.destroy_graph(graph)
