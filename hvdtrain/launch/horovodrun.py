"""LaunchPlan -> horovodrun's options. A pure function.

Horovod puts some values as they are into a line for a shell. Those are quoted here, so that the
shell gives back what the plan says; `rules` refuses what cannot be quoted.
"""

import shlex

from hvdtrain.launch.options import Setting, settings_of
from hvdtrain.launch.plan import LaunchPlan
from hvdtrain.launch.rules import mpi_words

_HOROVODS_START_TIMEOUT = 30
_SECONDS_FOR_A_FURTHER_HOST = 2
COOLDOWN = (10, 300)
"""Horovod's own default is never to use a host again on which a single rank has failed."""


def horovodrun_options(plan: LaunchPlan) -> list[str]:
    """The options of horovodrun 0.28.1 that say what `plan` says, without the command."""
    return [word for setting in settings_of(plan) for word in _words(plan, setting)]


def start_timeout(wanted: int | None, hosts: int) -> int | None:
    """Seconds for so many hosts to answer; None leaves it to Horovod (30).

    Horovod reaches the hosts from one process, a thread each; what it does then for each host
    (fork, ssh, pickle) takes one to two seconds of that process's time with many hosts.
    """
    if wanted is not None or hosts < 2:
        return wanted
    return _HOROVODS_START_TIMEOUT + _SECONDS_FOR_A_FURTHER_HOST * (hosts - 1)


def _words(plan: LaunchPlan, setting: Setting) -> list[str]:
    """The words of one option: those that are not just a flag and its value come first."""
    flag, value = setting.option.flag, getattr(plan, setting.field)
    match setting.field:
        case "controller":
            return [f"--{plan.controller}"]
        case "start_timeout":
            value = start_timeout(plan.start_timeout, len(plan.hosts))
        case "min_np" if plan.elastic:
            value = plan.min_np or plan.np  # horovodrun takes --max-np alone as not elastic.
        case "slots_per_host" if plan.host_discovery_script:
            value = plan.slots_per_host or 1  # horovodrun fails at a host without slots.
        case "blacklist_cooldown_range" if plan.elastic:
            value = plan.blacklist_cooldown_range or COOLDOWN
        case "stall_warning_seconds" | "stall_shutdown_seconds" if not plan.stall_check:
            return []
        case "host_discovery_script" if value is not None:
            # Run by a shell, which would look for a bare name in PATH.
            value = shlex.quote(str(value.absolute()))
        case "output_filename" if value is not None and plan.controller == "mpi":
            value = shlex.quote(str(value))
        case "mpi_args" | "binding_args" if value is not None:
            # horovodrun's parser takes a value that begins with '-' only behind '='.
            return [f"{flag}={shlex.join(mpi_words(flag, value))}"]
    if not flag and not setting.option.off:
        return []
    return _plain_words(setting, value)


def _plain_words(setting: Setting, value: object) -> list[str]:
    flag, off = setting.option.flag, setting.option.off
    match value:
        case None | ():
            return []
        case True:
            return [flag] if flag else []
        case False:
            return [off] if off else []
        case (int(), int()):
            return [flag, *map(str, value)]
        case tuple():
            value = ",".join(map(str, value))
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]
