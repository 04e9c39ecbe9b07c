"""Which of several processes this one is, by the variables that launchers set.

    mpirun       OMPI_COMM_WORLD_RANK, ... (Open MPI);  PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, ... (MPICH, Intel MPI)
    torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    srun         SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE

torchrun may be started by one of the others, and mpirun by SLURM: the innermost one counts.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Literal

from bnfuse.core.errors import BnfuseError

Launcher = Literal["mpirun", "torchrun", "slurm"]
FIRST_PORT, PORTS = 20_000, 20_000  # where ranks under SLURM meet: by the number of the job


@dataclasses.dataclass(frozen=True)
class Launched:
    """This process: rank `rank` of `size`, the `local_rank`th of `local_size` on its machine. At `address` and `port`
    ranks meet that have no MPI; empty where nothing says so."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher
    address: str = ""
    port: int = 0


@dataclasses.dataclass(frozen=True)
class Names:
    """The variables of a launcher: rank, size, and both on one machine, the last two where it sets them."""

    launcher: Launcher
    rank: str
    size: str
    local_rank: str
    local_size: str


OPEN_MPI = Names(
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HYDRA = Names("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
TORCHRUN = Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """Tell which rank this process is; None where it is the only one.

    Raises BnfuseError where the variables contradict each other or are no numbers.
    """
    found = read(environ)
    return found if found is not None and found.size > 1 else None


def read(environ: Mapping[str, str]) -> Launched | None:
    """Read the variables of the innermost launcher; None where there is none."""
    by_mpi = next((names for names in (OPEN_MPI, HYDRA) if names.rank in environ), None)
    by_torch = TORCHRUN if TORCHRUN.rank in environ or TORCHRUN.size in environ else None
    if by_torch is not None and (by_mpi is None or UNDER_TORCHRUN in environ):
        return of(by_torch, environ, *meeting(environ))
    if by_mpi is not None:
        found = of(by_mpi, environ, *meeting(environ))
        if by_torch is not None and (other := of(by_torch, environ)).size > 1:
            agree(found, by_mpi, other, by_torch)
        return found
    if SLURM.rank in environ and SLURM.size in environ:  # a batch script has the first of them alone: it is no rank
        return of(SLURM, environ, *meeting(environ, under_slurm(environ)))
    return None


def of(names: Names, environ: Mapping[str, str], address: str = "", port: int = 0) -> Launched:
    """Read the variables of one launcher."""
    rank, size = (number(environ, name, f"{names.rank} and {names.size}") for name in (names.rank, names.size))
    here = SLURM if names.local_rank not in environ and SLURM.local_rank in environ else names  # srun --mpi=pmi2
    local_rank = number(environ, here.local_rank) if here.local_rank in environ else rank
    local_size = size
    if here.local_size in environ:
        local_size = number(environ, here.local_size) if here is not SLURM else tasks_here(environ)
    if size < 1 or rank >= size:
        raise BnfuseError(f"{names.rank}={rank} is no rank where {names.size}={size}: ranks are 0 to {size - 1}")
    if local_rank >= local_size or local_size > size:
        raise BnfuseError(
            f"{here.local_rank}={local_rank} is no rank of {local_size} on this machine, of {size} in all "
            f"({here.local_size}): start the ranks with one launcher"
        )
    return Launched(rank, size, local_rank, local_size, names.launcher, address, port)


def agree(found: Launched, names: Names, other: Launched, others: Names) -> None:
    """Refuse to choose between two launchers that say different things."""
    if (found.rank, found.size) != (other.rank, other.size):
        raise BnfuseError(
            f"{names.rank}={found.rank} of {found.size}, but {others.rank}={other.rank} of {other.size}: unset the "
            "variables of the launcher that did not start this process"
        )


def number(environ: Mapping[str, str], name: str, together: str = "") -> int:
    """Read a variable as a number."""
    if name not in environ:
        raise BnfuseError(
            f"{name} is not set: {together or name} say which rank this is, and are set together: where no launcher "
            "started this process unset the other"
        )
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BnfuseError(f"{name}={environ[name]!r} is no number of ranks: the launcher sets it, leave it as it is")
    return int(text)


def meeting(environ: Mapping[str, str], otherwise: tuple[str, int] = ("", 0)) -> tuple[str, int]:
    """Give the address and port where ranks meet."""
    address, port = environ.get("MASTER_ADDR", otherwise[0]), otherwise[1]
    if "MASTER_PORT" in environ:
        port = number(environ, "MASTER_PORT")
    return address, port


def under_slurm(environ: Mapping[str, str]) -> tuple[str, int]:
    """Give the first machine of a step of SLURM, and a port by the number of the job."""
    job = environ.get("SLURM_JOB_ID", "0")
    port = FIRST_PORT + int(job) % PORTS if job.isdigit() else FIRST_PORT
    return first_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))), port


def first_host(nodes: str) -> str:
    """Give the first machine of a list as SLURM writes it: node[07-09,12],other gives node07."""
    found = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\])?([^,\[]*)", nodes.strip())
    return "" if found is None else f"{found[1]}{found[2] or ''}{found[3]}"


def tasks_here(environ: Mapping[str, str]) -> int:
    """Give how many ranks SLURM has on this machine: its entry of a list such as 4(x2),3."""
    counts: list[int] = []
    for part in environ[SLURM.local_size].split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if found is None:
            raise BnfuseError(f"{SLURM.local_size}={environ[SLURM.local_size]!r} is no list of numbers of ranks")
        counts += [int(found[1])] * min(int(found[2] or 1), 100_000)
    node = number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return counts[node] if node < len(counts) else counts[0]
