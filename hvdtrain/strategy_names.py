"""The strategies by name: what each is for, what it needs, and how a process learns which one it runs under."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import UsageError, did_you_mean

HOROVOD = "horovod"
TPU = "tpu"
CENTRAL_STORAGE = "central-storage"
PARAMETER_SERVER = "parameter-server"

STRATEGY = "HVDTRAIN_STRATEGY"
"""The strategy of a process whose script names none; `hvdtrain run --strategy` sets it."""

REPLICAS = "HVDTRAIN_REPLICAS"
"""How many replicas one process trains (tpu, central-storage); `hvdtrain run -np` sets it for these."""


@dataclass(frozen=True)
class Description:
    """What a user chooses a strategy by.

    Attributes:
        name: what --strategy and `Trainer(strategy=...)` call it.
        purpose: what it is for.
        needs: without which it cannot run.
        replaces: the names in tf.distribute that it stands for.
        runs_as: one process for each device (ranks), for all devices of a machine, or for each role.
        place: of its class, "module:class", which is loaded when it is chosen.
    """

    name: str
    purpose: str
    needs: str
    replaces: tuple[str, ...]
    runs_as: Literal["ranks", "one process", "servers"]
    place: str


STRATEGIES = {
    one.name: one
    for one in (
        Description(
            HOROVOD,
            "Synchronous data parallelism, and model parallelism, on the GPUs or cores of one or more machines.",
            "Horovod: hvdtrain install-horovod",
            ("mirrored", "multi-worker-mirrored"),
            "ranks",
            "hvdtrain.strategies.horovod:HorovodStrategy",
        ),
        Description(
            TPU,
            "Synchronous data parallelism on the cores of a TPU.",
            "a TPU, and the TensorFlow for it",
            (TPU,),
            "one process",
            "hvdtrain.strategies.tpu:TPU",
        ),
        Description(
            CENTRAL_STORAGE,
            "Synchronous training on the GPUs of one machine, with the variables on one device: for variables too "
            "large for a GPU.",
            "two GPUs in this machine, or -np N for N replicas on its cores",
            (CENTRAL_STORAGE,),
            "one process",
            "hvdtrain.strategies.central_storage:CentralStorage",
        ),
        Description(
            PARAMETER_SERVER,
            "Asynchronous training: each worker at its own speed, with the variables on servers. Workers may die and "
            "be restarted.",
            "nothing; options --workers N --ps M",
            (PARAMETER_SERVER,),
            "servers",
            "hvdtrain.strategies.parameter_server:ParameterServer",
        ),
    )
}

ALIASES = {
    "mirrored": "what tf.distribute.MirroredStrategy does on the GPUs of one machine",
    "multi-worker-mirrored": "what tf.distribute.MultiWorkerMirroredStrategy does on several "
    "machines, also for Keras 3 models",
}
"""Names of tf.distribute that Horovod replaces -> why."""


@dataclass(frozen=True)
class Choice:
    """A strategy that was asked for.

    Attributes:
        name: a key of STRATEGIES.
        note: one line for the user when another name stands for it; else empty.
    """

    name: str
    note: str = ""


def choose_strategy(text: str) -> Choice:
    """The strategy that `text` names.

    Upper case, `_` for `-` and the class names of tf.distribute are taken as well. Raises UsageError.
    """
    name = _plain(text)
    if name in STRATEGIES:
        return Choice(name)
    if name in ALIASES:
        return Choice(HOROVOD, f"strategy {name}: using {HOROVOD}, which does {ALIASES[name]}")
    known = [*STRATEGIES, *ALIASES]
    hint = did_you_mean(name, known) or f" Choose from {', '.join(known)}."
    raise UsageError(f"no such strategy: {text!r}.{hint}")


def strategy_of(environ: Mapping[str, str]) -> str:
    """The strategy of this process as its launcher or its user set it; horovod if neither did.

    Raises UsageError.
    """
    text = environ.get(STRATEGY)
    try:
        return choose_strategy(text).name if text else HOROVOD
    except UsageError as error:
        raise UsageError(f"{STRATEGY}: {error}") from None


def replicas_of(environ: Mapping[str, str]) -> int | None:
    """The number of replicas that was asked for, at least 1; None if none was. Raises UsageError."""
    text = environ.get(REPLICAS)
    if not text:
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        raise UsageError(f"{REPLICAS}={text!r}: expected the number of replicas, at least 1")
    return int(text)


def _plain(text: str) -> str:
    """`MultiWorkerMirroredStrategy` and `multi_worker_mirrored` -> `multi-worker-mirrored`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", text.strip())
    return words.replace("_", "-").lower().removesuffix("-strategy")
