"""What there is to say about one option of a launch, kept at the field that holds its value.

The type of a field of `LaunchPlan` is `Annotated` with the field's `Option`. The command line, the configuration
file, the checks of the plan and horovodrun's argv are all derived from these, so that an option is
written down once.
"""

from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin

# The sections of `hvdtrain run --help`, in this order.
GROUPS = {
    "basic": "Basic",
    "strategy": "Strategy",
    "hosts": "Hosts",
    "ssh": "Reaching other hosts",
    "elastic": "Elastic training (over Gloo)",
    "tuning": "Tuning",
    "autotune": "Autotuning",
    "timeline": "Timeline",
    "stall": "Ranks that wait for others",
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
    "one worker a host",
    "horovodrun",
]
"""What an option can depend on; `rules` says when each is met."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        group: the section of --help; a key of GROUPS.
        help: one or two sentences.
        flag: horovodrun's flag; for an option that is on or off, the one that switches it on.
        off: horovodrun's flag that switches it off; empty if there is none.
        names: its names at the command line if they are not just --field-name; messages use the
            first. `--on/--off` names a switch.
        aliases: more names, of horovodrun, torchrun and accelerate, which --help does not show. For a
            choice, `--VALUE` makes it.
        metavar: what stands for the value in --help, mostly its unit.
        least, most: bounds of a number, both included.
        needs: without which the option has no effect, and is refused.
        unset: what happens when the option is not given, for --help.
        environment: the variable of Horovod that may set it too. Needed where hvdtrain has a
            default of its own, which would overrule the user's variable.
    """

    group: str
    help: str
    _: KW_ONLY
    flag: str = ""
    off: str = ""
    names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    needs: tuple[Need, ...] = ()
    unset: str = ""
    environment: str = ""


@dataclass(frozen=True)
class Setting:
    """An option together with the field that holds its value.

    Attributes:
        field: the field's name.
        type: the field's type.
        default: the field's default; None if it has none.
    """

    field: str
    type: Any
    default: Any
    option: Option

    @property
    def names(self) -> tuple[str, ...]:
        """Its names at the command line."""
        return self.option.names or (f"--{self.field.replace('_', '-')}",)

    @property
    def name(self) -> str:
        """What a message calls it."""
        return self.names[0].split("/")[0]

    @property
    def is_switch(self) -> bool:
        """On, off, or (when its default is None) left to Horovod."""
        return self.type in (bool, bool | None)


def settings_of(plan: Any) -> list[Setting]:
    """The options of a dataclass (or of an instance), by group, then in the order of its fields."""
    found = []
    for one in fields(plan):
        if get_origin(one.type) is Annotated:
            type_, option = get_args(one.type)
            default = None if one.default is MISSING else one.default
            found.append(Setting(one.name, type_, default, option))
    groups = list(GROUPS)
    return sorted(found, key=lambda setting: groups.index(setting.option.group))
