"""Names and descriptions of the strategies, and how a process learns which one it runs under."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvdtrain.errors import UsageError, did_you_mean

HOROVOD = "horovod"
TPU = "tpu"
CENTRAL_STORAGE = "central-storage"
PARAMETER_SERVER = "parameter-server"

TPU_CHIPS = ("accel*", "vfio/[0-9]*")
"""Patterns in /dev for the TPU chips of a machine: accelerators of the host, or VFIO groups."""

STRATEGY = "HVDTRAIN_STRATEGY"
"""Strategy of a process whose script names none; `hvdtrain run --strategy` sets it."""

REPLICAS = "HVDTRAIN_REPLICAS"
"""Number of replicas that one process trains (tpu, central-storage); `hvdtrain run -np` sets it for these."""


@dataclass(frozen=True)
class Description:
    """Description of a strategy, by which a user chooses one.

    Attributes:
        name: Name of the strategy in --strategy and `Trainer(strategy=...)`.
        purpose: What the strategy is for.
        needs: What it requires to run.
        replaces: Names of the tf.distribute strategies that it replaces.
        runs_as: "ranks": a process for each device; "one process": one for all devices of a machine; "servers": one
            for each task (chief, workers, parameter servers).
        place: Location of its class, "module:class", imported when the strategy is chosen.
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
"""tf.distribute strategies that Horovod replaces -> what Horovod does in their place."""


class Choice(NamedTuple):
    """Strategy that the user chose, a key of STRATEGIES, and a note for the user if they gave another name for it."""

    name: str
    note: str = ""


def choose_strategy(text: str) -> Choice:
    """Return the strategy that `text` names.

    Upper case, `_` in place of `-`, and the class names of tf.distribute are accepted.

    Raises:
        UsageError: There is no such strategy.
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
    """Return the name of the strategy in HVDTRAIN_STRATEGY; "horovod" if it is not set.

    Raises:
        UsageError: There is no such strategy.
    """
    text = environ.get(STRATEGY)
    try:
        return choose_strategy(text).name if text else HOROVOD
    except UsageError as error:
        raise UsageError(f"{STRATEGY}: {error}") from None


def replicas_of(environ: Mapping[str, str]) -> int | None:
    """Return the number of replicas in HVDTRAIN_REPLICAS; None if it is not set.

    Raises:
        UsageError: The variable is not a number of at least 1.
    """
    text = environ.get(REPLICAS)
    if not text:
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        raise UsageError(f"{REPLICAS}={text!r}: expected the number of replicas, at least 1")
    return int(text)


def _plain(text: str) -> str:
    """Return e.g. `multi-worker-mirrored` for `MultiWorkerMirroredStrategy` and `multi_worker_mirrored`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", text.strip())
    return words.replace("_", "-").lower().removesuffix("-strategy")
