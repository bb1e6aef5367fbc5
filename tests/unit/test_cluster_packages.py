"""scripts/cluster_packages.sh asks apt-get only for what is missing, and only as root."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/cluster_packages.sh"


def call(folder: Path, *, user: int = 0, absent: str = "", broken: int = 0) -> tuple[str, str]:
    """Run it with programs that only note how they are called; returns the notes, what it said."""
    notes = folder / "notes"
    programs = {
        "id": f"echo {user}",
        "dpkg-query": f'for p; do :; done; [ "$p" != "{absent}" ] && echo "install ok installed"',
        "apt-get": f'echo "$*" >>"{notes}"; [ "$1" = update ] || exit {broken}',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        [SCRIPT],
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return notes.read_text() if notes.exists() else "", done.stdout + done.stderr


# With this file there, as in container images, the script writes nothing outside of a temporary one.
quiet_debian = pytest.mark.skipif(
    not (Path("/etc/debian_version").exists() and Path("/usr/sbin/policy-rc.d").exists()),
    reason="needs Debian or Ubuntu with /usr/sbin/policy-rc.d",
)


def test_nothing_happens_for_other_users(tmp_path: Path) -> None:
    assert call(tmp_path, user=1000, absent="munge") == ("", "")


def test_nothing_happens_when_all_is_there(tmp_path: Path) -> None:
    assert call(tmp_path) == ("", "")


@quiet_debian
def test_only_what_is_missing_is_installed(tmp_path: Path) -> None:
    asked, said = call(tmp_path, absent="munge")
    assert asked == "install --yes --quiet --no-install-recommends munge\n"
    assert said == "cluster_packages.sh: installing munge\n"


@quiet_debian
def test_the_lists_are_fetched_once_and_a_failure_is_no_error(tmp_path: Path) -> None:
    asked, said = call(tmp_path, absent="munge", broken=100)
    assert [line.split()[0] for line in asked.splitlines()] == ["install", "update", "install"]
    assert "the tests that need them will be skipped" in said
