"""Run the user's script that prints the hosts of an elastic job, with a time limit and one-line errors."""

from __future__ import annotations

import re
import shlex

from hvdtrain.errors import EngineError
from hvdtrain.launch.hosts import MOST_SLOTS
from hvdtrain.launch.running.timed_command import ask
from hvdtrain.start.parts.output_tags import say, tell

DISCOVERY_SECONDS = 30.0
"""Time limit of the script. Horovod has none, and would block on it."""
_LINE = re.compile(r"(?P<host>[^: ]+)(:(?P<slots>\d{0,99}))?", re.ASCII)


class DiscoveryScript:
    """Replacement for Horovod's HostDiscoveryScript.

    Args:
        command: Command line, split as in a shell, of a program that prints NAME or NAME:SLOTS, one host per line.
        slots: Slots of a host printed without a number. None means 1.
    """

    def __init__(self, command: str, slots: int | None) -> None:
        self._command = command
        self._slots = slots or 1
        self._found: dict[str, int] | None = None
        self._problem = ""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script and return the slots of each host. If it fails, return those of its last successful run.

        Raises:
            SystemExit: The first run failed. Ends Horovod's thread without a traceback, and thus the job.
        """
        try:
            self._found, self._problem = self._ask(), ""
        except EngineError as error:
            if self._found is None:
                tell(str(error))
                raise SystemExit from None
            if str(error) != self._problem:
                self._problem = str(error)
                say(f"{error}; keeping the hosts that it printed before")
        return self._found

    def _ask(self) -> dict[str, int]:
        # env runs scripts without #! with sh, as a shell does.
        ran = ask(["env", *shlex.split(self._command)], limit=DISCOVERY_SECONDS)
        name = f"--host-discovery-script {self._command}"
        if ran.returncode != 0:
            raise EngineError(f"{name} failed: {ran.last_line}")
        found = {}
        for line in filter(None, map(str.strip, ran.stdout.splitlines())):
            match = _LINE.fullmatch(line)
            if match is None:
                raise EngineError(f"{name} printed {line[:80]!r}: expected NAME or NAME:SLOTS")
            found[match["host"]] = slots = int(match["slots"] or self._slots)
            if slots > MOST_SLOTS:
                raise EngineError(f"{name} printed {line[:80]!r}: at most {MOST_SLOTS} slots")
        return found
