"""`hvdtrain doctor` on this machine and on hosts, as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, user_environment
from namespaces import NamespaceHost

from hvdtrain.environment import EXIT_TERMINATED

SECONDS = 180
Found = dict[str, dict[str, dict[str, Any]]]


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "hvdtrain.cli", "doctor", "--json", *options]


def findings(text: str) -> Found:
    """Group -> name -> finding."""
    found: Found = {}
    for finding in json.loads(text)["findings"]:
        found.setdefault(finding["group"], {})[finding["name"]] = finding
    return found


def test_a_good_machine_is_all_green(tmp_path: Path) -> None:
    done = subprocess.run(
        command(),
        cwd=tmp_path,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    answer = json.loads(done.stdout)
    # Whether Docker's daemon runs here is not for this test to ask.
    red = [
        finding
        for finding in answer["findings"]
        if finding["status"] == "fail" and finding["group"] != "Containers"
    ]
    assert red == []
    assert done.returncode == (0 if answer["ok"] else 1)
    found = findings(done.stdout)
    for name in ("Horovod loads", "allreduce over gloo", "allreduce over mpi"):
        assert found["Horovod"][name]["status"] == "ok"
    assert {finding["status"] for finding in found["Software"].values()} == {"ok"}
    # An idle machine takes 26 s, one that runs other tests four times as long.
    assert 0 < answer["seconds"] < SECONDS
    assert not list(tmp_path.iterdir()), "it leaves nothing in the folder"


def test_the_end_of_the_doctor_is_the_end_of_what_it_started(tmp_path: Path) -> None:
    """SIGTERM while ranks start: nothing of them is left."""
    mark = f"JOB_OF_TEST={tmp_path.name}-{os.getpid()}"
    process = subprocess.Popen(
        command(),
        cwd=tmp_path,
        env=user_environment(JOB_OF_TEST=mark.partition("=")[2]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = Job(process, mark, tmp_path)
    try:
        deadline = time.monotonic() + SECONDS
        while not any("hvdtrain.worker" in line for line in job.left()):
            assert time.monotonic() < deadline, "no rank was started"
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.terminate()
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == EXIT_TERMINATED
    assert job.left() == []


@pytest.fixture(scope="module")
def over_hosts(hosts: dict[str, NamespaceHost], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the doctor on node1 says of good hosts and of bad ones, in one call."""
    asked = "node1,node2:4,locked,bare,nowhere,nobody"
    done = subprocess.run(
        hosts["node1"].argv(command("-H", asked, "--network-interfaces", "eth0")),
        cwd=tmp_path_factory.mktemp("doctor"),
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for host in hosts.values():
        assert host.left(5) == []
    return findings(done.stdout)


def test_a_host_that_is_well(over_hosts: Found) -> None:
    found = over_hosts["Host node2"]
    assert {name: finding["status"] for name, finding in found.items()} == dict.fromkeys(
        ["name", "ssh", "versions", "folder", "network", "clock"], "ok"
    )
    assert found["name"]["seen"] == "10.77.0.2"
    assert found["network"]["seen"] == "it connects to this machine's eth0 10.77.0.1"
    assert over_hosts["Host node1"]["ssh"]["seen"] == "not needed: this machine"


@pytest.mark.parametrize(
    ("host", "name", "seen", "fix"),
    [
        ("locked", "ssh", "it refuses your ssh key", "ssh-copy-id locked"),
        ("bare", "Python", "there is no ", "same path"),
        ("nowhere", "ssh", "it cannot be reached", "is it up"),
        ("nobody", "name", "the name nobody cannot be resolved here", "/etc/hosts"),
    ],
)
def test_a_host_that_is_not(host: str, name: str, seen: str, fix: str, over_hosts: Found) -> None:
    finding = over_hosts[f"Host {host}"][name]
    assert finding["status"] == "fail"
    assert seen in finding["seen"]
    assert fix in finding["fix"]


def test_sick_hosts_do_not_reduce(over_hosts: Found) -> None:
    assert over_hosts["All hosts"]["allreduce"]["status"] == "skip"


def test_an_allreduce_over_good_hosts(hosts: dict[str, NamespaceHost], tmp_path: Path) -> None:
    """Only these checks: those before them take half a minute, and are tested above."""
    code = (
        "import os\n"
        "from hvdtrain.doctor.checks import Options\n"
        "from hvdtrain.doctor.horovod_checks import joint_checks\n"
        "options = Options(os.environ, hosts=('node1', 'node2'), interfaces=('eth0',))\n"
        "for check in joint_checks(options):\n"
        "    for finding in check.look():\n"
        "        print(finding.name, finding.status, finding.seen, finding.fix, sep='|')"
    )
    done = subprocess.run(
        hosts["node1"].argv([sys.executable, "-c", code]),
        cwd=tmp_path,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    found = [line.split("|")[:3] for line in done.stdout.splitlines()]
    assert [line[:2] for line in found] == [
        ["allreduce over gloo", "ok"],
        ["allreduce over mpi", "ok"],
    ], done.stdout + done.stderr
    assert all(line[2].startswith("2 ranks, ") for line in found)
    for host in hosts.values():
        assert host.left(5) == []


def test_a_closed_port(hosts: dict[str, NamespaceHost], tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from hvdtrain.doctor.checks import Options\n"
        "from hvdtrain.doctor.remote_hosts import check_host\n"
        "print(check_host('node2', Options(os.environ, ssh_port=2222), 20)[-1])"
    )
    done = subprocess.run(
        hosts["node1"].argv([sys.executable, "-c", code]),
        cwd=tmp_path,
        env={**os.environ, **user_environment()},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert "no ssh server answers there on port 2222" in done.stdout, done.stderr
    assert "--ssh-port" in done.stdout


def test_a_full_shared_memory(hosts: dict[str, NamespaceHost]) -> None:
    code = (
        "import os; from pathlib import Path\n"
        "from hvdtrain.doctor.machine import check_shared_memory\n"
        "print(check_shared_memory(Path('/dev/shm'), os.statvfs))"
    )
    # A mount of its own, which ends with the shell.
    small = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, "-c", code]
    done = hosts["node1"].run(*argv, env=user_environment())
    assert "status='fail', seen='/dev/shm: 1 MB free of 1 MB'" in done.stdout
    assert "--shm-size=1g" in done.stdout
