"""What ranks do that a launcher started: as a script, one of them. `launch` starts them, and leaves none behind."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np

from bnfuse.parallel import Exchanged, World, open_world

HERE = pathlib.Path(__file__).parent
SECONDS = 60.0  # until what was started is ended


def environment() -> dict[str, str]:
    """That of this process, without what a launcher above it may have said."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM", "MPI_LOCAL"))}
    return {**found, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}


def mpirun() -> str | None:
    """The launcher that bnfuse[mpi] brings, beside the interpreter."""
    path = pathlib.Path(sys.executable).parent / "mpirun"
    return str(path) if path.exists() else None


def by_mpirun(size: int, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, str, float]:
    """Run ranks under mpirun: its exit status, what they wrote, and the seconds that it took."""
    command = [str(mpirun()), "-n", str(size), *options, sys.executable, __file__, *arguments]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    return (*ended([process])[0], time.monotonic() - begin)


def by_variables(size: int, *arguments: str) -> list[tuple[int, str]]:
    """Run ranks with the variables that torchrun sets: exit status and output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**environment(), **meeting, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(size)
    ]
    return ended(processes)


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for processes, each of a session of its own, and end what is left of it."""
    end, found = time.monotonic() + SECONDS, []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(end - time.monotonic(), 1))
            found.append((process.returncode, output))
    finally:
        for process in processes:
            for number in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break
    return found


# -- what a rank does -----------------------------------------------------------------------------------------------


def arrays_of(rank: int) -> list[np.ndarray]:
    """Different numbers on each rank, of sizes that no number of ranks divides."""
    rng = np.random.default_rng(rank)
    return [rng.standard_normal(size).astype(np.float32) for size in (50_021, 7, 301)]


def exchange(world: World) -> dict[str, np.ndarray]:
    """Begin several exchanges, and wait for them in another order."""
    large, small, other = arrays_of(world.rank)
    again = large.copy()
    own, everyone = np.full(5, world.rank, np.float32), np.zeros(5 * world.size, np.float32)
    requests = [
        world.start(Exchanged("sum", (large, small))),
        world.start(Exchanged("gather", (own, everyone))),
        world.start(Exchanged("sum", (other, again[:9]))),
    ]
    while not requests[1].test():
        time.sleep(0)
    for request in reversed(requests):
        request.wait()
    world.sum(again[10:])
    said = world.gather(b"of rank %d" % world.rank * world.rank)
    first = world.broadcast(b"first" * 1000 if world.rank == 0 else b"")
    empty = world.gather(b"")
    assert said == [b"of rank %d" % rank * rank for rank in range(world.size)], said
    assert first == b"first" * 1000 and empty == [b""] * world.size
    return {"large": large, "small": small, "other": other, "again": again, "everyone": everyone}


def train(world: World) -> dict[str, np.ndarray]:
    """Train a small network for some steps, as tests/runtime/test_ranks.py does."""
    from small_training import BATCH, CLASSES, normalised_graph

    from bnfuse.runtime import SGD, compile_step

    step = compile_step(normalised_graph(), threads=1, optimizer=SGD(lr=0.1, momentum=0.9), world=world, bucket=1000)
    losses = []
    for seed in range(5):
        rng = np.random.default_rng([seed, world.rank])
        x, y = rng.standard_normal((BATCH, 1, 8, 8)).astype(np.float32), rng.integers(0, CLASSES, BATCH)
        losses.append(step(x, y))
    step.same_everywhere()
    return {"losses": np.array(losses), **step.state_dict()}


def leave(world: World, how: str) -> None:
    """Let rank 1 be no longer there; where it was to stop before it began, this is too late."""
    if world.rank == 1:
        if how == "raise":
            raise ValueError("what went wrong")
        if how == "end":
            world.end("bnfuse: it is over", 7)
        os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    world.sum(np.ones(100_000, np.float32))


def main(what: str, folder: str, how: str = "", limit: str = "20") -> None:
    """One rank: leave, or exchange in a world of either kind, perhaps train, and leave then."""
    if what == "leave":
        if how == "begin" and os.environ["PMI_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        world = open_world(limit=float(limit))
        assert world is not None
        leave(world, how)
        return
    for deterministic in (False, True):
        world = open_world(limit=float(limit), deterministic=deterministic)
        assert world is not None and world is open_world(deterministic=deterministic)
        np.savez(pathlib.Path(folder) / f"{world.name}-{deterministic}-{world.rank}.npz", **exchange(world))
    if what == "train":
        np.savez(pathlib.Path(folder) / f"{world.name}-train-{world.rank}.npz", **train(world))
    if how:
        leave(world, how)


if __name__ == "__main__":
    main(*sys.argv[1:])
