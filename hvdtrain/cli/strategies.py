"""`hvdtrain strategies`: list the strategies to distribute training, and which of them work here."""

from __future__ import annotations

import importlib.util
import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

import click

from hvdtrain.errors import HvdtrainError
from hvdtrain.host_limits import available_cores
from hvdtrain.launch.devices import tpu_here, visible_gpus
from hvdtrain.launch.installed_horovod import installed_controllers
from hvdtrain.strategy_names import (
    CENTRAL_STORAGE,
    HOROVOD,
    STRATEGIES,
    TPU,
    Description,
)

_WIDTH = 80
_MARGIN = " " * 18


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that strategies depend on.

    Attributes:
        cores: Number of cores that a program may use.
        gpus: Number of GPUs that a program may use.
        tpu: How a TPU can be reached; empty if there is none.
        horovod: Controllers that Horovod was built with; empty if there is no working Horovod.
        without_horovod: Reason why there is no Horovod.
        tensorflow: Whether TensorFlow is installed.
    """

    cores: int
    gpus: int
    tpu: str
    horovod: tuple[str, ...]
    without_horovod: str
    tensorflow: bool


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def strategies(as_json: bool) -> None:
    """List the strategies of `hvdtrain run --strategy` and `Trainer(strategy=...)`: what each is for, what it needs,
    and whether this machine has it."""
    machine = this_machine(os.environ)
    click.echo(json_text(machine) if as_json else table(machine))


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Inspect this machine without importing TensorFlow."""
    horovod: tuple[str, ...] = ()
    without = ""
    try:
        horovod = tuple(sorted(installed_controllers()))
    except HvdtrainError as error:
        without = str(error)
    return Machine(
        cores=available_cores(),
        gpus=len(visible_gpus(environ)),
        tpu=tpu_here(environ),
        horovod=horovod,
        without_horovod=without,
        tensorflow=importlib.util.find_spec("tensorflow") is not None,
    )


def here(name: str, machine: Machine) -> tuple[bool, str]:
    """Return whether a strategy works on this machine, and what it would use, or what is missing."""
    if not machine.tensorflow:
        return False, "TensorFlow is not installed"
    if not machine.horovod:
        return False, machine.without_horovod  # The Trainer loads Horovod with every strategy.
    gpus, cores = _count(machine.gpus, "GPU"), _count(machine.cores, "core")
    devices = gpus if machine.gpus else cores
    if name == HOROVOD:
        built = " and ".join({"mpi": "MPI", "gloo": "Gloo"}[one] for one in machine.horovod)
        return True, f"over {built}, on {devices}"
    if name == TPU:
        return bool(machine.tpu), machine.tpu or "no TPU device file, and TPU_NAME is not set"
    if name == CENTRAL_STORAGE:
        found = machine.gpus >= 2
        return found, f"on {gpus}" if found else f"{gpus}; use -np N for replicas on {cores}"
    return True, f"on {devices}"


def table(machine: Machine) -> str:
    """Format the strategies as text, at most 80 columns wide."""
    return "\n\n".join(_entry(one, machine) for one in STRATEGIES.values())


def json_text(machine: Machine) -> str:
    """Format the strategies as a JSON list, with what each needs and whether it works here."""
    rows = []
    for one in STRATEGIES.values():
        found, what = here(one.name, machine)
        rows.append(
            {
                "name": one.name,
                "for": one.purpose,
                "needs": one.needs,
                "replaces": list(one.replaces),
                "here": found,
                "found": what,
            }
        )
    return json.dumps(rows, indent=2)


def _entry(one: Description, machine: Machine) -> str:
    found, what = here(one.name, machine)
    lines = [
        *_wrapped(one.purpose),
        *_wrapped(f"needs: {one.needs}"),
        *_wrapped(f"here:  {'yes' if found else 'no'}: {what}"),
    ]
    if one.replaces != (one.name,):
        lines += _wrapped(f"also called: {', '.join(one.replaces)}")
    return "\n".join([f"{one.name:<{len(_MARGIN)}}{lines[0].strip()}", *lines[1:]])


def _wrapped(text: str) -> list[str]:
    further = _MARGIN + (" " * 7 if text.startswith(("needs:", "here:")) else "")
    return textwrap.wrap(
        text, _WIDTH, initial_indent=_MARGIN, subsequent_indent=further, break_on_hyphens=False
    )


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
