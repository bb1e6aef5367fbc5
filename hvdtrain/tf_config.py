"""TF_CONFIG: the variable by which the TensorFlow processes of a parameter server job find each other.

    {"cluster": {"chief": ["a:1"], "worker": ["a:2", "b:2"], "ps": ["a:3"]}, "task": {"type": "worker", "index": 0}}

Cluster managers (Kubeflow, Vertex AI, ...) set it for each process, and so does `hvdtrain run --strategy
parameter-server`. See https://www.tensorflow.org/guide/distributed_training.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import UsageError

TF_CONFIG = "TF_CONFIG"
CHIEF, WORKER, SERVER = "chief", "worker", "ps"


@dataclass(frozen=True)
class TfConfig:
    """Cluster of a job with parameter servers, and the task of this process in it.

    Attributes:
        chief: Address ("host:port") of the process that runs the user's script.
        workers: Addresses of the processes that compute.
        servers: Addresses of the processes that hold the variables.
        kind: Task type of this process: "chief", "worker" or "ps".
        index: Number of this process among those of its type, from 0.
    """

    chief: str
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    kind: str
    index: int

    @property
    def cluster(self) -> dict[str, list[str]]:
        """The cluster as in TF_CONFIG: task type -> addresses."""
        return {CHIEF: [self.chief], WORKER: list(self.workers), SERVER: list(self.servers)}

    @property
    def name(self) -> str:
        """Name of this process, for messages."""
        return CHIEF if self.kind == CHIEF else f"{self.kind} {self.index}"


def read_tf_config(environ: Mapping[str, str]) -> TfConfig | None:
    """Parse TF_CONFIG; return None if it is not set or has no cluster.

    Raises:
        UsageError: TF_CONFIG is malformed, or does not describe a job with parameter servers.
    """
    text = environ.get(TF_CONFIG)
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{TF_CONFIG} is not JSON: {error}: {text[:200]}") from None
    cluster = found.get("cluster") if isinstance(found, dict) else None
    if not cluster:
        return None
    chief = _addresses(cluster, CHIEF)
    if len(chief) != 1:
        raise UsageError(f"{TF_CONFIG}: there must be one chief, not {len(chief)}")
    workers, servers = _addresses(cluster, WORKER), _addresses(cluster, SERVER)
    kind, index = _task(found.get("task"))
    known = {CHIEF: chief, WORKER: workers, SERVER: servers}
    if kind not in known:
        raise UsageError(f"{TF_CONFIG}: the task's type is {kind!r}, not one of {', '.join(known)}")
    if not 0 <= index < len(known[kind]):
        raise UsageError(
            f"{TF_CONFIG}: there is no {kind} {index}: the cluster has {len(known[kind])} of them"
        )
    return TfConfig(chief[0], workers, servers, kind, index)


def answers(address: str, seconds: float = 3.0) -> bool:
    """Whether a process listens at `address` ("host:port"); waits at most `seconds` for the connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds):
            return True
    except OSError:
        return False


def lost_server(text: str, config: TfConfig) -> str | None:
    """Return a message if `text`, of a TensorFlow error, says that a parameter server is lost; otherwise None."""
    found = re.search(r"/job:ps/replica:0/task:(\d+)", text)
    return None if found is None else describe_lost(int(found[1]), config)


def describe_lost(server: int, config: TfConfig) -> str:
    """Return the message for the loss of parameter server number `server`."""
    return (
        f"Parameter server {server} ({config.servers[server]}) is lost, and with it the variables "
        "that it held: the run cannot continue. Trainer.load resumes from the last file that "
        "ModelCheckpoint wrote"
    )


def _addresses(cluster: Any, kind: str) -> tuple[str, ...]:
    """Return the addresses of one task type, given as a list or as an object with the indices as keys."""
    if not isinstance(cluster, dict):
        raise UsageError(f"{TF_CONFIG}: the cluster must be an object, not {cluster!r}")
    entries = cluster.get(kind) or []
    if isinstance(entries, dict) and all(map(str.isdecimal, entries)):
        entries = [entries[key] for key in sorted(entries, key=int)]
    if not isinstance(entries, list):
        raise UsageError(f"{TF_CONFIG}: the addresses of {kind} must be a list, not {entries!r}")
    for entry in entries:
        host, _, port = entry.rpartition(":") if isinstance(entry, str) else ("", "", "")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(
                f"{TF_CONFIG}: the address of a {kind} must be host:port, not {entry!r}"
            )
    if not entries:
        raise UsageError(
            f"{TF_CONFIG}: the cluster has no {kind}: a job with parameter servers needs a chief, workers and ps"
        )
    return tuple(entries)


def _task(task: Any) -> tuple[str, int]:
    try:
        return str(task["type"]), int(task["index"])
    except (TypeError, KeyError, ValueError):
        raise UsageError(
            f'{TF_CONFIG}: the task must be {{"type": ..., "index": ...}}, not {task!r}'
        ) from None
