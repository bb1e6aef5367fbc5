"""What a launch's options are made of.

Each option is a field of `LaunchPlan`, made by `option`. The command line, the configuration file, the checks of the
plan and horovodrun's argv are all derived from these fields, so that an option is written down once.
"""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

# The sections of `hvdtrain run --help-all`, in this order.
GROUPS = {
    "basic": "Basic",
    "strategy": "Strategy",
    "hosts": "Hosts",
    "output": "Output",
    "ssh": "Reaching other hosts",
    "elastic": "Elastic training (over Gloo)",
    "tuning": "Tuning",
    "autotune": "Autotuning",
    "timeline": "Timeline",
    "stall": "Stalls and hangs",
    "library": "Libraries",
    "logging": "Horovod's log",
    "about": "About this command",
}

Need = Literal[
    "gloo",
    "mpi",
    "elastic",
    "discovery",
    "autotune",
    "timeline",
    "several hosts",
    "one worker per host",
    "horovodrun",
]
"""What an option can depend on; `plan_validation` says when each is met."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, and the field that holds its value.

    Attributes:
        field, type, default: of the field; a default of None may also say that it has none.
        group: the section of --help; a key of GROUPS.
        help: one or two sentences.
        flag: horovodrun's flag, usually `--field-name`; for an option that is on or off, the one that switches it
            on. Empty if there is none.
        off: horovodrun's flag that switches it off, usually `--no-field-name` where None leaves it to Horovod.
        names: its names at the command line, usually `--field-name`; messages use the first. `--on/--off` names a
            switch.
        aliases: more names, of horovodrun, torchrun and accelerate, which --help does not show. For a
            choice, `--VALUE` makes it.
        metavar: the placeholder for the value in --help, usually its unit.
        least, most: bounds of a number, both included.
        needs: without which the option has no effect, and is refused.
        unset: what happens when the option is not given, for --help.
        environment: Horovod's variable that may also set it. Needed where hvdtrain has a
            default of its own, which would overrule the user's variable.
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
    needs: tuple[Need, ...] = ()
    unset: str = ""
    environment: str = ""

    @property
    def name(self) -> str:
        """What a message calls it."""
        return self.names[0].split("/")[0]

    @property
    def is_switch(self) -> bool:
        """On, off, or (when its default is None) left to Horovod."""
        return self.type in (bool, bool | None)


def option(group: str, help: str, default: Any = None, **about: Any) -> Any:
    """A dataclass field that is an option; `about` holds attributes of `Option`. MISSING: no default."""
    return field(default=default, metadata={"group": group, "help": help, **about})


def options_of(plan: Any) -> list[Option]:
    """The options of a dataclass (or of an instance), by group, then in the order of its fields."""
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
