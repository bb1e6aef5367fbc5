"""The lines of `hvdtrain doctor --hosts`: what turns each red, and the fix that is given.

A stand-in for ssh runs the command on this machine, or fails as ssh does; tests/cluster has real hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_programs import path_with

from hvdtrain.doctor import host_probe, remote_hosts
from hvdtrain.doctor.checks import Options, Result
from hvdtrain.doctor.remote_hosts import ask, check_host, check_ssh
from hvdtrain.launch.running.timed_command import run

# Runs the last argument, the command line for the other host, with our standard input.
HERE = 'PATH=/usr/bin:/bin; for command; do :; done; exec /bin/sh -c "exec $command"'
ADDRESS = {"eth0": "127.0.0.1"}


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Result]]:
    """look(ssh's lines, ...) -> findings of a host named node1, which is not this machine."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.9.9.9")
    monkeypatch.setattr(remote_hosts, "is_here", lambda host: False)
    monkeypatch.setattr(host_probe, "interfaces", lambda: ADDRESS)

    def findings(
        lines: str, interfaces: tuple[str, ...] = ("eth0",), limit: float = 20, **options: Any
    ) -> dict[str, Result]:
        environ = path_with(tmp_path / "bin", {"ssh": lines})
        asked = Options({**os.environ, **environ}, interfaces=interfaces, **options)
        return {result.name: result for result in check_host("node1", asked, limit)}

    return findings


def answering(tmp_path: Path, **changed: Any) -> str:
    """A host that answers with these fields instead of its own."""
    own = host_probe.report({"addresses": [], "folder": str(Path.cwd())})
    answer = {**own, "interfaces": {"eth0": "10.9.9.9"}, "reached": ["127.0.0.1"], **changed}
    (tmp_path / "answer").write_text(host_probe.MARKER + json.dumps(answer))
    return f"{shutil.which('cat')} {tmp_path}/answer"


def test_a_host_that_is_well(
    look: Callable[..., dict[str, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_probe, "interfaces", lambda: {"lo": "127.0.0.1"})
    found = look(HERE, interfaces=("lo",))
    assert {name: f.status for name, f in found.items()} == dict.fromkeys(
        ["name", "ssh", "versions", "folder", "network", "clock"], "ok"
    )
    assert found["network"].seen == "it connects to this machine's lo 127.0.0.1"
    assert f"Python {sys.version.split()[0]}" in found["versions"].seen


def test_ssh_is_asked_as_the_user_wants_and_as_a_launch_asks_it(
    look: Callable[..., dict[str, Result]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/my modules")
    key = Path("/my key")
    look(f'echo "$@" > {tmp_path}/argv; exit 255', ssh_port=2222, ssh_identity_file=key, limit=8)
    words = (tmp_path / "argv").read_text()
    assert words.startswith("-o BatchMode=yes -o ConnectTimeout=4 -p 2222 -i /my key node1 env ")
    assert "'PYTHONPATH=/my modules'" in words


@pytest.mark.parametrize(
    ("said", "seen", "fix"),
    [
        (
            "connect to host node1 port 22: Connection refused",
            "no ssh server answers there on port 22",
            "systemctl start ssh",
        ),
        ("connect to host node1 port 22: Connection timed out", "cannot be reached", "firewall"),
        (
            "root@node1: Permission denied (publickey).",
            "it refuses your ssh key",
            "ssh-copy-id node1",
        ),
        (
            "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.",
            "its host key has changed",
            "ssh-keygen -R node1",
        ),
        (
            "WARNING: UNPROTECTED PRIVATE KEY FILE!\nPermission denied",
            "others can read",
            "chmod 600",
        ),
        ("connect to host node1 port 22: No route to host", "cannot be reached", "ping node1"),
        (
            "Could not resolve hostname node1: Name or service not known",
            "its name cannot be resolved",
            "/etc/hosts",
        ),
        ("Connection closed by remote host", "Connection closed by remote host", "ssh -v node1"),
    ],
)
def test_ssh_that_fails(
    said: str, seen: str, fix: str, look: Callable[..., dict[str, Result]]
) -> None:
    found = look(f"echo '{said}' >&2; exit 255")
    assert list(found) == ["name", "ssh"]
    assert found["ssh"].status == "fail"
    assert seen in found["ssh"].seen
    assert fix in found["ssh"].fix


def test_an_unknown_host_key_is_no_failure_for_a_launch_accepts_it(
    look: Callable[..., dict[str, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_probe, "interfaces", lambda: {"lo": "127.0.0.1"})
    strict = (
        'case "$*" in -G*) echo "$policy"; exit;; *StrictHostKeyChecking=accept-new*) ;; '
        '*) echo "$said" >&2; exit 255;; esac'
    )
    said = "said='No ED25519 host key is known.\nHost key verification failed.'"
    asks = "policy='stricthostkeychecking ask'"
    found = look("\n".join([asks, said, strict, HERE]), interfaces=("lo",), ssh_port=2222)
    assert found["ssh"].status == "warn"
    assert "host key is unknown" in found["ssh"].seen
    assert found["ssh"].fix.endswith("ssh -p 2222 node1")
    assert [found[name].status for name in ("versions", "network", "clock")] == ["ok"] * 3
    changed = said.replace("No ED25519 host key is known.", "IDENTIFICATION HAS CHANGED!")
    assert list(look("\n".join([asks, changed, strict, HERE]))) == ["name", "ssh"], "not accepted"
    refuses = "policy='stricthostkeychecking true'"
    found = look("\n".join([refuses, said, strict, HERE]))
    assert found["ssh"].status == "fail", "as a launch would be"
    assert "its host key is not in known_hosts" in found["ssh"].seen


def test_the_port_is_in_the_fix(look: Callable[..., dict[str, Result]]) -> None:
    changed = "echo 'REMOTE HOST IDENTIFICATION HAS CHANGED' >&2; exit 255"
    fix = look(changed, ssh_port=2222)["ssh"].fix
    assert "ssh-keygen -R '[node1]:2222'" in fix
    assert "ssh -p 2222 node1" in fix


def test_ssh_that_hangs(look: Callable[..., dict[str, Result]]) -> None:
    found = look("/bin/sleep 60", limit=0.5)
    assert found["ssh"].seen == "took longer than 0.5 s"
    assert "log in by hand: ssh node1" in found["ssh"].fix


def test_no_ssh_here() -> None:
    finding = check_ssh("node1", Options({}), None, 1)
    assert (finding.status, finding.fix) == ("fail", "install openssh-client")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs openssh-client")
def test_a_closed_port_as_the_real_ssh_says_it() -> None:
    with socket.socket() as sock:
        sock.bind(
            ("127.0.0.1", 0)
        )  # Bound, and not listening: closed, and nobody takes it meanwhile.
        options = Options(os.environ, ssh_port=sock.getsockname()[1])
        said = ask("127.0.0.1", "{}", options, 10)
    finding = check_ssh("127.0.0.1", options, said, 10)
    assert finding.status == "fail"
    port = options.ssh_port
    assert finding.seen == (
        f"no ssh server answers there on port {port} "
        f"(ssh: connect to host 127.0.0.1 port {port}: Connection refused)"
    )


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    (finding,) = check_host("nodd1", Options({}), 1)
    assert (finding.name, finding.status) == ("name", "fail")
    assert "nodd1 cannot be resolved here" in finding.seen
    assert "/etc/hosts" in finding.fix


def test_a_name_with_an_empty_part() -> None:
    (result,) = check_host("node..1", Options({}), 1)
    assert (result.name, result.status) == ("name", "fail")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_machine_needs_no_ssh(name: str) -> None:
    found = {f.name: f for f in check_host(name, Options({"PATH": "/nowhere"}), 1)}
    assert found["ssh"].seen == "not needed: this machine"


def test_no_python_there(look: Callable[..., dict[str, Result]]) -> None:
    found = look(f"echo 'sh: 1: exec: {sys.executable}: not found' >&2; exit 127")
    assert found["ssh"].status == "ok"
    assert found["Python"].status == "fail"
    assert found["Python"].seen == f"there is no {sys.executable} on this host"
    assert "at the same path" in found["Python"].fix


def test_a_login_that_talks_does_no_harm_and_one_that_breaks_is_said(
    look: Callable[..., dict[str, Result]],
) -> None:
    assert look(f"echo Welcome; {HERE}")["versions"].status == "ok"
    broken = look("echo 'Segmentation fault' >&2; exit 139")
    assert (broken["Python"].status, broken["Python"].seen) == ("fail", "Segmentation fault")


def test_other_versions_there(look: Callable[..., dict[str, Result]], tmp_path: Path) -> None:
    own = host_probe.report({"addresses": [], "folder": "/"})["versions"]
    lines = answering(tmp_path, versions={**own, "keras": "3.9.0", "horovod": None})
    finding = look(lines)["versions"]
    assert finding.status == "fail"
    assert f"keras 3.9.0 (here {own['keras']})" in finding.seen
    assert f"horovod missing (here {own['horovod']})" in finding.seen
    assert "same environment" in finding.fix
    elsewhere = look(answering(tmp_path, package="/opt/elsewhere"))["versions"]
    assert "hvdtrain is in /opt/elsewhere there" in elsewhere.seen


@pytest.mark.parametrize(("change", "status"), [(".99", "ok"), ("9.0", "fail")])
def test_another_python_there(
    change: str, status: str, look: Callable[..., dict[str, Result]], tmp_path: Path
) -> None:
    """A launch asks for the same minor version."""
    major, minor, _ = sys.version.split()[0].split(".")
    lines = answering(tmp_path, python=f"{major}.{minor}{change}")
    assert look(lines)["versions"].status == status


def test_an_answer_that_is_cut_off(look: Callable[..., dict[str, Result]]) -> None:
    found = look(f"echo '{host_probe.MARKER}{{\"host\":'; echo 'Killed' >&2; exit 137")
    assert (found["Python"].status, found["Python"].seen) == ("fail", "Killed")


def test_another_folder_there(look: Callable[..., dict[str, Result]], tmp_path: Path) -> None:
    finding = look(answering(tmp_path, folder=False))["folder"]
    assert finding.status == "warn"
    assert "a folder that all hosts share" in finding.fix


def test_wrong_interface(look: Callable[..., dict[str, Result]], tmp_path: Path) -> None:
    finding = look(answering(tmp_path), interfaces=("ib0",))["network"]
    assert finding.status == "fail"
    assert "this machine has no interface ib0 with an address; it has eth0" in finding.seen
    assert "--network-interfaces" in finding.fix
    there = look(answering(tmp_path, host="node1", interfaces={"ens3": "10.9.9.9"}))["network"]
    assert "node1 has no interface eth0 with an address; it has ens3" in there.seen


def test_a_firewall_between_us(look: Callable[..., dict[str, Result]], tmp_path: Path) -> None:
    finding = look(answering(tmp_path, reached=[]))["network"]
    assert finding.status == "fail"
    assert finding.seen == "it cannot connect to this machine's eth0 127.0.0.1"
    assert "open the firewall" in finding.fix


@pytest.mark.parametrize(("shift", "seen"), [(-300.0, "300 s behind"), (300.0, "300 s ahead")])
def test_clock(
    shift: float, seen: str, look: Callable[..., dict[str, Result]], tmp_path: Path
) -> None:
    now = host_probe.report({"addresses": [], "folder": "/"})["time"]
    finding = look(answering(tmp_path, time=now + shift))["clock"]
    assert (finding.status, finding.seen) == ("fail", seen)
    assert "timedatectl set-ntp true" in finding.fix


@pytest.mark.parametrize(
    ("theirs", "status"), [(95.1, "ok"), (94.0, "fail"), (106.9, "ok"), (107.1, "fail")]
)
def test_clock_is_judged_by_what_the_question_took(theirs: float, status: str) -> None:
    """Read at some time between 100 and 102: what it can be ahead or behind at least is what counts."""
    assert remote_hosts.check_clock(theirs, 100.0, 102.0).status == status


def test_the_report_reaches_open_ports_only() -> None:
    with remote_hosts.listening(["127.0.0.1"]) as ((address, port),), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        question = {"addresses": [[address, port]], "folder": "/"}
        assert host_probe.report(question)["reached"] == ["127.0.0.1"]
        question = {"addresses": [["127.0.0.1", closed.getsockname()[1]]], "folder": "/nowhere"}
        answer = host_probe.report(question)
    assert (answer["reached"], answer["folder"]) == ([], False)


def test_the_report_runs_alone_as_a_text_on_standard_input() -> None:
    """As on a host that has nothing of hvdtrain: isolated, without site-packages."""
    question = json.dumps({"addresses": [], "folder": "/"})
    text = Path(host_probe.__file__).read_text()
    argv = [sys.executable, "-I", "-S", "-", question]
    said = run(argv, limit=20, environ={"PATH": "/bin"}, stdin=text)
    assert said is not None
    answer = remote_hosts.answer_of(said)
    assert isinstance(answer, Mapping), said.stderr
    assert answer["versions"]["tensorflow-cpu"] is None
    assert answer["interfaces"]["lo"] == "127.0.0.1"
