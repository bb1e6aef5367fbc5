"""What ssh is told about host keys, by the real ssh's reading of its configuration."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hvdtrain.launch.ssh import ACCEPT_NEW, unseen_keys, where


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs openssh-client")
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("Port 2222", ACCEPT_NEW),
        ("StrictHostKeyChecking ask", ACCEPT_NEW),
        ("StrictHostKeyChecking yes", ()),
        ("StrictHostKeyChecking no", ACCEPT_NEW),
        ("StrictHostKeyChecking off", ACCEPT_NEW),
        ("StrictHostKeyChecking accept-new", ()),
    ],
)
def test_the_users_configuration_goes_first(
    tmp_path: Path, setting: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "config").write_text(f"Host node1\n  {setting}\nHost *\n  User x\n")
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    ssh.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    assert unseen_keys("node1", 22, "/key", environ) == expected
    assert unseen_keys("node2", environ=environ) == ACCEPT_NEW


def test_an_ssh_that_tells_nothing_is_told_nothing(tmp_path: Path) -> None:
    assert unseen_keys("node1", environ={"PATH": str(tmp_path)}) == ()


def test_where_to() -> None:
    assert where(None, None) == []
    assert where(22, Path("/my key")) == ["-p", "22", "-i", "/my key"]
