"""What marks a rank, under each launcher."""

import re
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.launch_command import check_started_once
from hvdtrain.rank_variables import (
    is_of_launch,
    is_one_host,
    is_rank,
    local_size_of,
    rank_of,
    size_of,
    without_rank_variables,
)

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"

# What each launcher tells rank 2 of 4, of which 2 are on each host; PMIx tells no size.
GLOO = {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
SRUN_PMIX = {"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
LAUNCHERS = [GLOO, OPEN_MPI, MPICH, SRUN_PMIX]


def test_what_is_no_number_of_ranks() -> None:
    assert [size_of({"HOROVOD_SIZE": text}) for text in ("", "two", "9" * 5000)] == [1, 1, 1]


@pytest.mark.parametrize("told", LAUNCHERS)
def test_a_rank_under_every_launcher(told: dict[str, str]) -> None:
    assert (is_rank(told), rank_of(told), size_of(told)) == (True, 2, 4)
    assert local_size_of(told) == (1 if told == SRUN_PMIX else 2)
    assert not is_rank(without_rank_variables(told))
    assert not any(is_of_launch(name) for name in without_rank_variables(told))


def test_a_process_that_nobody_told_anything() -> None:
    # A batch script has Slurm's numbers, and is no rank.
    for alone in ({}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"HOROVOD_RANK": "many"}):
        assert (rank_of(alone), size_of(alone), local_size_of(alone)) == (0, 1, 1)


def test_one_host() -> None:
    assert is_one_host({"HOROVOD_LOCAL_SIZE": "2", "HOROVOD_SIZE": "2"})
    assert is_one_host({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"})
    assert not any(map(is_one_host, ({}, *LAUNCHERS)))


@pytest.mark.parametrize("told", LAUNCHERS[:3])
def test_a_launch_inside_of_another_one(told: dict[str, str]) -> None:
    name = next(name for name in told if name.endswith("_SIZE"))
    with pytest.raises(UsageError, match=rf"one of 4 processes of another launch \({name}=4\)"):
        check_started_once(told)


def test_a_shell_that_srun_started_is_no_launch() -> None:
    check_started_once({"PMI_SIZE": "4", "SLURM_STEP_ID": "0"})
    check_started_once({"HOROVOD_SIZE": "1"})


def test_what_is_no_place_stays() -> None:
    others = {"HOROVOD_LOG_LEVEL", "OMPI_MCA_btl", "PATH", "SLURM_PROCID", "HOROVOD_TIMELINE"}
    ranks = {"HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_CONTROLLER", "HOROVOD_GLOO_IFACE"}
    assert set(without_rank_variables(dict.fromkeys(ranks | others, "1"))) == others
    assert not any(map(is_of_launch, others))


def test_the_variables_stand_in_one_file() -> None:
    """Beside it only the program that gives srun's tasks their places names one."""
    named = re.compile(r"\b(HOROVOD_RANK|OMPI_COMM_WORLD_(RANK|SIZE)|PMIX?_RANK|PMI_SIZE)\b")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if named.search(path.read_text())
    }
    assert found <= {"rank_variables.py", "launch/slurm/task_variables.py", "start/slurm_task.py"}
