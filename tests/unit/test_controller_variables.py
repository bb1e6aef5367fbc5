"""Horovod's controller and CPU operations must be of one kind: it crashes otherwise."""

from __future__ import annotations

import pytest

from hvdtrain.runtime import controller_environment

RANK = {"OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("controller", "operations", "changed"),
    [
        (None, None, None),
        ("gloo", "gloo", None),
        ("MPI", "mpi", None),
        ("mpi", "ccl", None),
        # Left by another launch, or by a notebook that trained by itself before it started workers.
        (None, "gloo", "mpi"),
        ("mpi", "GLOO", "mpi"),
        ("gloo", "mpi", "gloo"),
        ("gloo", None, "gloo"),
    ],
)
def test_operations_of_a_rank_are_those_of_its_controller(
    controller: str | None, operations: str | None, changed: str | None
) -> None:
    given = {"HOROVOD_CONTROLLER": controller, "HOROVOD_CPU_OPERATIONS": operations}
    environ = RANK | {name: value for name, value in given.items() if value is not None}
    expected = {} if changed is None else {"HOROVOD_CPU_OPERATIONS": changed}
    assert controller_environment(environ, "mpi") == expected


def test_a_process_alone_needs_no_mpi() -> None:
    both = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    assert controller_environment({}, "mpi") == both
    assert controller_environment({"HOROVOD_CPU_OPERATIONS": "mpi"}, "mpi") == both
    assert controller_environment({}, "gloo") == {"HOROVOD_CONTROLLER": "gloo"}
    assert controller_environment({"HOROVOD_CONTROLLER": "mpi"}, "mpi") == {
        "HOROVOD_CONTROLLER": "mpi"
    }
