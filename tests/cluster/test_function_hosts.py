"""`hvdtrain.launch` over ssh: ranks on two hosts, whose key stands in no command line."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import user_environment
from namespaces import NamespaceHost

SCRIPT = """
import contextlib, os, pathlib, secrets, sys
import hvdtrain

def place():
    words = b""
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words += process.read_bytes()
    return os.uname().nodename, key.encode() in words, "HVDTRAIN_FUNCTION_KEY" in os.environ

key, secrets.token_bytes = "ab" * 32, lambda size: bytes([0xAB]) * size
controller, folder = sys.argv[1:]
found = hvdtrain.launch(place, hosts="node1:1,node2:1", controller=controller, log_dir=folder)
assert found == [("node1", False, False), ("node2", False, False)], found
"""


def test_ranks_of_two_hosts(
    hosts: dict[str, NamespaceHost], tmp_path: Path, controller: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    hosts["node1"].run(
        sys.executable,
        str(tmp_path / "script.py"),
        controller,
        str(tmp_path / "logs"),
        env=user_environment(),
        timeout=100,
    )
