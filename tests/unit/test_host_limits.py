"""What a cgroup allows, of both versions, and what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.host_limits import cpu_quota, memory_limit


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "outer/inner").mkdir(parents=True)
    path = tmp_path / "cgroup"
    path.write_text("0::/outer/inner\n")
    return path


def test_quota_is_the_least_on_the_way_to_the_root(own: Path, tmp_path: Path) -> None:
    (tmp_path / "outer/inner/cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, own) is None
    (tmp_path / "outer/cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(tmp_path, own) == 1.5


def test_memory_is_the_least_on_the_way_to_the_root(own: Path, tmp_path: Path) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "outer/inner/memory.max").write_text("max\n")
    assert memory_limit(tmp_path, own) == machine
    (tmp_path / "outer/memory.max").write_text("3000000\n")
    (tmp_path / "memory.max").write_text("4000000\n")
    assert memory_limit(tmp_path, own) == 3_000_000


def test_limits_of_old_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:memory:/x\n4:cpu,cpuacct:/job\n")
    (tmp_path / "cpu/job").mkdir(parents=True)
    (tmp_path / "memory/x").mkdir(parents=True)
    (tmp_path / "cpu/job/cpu.cfs_quota_us").write_text("200000")
    (tmp_path / "cpu/job/cpu.cfs_period_us").write_text("100000")
    (tmp_path / "memory/x/memory.limit_in_bytes").write_text("5000000\n")
    # Version 1 has no "max", but the largest number of pages.
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cpu_quota(tmp_path, own) == 2.0
    assert memory_limit(tmp_path, own) == 5_000_000
    assert cpu_quota(tmp_path, tmp_path / "none") is None
