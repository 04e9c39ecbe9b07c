"""Which rank a process is, by the variables of launchers."""

from __future__ import annotations

import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.parallel.launched import Launched, first_host, launched

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OPEN_MPI, Launched(5, 8, 1, 4, "mpirun")),
        (MPICH, Launched(5, 8, 1, 4, "mpirun")),
        (TORCHRUN, Launched(5, 8, 1, 4, "torchrun", "here", 29500)),
        (SLURM, Launched(5, 8, 1, 4, "slurm", "node07", 30123)),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Launched(5, 8, 1, 4, "mpirun")),  # srun --mpi=pmi2
        (SLURM | OPEN_MPI | {"SLURM_PROCID": "0"}, Launched(5, 8, 1, 4, "mpirun")),  # mpirun within a job
        (SLURM | TORCHRUN | {"SLURM_PROCID": "0"}, Launched(5, 8, 1, 4, "torchrun", "here", 29500)),
        (MPICH | TORCHRUN, Launched(5, 8, 1, 4, "mpirun", "here", 29500)),  # they agree
        (
            MPICH | TORCHRUN | {"PMI_RANK": "0", "PMI_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            Launched(5, 8, 1, 4, "torchrun", "here", 29500),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launched(1, 2, 1, 2, "torchrun")),
    ],
)
def test_each_launcher_says_which_rank_it_is(variables: dict[str, str], expected: Launched) -> None:
    assert launched(variables) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script is no rank of its steps
    ],
)
def test_a_single_process_is_no_world(variables: dict[str, str]) -> None:
    assert launched(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "set together: where no launcher started this process unset the other"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is no rank where WORLD_SIZE=2: ranks are 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1' is no number"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is no number"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is no rank of 4 on this machine"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        (MPICH | TORCHRUN | {"RANK": "6"}, "PMI_RANK=5 of 8, but RANK=6 of 8: unset"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE='four' is no list"),
    ],
)
def test_contradictions_are_one_line(variables: dict[str, str], message: str) -> None:
    with pytest.raises(BnfuseError) as error:
        launched(variables)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[07-09,12],other", "node07"), ("a,b", "a"), ("gpu3", "gpu3"), ("r[1,3]c2", "r1c2"), ("", "")],
)
def test_the_first_machine_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
