"""ssh: its options for launches and the doctor, and its error messages, with their causes and remedies.

ssh uses the user's own configuration. One setting is overridden: a changed host key is always refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hvdtrain.launch.running.timed_command import ask

SSH_FAILED = 255
"""ssh's exit code for its own failures; any other is the remote command's."""
SSH_PORT = 22
BATCH = ("-o", "BatchMode=yes")
"""Disables prompts, which nobody would answer."""
ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""Detects a broken connection within 30 s."""
ACCEPT_NEW = ("-o", "StrictHostKeyChecking=accept-new")
"""Accepts and remembers an unknown host key, and refuses a changed one."""
_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")
# Pattern, cause and fix. The first match counts, since ssh may print several of these at once. {login} is the
# command that logs in to the host, {known} its name in known_hosts, {options} ssh's options for port and key.
_CATALOGUE = (
    (
        r"remote host identification has changed|host key for \S+ has changed",
        "its host key has changed",
        "if the host was reinstalled, run ssh-keygen -R {known}, and log in once: {login}; "
        "if not, another machine answers in its place",
    ),
    (
        r"host key verification failed|no \S+ host key is known for",
        "its host key is not in known_hosts",
        "compare the key, and log in once by hand: {login}",
    ),
    (
        r"unprotected private key file",
        "ssh refuses a key file that others can read",
        "chmod 600 {key}",
    ),
    (
        r"identity file .* not accessible",
        "the identity file does not exist",
        "name the right file with --ssh-identity-file",
    ),
    (
        r"permission denied \(|too many authentication failures",
        "it refuses your ssh key",
        "ssh-copy-id{options} {host}, or name the right key with --ssh-identity-file; "
        "ssh -o BatchMode=yes{options} {host} true must succeed without a prompt",
    ),
    (
        r"connection refused",
        "no ssh server answers there on port {port}",
        "start sshd there (systemctl start ssh), or set its port with --ssh-port",
    ),
    (
        r"timed out|no route to host|network is unreachable|host is down",
        "it cannot be reached",
        "is it up and in this network? ping {host}; a firewall may drop port {port}: "
        "open it, or use another with --ssh-port",
    ),
    (
        r"could not resolve hostname",
        "its name cannot be resolved",
        "correct the name, or add it to DNS or /etc/hosts",
    ),
)
# Messages in which ssh itself names the host.
_NAMED = re.compile(
    r"connect to host (\S+) port|could not resolve hostname (\S+):|\S+@(\S+): permission denied|"
    r"host key for (\S+) has changed|host key is known for (\S+) and",
    re.IGNORECASE,
)


class SshError(NamedTuple):
    """Why ssh failed, with ssh's own line in parentheses, and what to do about it."""

    cause: str
    fix: str


def where(port: int | None, identity_file: object | None) -> list[str]:
    """Return the options for port and key; None leaves them to ssh and its configuration."""
    return [
        *(["-p", str(port)] if port is not None else []),
        *(["-i", str(identity_file)] if identity_file is not None else []),
    ]


def path_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the interpreter and its modules are found on another host."""
    return {name: environ[name] for name in _PATHS if name in environ}


def unseen_keys(
    host: str,
    port: int | None = None,
    identity_file: object | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Return ACCEPT_NEW, or nothing if the user's configuration is as strict (`accept-new`) or stricter (`yes`).

    With `ask`, nobody is there to answer. With `no`, ssh would connect to a host whose key has changed, exposing the
    launch's secrets to it.
    """
    said = ask(["ssh", "-G", *where(port, identity_file), host], environ=environ)
    lax = {"stricthostkeychecking ask", "stricthostkeychecking false"}
    return ACCEPT_NEW if lax & set(said.answer.splitlines()) else ()


def explain_ssh(
    host: str, said: str, port: int | None = None, identity_file: object | None = None
) -> SshError:
    """Explain ssh's standard error, given that its exit code is SSH_FAILED."""
    options = f" -p {port}" if port is not None else ""
    with_key = f" -i {identity_file}" if identity_file is not None else ""
    words = {
        "host": host,
        "port": port or SSH_PORT,
        "options": with_key + options,
        "login": f"ssh{options} {host}",
        "known": host if port in (None, SSH_PORT) else shlex.quote(f"[{host}]:{port}"),
        "key": identity_file or "~/.ssh/id_*",
    }
    for line, cause, fix in _known_errors(said):
        return SshError(f"{cause.format(**words)} ({line})", fix.format(**words))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return SshError(f"ssh failed: {last}", f"log in by hand: ssh -v{options} {host}")


def ssh_error_in(launcher_text: str) -> str:
    """Explain the error of an ssh that a launcher started, found in the launcher's output. Empty if there is none.

    mpirun itself prints a page of possible causes.
    """
    for line, _, _ in _known_errors(launcher_text):
        if named := _NAMED.search(line):
            host = next(filter(None, named.groups()))
            error = explain_ssh(host, line)
            return f"host {host}: {error.cause}: {error.fix}"
    return ""


def is_unknown_key(said: str) -> bool:
    """Return whether ssh refused only because it has never seen the host's key."""
    lower = said.lower()
    return "host key verification failed" in lower and "has changed" not in lower


def _known_errors(said: str) -> Iterator[tuple[str, str, str]]:
    """Yield (ssh's line, cause, fix) for each known error, the most specific first."""
    for pattern, cause, fix in _CATALOGUE:
        lines = [line for line in said.splitlines() if re.search(pattern, line, re.IGNORECASE)]
        if lines:
            said_by_name = [line for line in lines if _NAMED.search(line)]
            yield (said_by_name or lines)[-1].strip(" @\t\r"), cause, fix
