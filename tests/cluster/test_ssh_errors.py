"""What the user sees of ssh's errors and of exit codes on other hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import RANK, SECONDS, user_environment
from namespaces import NamespaceHost

Hosts = dict[str, NamespaceHost]
# An ssh configuration in place of the hosts' own, for one command.
WITH_CONFIG = 'mount --bind "$0" /etc/ssh/ssh_config && exec "$@"'
DOCTOR = """
import os
from hvdtrain.doctor.checks import Options
from hvdtrain.doctor.remote_hosts import check_host
for result in check_host("node2", Options(os.environ), 20):
    print(result.name, result.status, result.seen, result.fix, sep="|")
"""


def run_hosts(*arguments: str) -> list[str]:
    run = [sys.executable, "-m", "hvdtrain.cli", "run", "-H", "node1:1,node2:1"]
    return [*run, *arguments]


def on_node1(hosts: Hosts, folder: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        hosts["node1"].argv(argv, folder), env=user_environment(HOME=str(folder)),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


@pytest.fixture
def config(hosts: Hosts, tmp_path: Path) -> Path:
    """A configuration that leaves it to ssh what to do about host keys; known_hosts is beside it."""
    text = hosts["node1"].run("cat", "/etc/ssh/ssh_config").stdout
    for old, new in (
        ("StrictHostKeyChecking no", "StrictHostKeyChecking ask"),
        ("/dev/null", str(tmp_path / "known_hosts")),
        ("LogLevel ERROR", "LogLevel INFO"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "ssh_config").write_text(text)
    return tmp_path / "ssh_config"


def test_a_changed_host_key_is_named(
    hosts: Hosts, config: Path, tmp_path: Path, controller: str
) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    key = (tmp_path / "other.pub").read_text()
    (tmp_path / "known_hosts").write_text(f"node2 {key}")
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    wrapped = ["unshare", "--mount", "sh", "-c", WITH_CONFIG, str(config)]
    done = on_node1(hosts, tmp_path, [*wrapped, *run_hosts("--controller", controller, "train.py")])
    assert done.returncode == 1
    assert done.stderr.startswith(
        "host node2: its host key has changed (Host key for node2 has changed and you have "
        "requested strict checking.): "
    )
    assert "ssh-keygen -R node2" in done.stderr
    assert "mpirun" not in done.stderr and done.stderr.count("\n") <= 2, done.stderr
    assert not (tmp_path / "started").exists()
    if controller == "gloo":
        return  # The doctor's verdict is the same for both.
    said = on_node1(hosts, tmp_path, [*wrapped, sys.executable, "-c", DOCTOR]).stdout
    assert "ssh|fail|its host key has changed (Host key for node2 has changed" in said
    (tmp_path / "known_hosts").write_text("")
    said = on_node1(hosts, tmp_path, [*wrapped, sys.executable, "-c", DOCTOR]).stdout
    assert "ssh|warn|its host key is unknown here" in said and "clock|ok|" in said
    assert (tmp_path / "known_hosts").read_text() == "", "the doctor remembers none"


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("sys.exit(7)", 7),
        # As ssh says that it failed itself.
        ("sys.exit(255)", 255),
        ("os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_exit_code_of_a_rank_on_another_host(
    hosts: Hosts, tmp_path: Path, controller: str, ending: str, exit_code: int
) -> None:
    (tmp_path / "train.py").write_text(
        f"{RANK}if rank == 1:\n    {ending}\ntime.sleep({SECONDS})\n"
    )
    done = on_node1(hosts, tmp_path, run_hosts("--controller", controller, "train.py"))
    assert done.returncode == exit_code, done.stderr
    how = "was killed by SIGKILL" if exit_code == 137 else f"ended with exit code {exit_code}"
    assert done.stderr.splitlines()[0].startswith(f"rank 1 {how}")
