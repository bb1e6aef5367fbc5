"""Allocations: environments as Slurm 22.05 made them for the request at each."""

from __future__ import annotations

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host
from hvdtrain.launch.slurm.allocation import Allocation, read_allocation

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
REQUESTS = {
    "-N2": ({"TASKS_PER_NODE": "1(x2)", "JOB_CPUS_PER_NODE": "1(x2)"}, "n1:1 n2:1"),
    "-N2 --exclusive": (
        # Nobody asked for 64 tasks a node.
        {"TASKS_PER_NODE": "64(x2)", "JOB_CPUS_PER_NODE": "64(x2)"},
        "n1:1 n2:1",
    ),
    "-N2 --gpus-per-node=2": (
        {"TASKS_PER_NODE": "1(x2)", "GPUS_PER_NODE": "2", "GPUS_ON_NODE": "2"},
        "n1:2 n2:2",
    ),
    "-N2 --gpus-per-node=a100:3": ({"TASKS_PER_NODE": "1(x2)", "GPUS_PER_NODE": "a100:3"}, "n1:3 n2:3"),
    "-N2 --gres=gpu:4": ({"TASKS_PER_NODE": "1(x2)", "GPUS_ON_NODE": "4"}, "n1:4 n2:4"),
    "-N2 --gpus-per-node=a:2,b:1": ({"TASKS_PER_NODE": "1(x2)", "GPUS_PER_NODE": "a:2,b:1"}, "n1:3 n2:3"),
    "-N2 --ntasks-per-node=2 -c 2": (
        {"NTASKS": "4", "NTASKS_PER_NODE": "2", "TASKS_PER_NODE": "2(x2)", "CPUS_PER_TASK": "2"},
        "n1:2 n2:2",
    ),
    "-N2 --ntasks-per-node=1 --gpus-per-node=4": (
        {"NTASKS": "2", "NTASKS_PER_NODE": "1", "TASKS_PER_NODE": "1(x2)", "GPUS_ON_NODE": "4"},
        "n1:1 n2:1",
    ),
    "-N2 -n3": ({"NTASKS": "3", "TASKS_PER_NODE": "2,1"}, "n1:2 n2:1"),
    "-n 5, no layout": ({"NTASKS": "5"}, "n1:3 n2:2"),
    "-N2, in a step of one node": ({"STEP_ID": "0", "NTASKS": "1", "TASKS_PER_NODE": "1"}, "n1:1 n2:1"),
    "-N2 --ntasks-per-node=2, in a step of one node": (
        {"STEP_ID": "0", "NTASKS": "1", "TASKS_PER_NODE": "1", "NTASKS_PER_NODE": "2"},
        "n1:2 n2:2",
    ),
    "layout of another step": ({"NTASKS": "4", "TASKS_PER_NODE": "1(x2)", "NTASKS_PER_NODE": "2"}, "n1:2 n2:2"),
}  # fmt: skip


def environment(**variables: str) -> dict[str, str]:
    return JOB | {f"SLURM_{name}": value for name, value in variables.items()}


@pytest.mark.parametrize("request_", REQUESTS)
def test_slots_of_a_request(request_: str) -> None:
    variables, hosts = REQUESTS[request_]
    allocation = read_allocation(environment(**variables))
    assert allocation is not None
    assert " ".join(map(str, allocation.hosts)) == hosts


def test_all_that_is_read() -> None:
    variables = {
        "NTASKS": "3",
        "TASKS_PER_NODE": "2,1",
        "JOB_CPUS_PER_NODE": "8,4",
        "CPUS_PER_TASK": "4",
        "GPUS_ON_NODE": "2",
        "RESTART_COUNT": "1",
    }
    assert read_allocation(environment(**variables)) == Allocation(
        job_id="7",
        hosts=(Host("n1", 2), Host("n2", 1)),
        cores=(8, 4),
        cores_per_task=4,
        this_node="n1",
    )


def test_the_shell_of_a_step_is_no_task_of_many() -> None:
    """`srun --ntasks-per-node=4 --pty bash`."""
    step = {"STEP_ID": "0", "STEP_NUM_TASKS": "4", "PTY_PORT": "40000"}
    allocation = read_allocation(environment(**step, PROCID="0"))
    assert allocation is not None and allocation.in_step
    with pytest.raises(UsageError, match="srun started this command as 4 tasks"):
        read_allocation(environment(**step, PROCID="1"))


def test_a_heterogeneous_job_is_left_to_those_who_name_its_hosts() -> None:
    assert read_allocation(environment(HET_SIZE="2"), own_hosts=True) is None
    assert read_allocation(environment(HET_SIZE="1")) is not None
    with pytest.raises(UsageError, match=r"SLURM_HET_SIZE=2: .* name the hosts with -H"):
        read_allocation(environment(HET_SIZE="2"))


def test_outside_of_slurm() -> None:
    assert read_allocation({"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: cannot read the node list 'n[1-'"),
        ({"NTASKS": "two"}, "SLURM_NTASKS='two': expected a number"),
        ({"NTASKS": "9" * 5000}, "999': expected a number"),
        ({"TASKS_PER_NODE": "9" * 5000, "NTASKS": "2"}, "SLURM_TASKS_PER_NODE: cannot read '999"),
        ({"JOB_NODELIST": f"n[{'9' * 5000}]"}, "SLURM_JOB_NODELIST: cannot read [999"),
        ({"NTASKS": "1"}, "SLURM_NTASKS=1 is fewer than one task per node (2 nodes)"),
        ({"NTASKS": "3", "TASKS_PER_NODE": "1;2"}, "SLURM_TASKS_PER_NODE: cannot read '1;2'"),
        (
            {"NTASKS": "3", "TASKS_PER_NODE": "1(x3)"},
            "SLURM_TASKS_PER_NODE=1(x3) describes 3 nodes, but SLURM_JOB_NODELIST=n[1-2] names 2",
        ),
        ({"GPUS_PER_NODE": "a100"}, "SLURM_GPUS_PER_NODE='a100': expected a number"),
        (
            {"STEP_NUM_TASKS": "4"},
            "srun started this command as 4 tasks: start it once, without srun",
        ),
    ],
)
def test_what_cannot_be_read_is_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_allocation(environment(**variables))
    assert said in str(error.value)


def test_half_an_environment() -> None:
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not"):
        read_allocation({"SLURM_JOB_ID": "7"})
