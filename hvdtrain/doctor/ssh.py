"""Run a command on another host by ssh, without a question to the user, and say plainly why that does not work."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.finding import Finding, fail, ok, warn
from hvdtrain.launch.running.bounded import Ran, run

FAILED = 255
"""ssh's own failures; other exit codes are the command's."""
_CHANGED = "IDENTIFICATION HAS CHANGED"
_UNSEEN = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached; None leaves it to ssh and its configuration."""

    port: int | None = None
    identity_file: Path | None = None

    def options(self, connect_seconds: float) -> list[str]:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(connect_seconds))}"]
        options += ["-p", str(self.port)] if self.port is not None else []
        return options + (["-i", str(self.identity_file)] if self.identity_file is not None else [])

    def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        limit: float,
        environ: Mapping[str, str],
        stdin: str,
        unseen: bool = False,
    ) -> Ran | None:
        """Run `command` there. ssh gives up earlier than we do, and says why.

        Args:
            unseen: accept any host key, and remember none.
        """
        argv = ["ssh", *self.options(limit / 2), *(_UNSEEN if unseen else ()), host]
        return run([*argv, shlex.join(command)], limit=limit, environ=environ, stdin=stdin)


def ssh_finding(host: str, ssh: Ssh, said: Ran | None, limit: float) -> Finding:
    """Could we log in? A command that failed there is not ssh's failure."""
    if said is None:
        return fail("ssh", "there is no ssh in PATH", "install openssh-client")
    if said.returncode is None:
        fix = f"log in by hand: ssh {host}; a slow login (home folder, name service) delays every launch"
        return fail("ssh", f"took longer than {limit:g} s", fix)
    if said.returncode != FAILED:
        return ok("ssh", f"logs in without a question ({said.seconds:.1f} s)")
    seen, fix = _why(host, ssh, said)
    return fail("ssh", seen, fix)


def has_unknown_key(said: Ran | None) -> bool:
    """Whether ssh refused only because it has never seen the host's key."""
    return (
        said is not None
        and said.returncode == FAILED
        and "Host key verification failed" in said.stderr
        and _CHANGED not in said.stderr
    )


def unknown_key_finding(host: str, ssh: Ssh) -> Finding:
    """No failure: a launch accepts the key unseen, as Horovod does. An attacker in the network likes that."""
    port = f" -p {ssh.port}" if ssh.port is not None else ""
    fix = f"compare it, and log in once by hand: ssh{port} {host}"
    return warn("ssh", "its host key is unknown here, and a launch accepts it unseen", fix)


def _why(host: str, ssh: Ssh, said: Ran) -> tuple[str, str]:
    port = f" -p {ssh.port}" if ssh.port is not None else ""
    where = f"port {ssh.port or 22}"
    text = said.stderr
    if _CHANGED in text:
        fix = f"if it was installed anew: ssh-keygen -R {_known_name(host, ssh)}, then ssh{port} {host} once"
        return "its host key is not the one that this machine knows", fix
    if "Host key verification failed" in text:
        return "ssh refuses its host key", f"log in by hand: ssh{port} {host}"
    if "UNPROTECTED PRIVATE KEY FILE" in text:
        fix = f"chmod 600 {ssh.identity_file or '~/.ssh/id_*'}"
        return "ssh refuses a key file that others can read", fix
    if "Permission denied" in text:
        identity = f" -i {ssh.identity_file}" if ssh.identity_file is not None else ""
        fix = f"ssh-copy-id{identity}{port} {host} (or name the right key: --ssh-identity-file)"
        return "it does not accept the key", fix
    if "Connection refused" in text:
        fix = "start sshd there (systemctl start ssh), or name its port: --ssh-port"
        return f"{where} is closed (connection refused)", fix
    if "timed out" in text:
        fix = (
            f"is the host up? If so, a firewall drops {where}: open it, or name another: --ssh-port"
        )
        return f"no answer from {where} (time-out)", fix
    if "No route to host" in text or "Network is unreachable" in text:
        return "there is no way to it in the network", f"is the host up? ping {host}; ip route"
    if "Could not resolve" in text:
        return "its name is unknown", "correct the name, or add it to DNS or /etc/hosts"
    return said.last_line or "it failed without a word", f"log in by hand: ssh -v{port} {host}"


def _known_name(host: str, ssh: Ssh) -> str:
    """As known_hosts writes it."""
    return host if ssh.port in (None, 22) else shlex.quote(f"[{host}]:{ssh.port}")
