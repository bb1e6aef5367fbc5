"""The script that names an elastic job's hosts: what it prints, and each way in which it fails."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hvdtrain.start.parts import host_discovery
from hvdtrain.start.parts.host_discovery import DiscoveryScript


def test_hosts_and_slots(tmp_path: Path) -> None:
    script = DiscoveryScript("printf 'a\\n\\n b:4 \\n'", 2)
    assert script.find_available_hosts_and_slots() == {"a": 2, "b": 4}
    file = tmp_path / "hosts of mine"
    file.write_text("echo c:1  # no #! here\n")
    file.chmod(0o755)
    found = DiscoveryScript(shlex.quote(str(file)), 2).find_available_hosts_and_slots()
    assert found == {"c": 1}
    assert DiscoveryScript("true", None).find_available_hosts_and_slots() == {}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("cat no-cloud", "failed: cat: no-cloud: No such file or directory"),
        ("sleep 60", "failed: no answer within 1 s"),
        ("echo a:x", "printed 'a:x': expected NAME or NAME:SLOTS"),
        ("echo a b", "printed 'a b': expected NAME or NAME:SLOTS"),
        ("echo a:99999999999", "printed 'a:99999999999': at most 1000000 slots"),
    ],
)
def test_a_script_that_fails(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_discovery, "DISCOVERY_SECONDS", 0.7)
    with pytest.raises(SystemExit):
        DiscoveryScript(command, 1).find_available_hosts_and_slots()
    assert capfd.readouterr().err == f"hvdtrain: --host-discovery-script {command} {said}\n"


def test_a_script_that_fails_later(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1\n")
    script = DiscoveryScript(f"cat {hosts}", 1)
    assert script.find_available_hosts_and_slots() == {"a": 1}
    hosts.unlink()
    for _ in range(2):
        assert script.find_available_hosts_and_slots() == {"a": 1}
    assert capfdbinary.readouterr().err.count(b"keeping the hosts that it printed before") == 1
