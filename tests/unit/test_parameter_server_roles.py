"""The processes of a launch with parameter servers: where they are, and what each is told."""

from __future__ import annotations

import json

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts import Host, parse_hosts
from hvdtrain.launch.parameter_server_roles import (
    CHIEF,
    Role,
    all_roles,
    assign_hosts,
    host_environment,
    role_environment,
    tf_config,
)
from hvdtrain.tf_config import read_tf_config

ADDRESSES = {
    CHIEF: "a:1",
    Role("worker", 0): "b:2",
    Role("worker", 1): "a:3",
    Role("ps", 0): "a:4",
}


def test_who_there_is() -> None:
    assert [role.name for role in all_roles(2, 2)] == [
        "chief",
        "worker-0",
        "worker-1",
        "ps-0",
        "ps-1",
    ]


@pytest.mark.parametrize(
    ("hosts", "workers", "servers", "placed"),
    [
        ("a:2,b:2", 2, 1, {"ps-0": "a", "worker-0": "b", "worker-1": "a"}),
        ("a:1,b:3", 2, 1, {"ps-0": "a", "worker-0": "b", "worker-1": "b"}),
        ("a:3,b:1,c:1", 3, 2, {"ps-0": "a", "ps-1": "b", "worker-0": "c", "worker-1": "a", "worker-2": "a"}),
        ("a:9", 1, 1, {"ps-0": "a", "worker-0": "a"}),
    ],
)  # fmt: skip
def test_servers_first_one_host_after_the_other(
    hosts: str, workers: int, servers: int, placed: dict[str, str]
) -> None:
    found = assign_hosts(all_roles(workers, servers), parse_hosts(hosts))
    assert {role.name: host for role, host in found.items()} == placed


def test_too_few_slots() -> None:
    with pytest.raises(
        UsageError, match=r"^4 workers and servers are more than the 3 slots of a:1, b:2"
    ):
        assign_hosts(all_roles(3, 1), (Host("a", 1), Host("b", 2)))


def test_tf_config_is_that_of_tensorflows_guide() -> None:
    assert json.loads(tf_config(ADDRESSES, Role("worker", 1))) == {
        "cluster": {"chief": ["a:1"], "worker": ["b:2", "a:3"], "ps": ["a:4"]},
        "task": {"type": "worker", "index": 1},
    }
    # More than ten of a kind are in the order of their numbers.
    many = {role: f"h{role.index}:1" for role in reversed(all_roles(12, 1))}
    assert json.loads(tf_config(many, CHIEF))["cluster"]["worker"] == [f"h{i}:1" for i in range(12)]


@pytest.mark.parametrize("role", ADDRESSES)
def test_the_training_side_reads_what_the_launch_writes(role: Role) -> None:
    told = role_environment(ADDRESSES, role)
    config = read_tf_config(told)
    assert config is not None
    assert (config.kind, config.index, config.chief) == (role.kind, role.index, "a:1")
    assert (config.workers, config.servers) == (("b:2", "a:3"), ("a:4",))
    assert told["HVDTRAIN_STRATEGY"] == "parameter-server"
    assert told["no_grpc_proxy"] == "a,b"


def shares(environ: dict[str, str], kind: str, index: int = 0, gpus: str = "") -> dict[str, str]:
    return host_environment(
        environ, kind, index, processes=4, workers=3, cores=10, gpus=gpus.split()
    )  # type: ignore[arg-type]


def test_cores_are_shared_and_calls_can_wait() -> None:
    found = shares({}, "ps")
    assert found["TF_NUM_INTRAOP_THREADS"] == found["OMP_NUM_THREADS"] == "2"
    assert found["TF_NUM_INTEROP_THREADS"] == "4"  # Every worker's call, and one of the chief's.
    mine = {"TF_NUM_INTEROP_THREADS": "1", "OMP_NUM_THREADS": "7"}
    assert not mine.keys() & shares(mine, "ps").keys()


def test_each_worker_has_a_gpu_and_nobody_else_has_one() -> None:
    devices = [shares({}, "worker", index, "0 GPU-b")["CUDA_VISIBLE_DEVICES"] for index in range(3)]
    assert devices == ["0", "GPU-b", "0"]
    for kind in ("chief", "ps"):
        assert shares({}, kind, gpus="0 1")["CUDA_VISIBLE_DEVICES"] == ""
    assert shares({}, "worker", 0, "0")["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    own = {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in shares(own, "worker", 0, "0")
    assert "CUDA_VISIBLE_DEVICES" not in shares({}, "worker") | shares({}, "ps")
