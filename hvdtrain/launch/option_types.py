"""Declare the options of a launch.

Each option is a field of `LaunchPlan`, declared with `option`. The command line, the configuration file, the validation
of the plan and horovodrun's argv are all derived from these fields, so each option is defined once.
"""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

# Sections of `hvdtrain run --help-all`, in order.
GROUPS = {
    "basic": "Basic",
    "strategy": "Strategy",
    "hosts": "Hosts",
    "output": "Output",
    "ssh": "Reaching other hosts",
    "adopt": "Adopted scripts",
    "elastic": "Elastic training (over Gloo)",
    "tuning": "Tuning",
    "autotune": "Autotuning",
    "timeline": "Timeline",
    "stall": "Stalls and hangs",
    "library": "Libraries",
    "logging": "Horovod's log",
    "about": "About this command",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, and the field that holds its value.

    Attributes:
        field, type, default: Name, type and default of the field. A default of None may also mean that there is none.
        group: Section of --help; a key of GROUPS.
        help: Help text, one or two sentences.
        flag: horovodrun's flag, by default `--field-name`; for a switch, the flag that turns it on. Empty if there
            is none.
        off: horovodrun's flag that turns a switch off, by default `--no-field-name` where None leaves it to Horovod.
        names: Names on the command line, by default `--field-name`; messages use the first. A switch is written
            `--on/--off`.
        aliases: Additional names from horovodrun, torchrun and accelerate, not shown by --help. For a choice,
            `--VALUE` selects that value.
        metavar: Placeholder for the value in --help, usually its unit.
        least, most: Inclusive bounds of a number.
        needs: Prerequisites without which the option has no effect and is rejected: keys of
            `plan_validation.CONDITIONS`.
        unset: Text for --help about what happens without the option.
        environment: Horovod's environment variable for the same setting. Needed where hvdtrain has its
            own default, which would override the user's variable.
    """

    field: str
    type: Any
    default: Any
    group: str
    help: str
    flag: str
    off: str
    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    needs: tuple[str, ...] = ()
    unset: str = ""
    environment: str = ""

    @property
    def name(self) -> str:
        """The name to use in messages."""
        return self.names[0].split("/")[0]

    @property
    def is_switch(self) -> bool:
        """Whether the option is on or off, or left to Horovod if its default is None."""
        return self.type in (bool, bool | None)


def option(group: str, help: str, default: Any = None, **about: Any) -> Any:
    """Declare a dataclass field as an option. `about` sets attributes of `Option`; MISSING means no default."""
    return field(default=default, metadata={"group": group, "help": help, **about})


def options_of(plan: Any) -> list[Option]:
    """Return the options of a dataclass or an instance, by group, then in field order."""
    groups = list(GROUPS)
    found = [_option_of(one) for one in fields(plan) if one.metadata]
    return sorted(found, key=lambda option: groups.index(option.group))


def _option_of(one: Field[Any]) -> Option:
    name = one.name.replace("_", "-")
    usual = {
        "default": None if one.default is MISSING else one.default,
        "flag": f"--{name}",
        "off": f"--no-{name}" if one.type == bool | None else "",
        "names": (f"--{name}",),
    }
    return Option(field=one.name, type=one.type, **{**usual, **one.metadata})
