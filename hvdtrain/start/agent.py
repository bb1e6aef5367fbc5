"""The agent: one process on each host for the lifetime of a launch.

    [ssh HOST | srun ...] python -m hvdtrain.start.agent LAUNCH_ID

It reads orders from standard input and writes news to standard output, as lines of JSON. The first order is the
greeting (`Greeting`), with the environment and the secrets, which must not appear in a command line; the agent answers
with a report on its host. It monitors the ranks that Horovod's launcher starts here, and starts processes itself for
parameter servers. When its input ends, or is silent for SILENCE_SECONDS, the supervisor is gone or cut off, and the
agent ends everything of the launch on this host.

Orders, after the greeting: {"start": number, ...}, {"warn": number} for one process, {"warn": null} for all ranks,
{"stacks": true}, {"end": process ID} for a rank, {"signal": number}, {"look": true}. News: {"report": ..., "ports":
[...]}, {"problem": text}, {"output": [number, descriptor, text]}, {"ended": [number, exit code]}, and once a second
{"ranks": [...], "stopped": [programs], "left": [names], "leaving": bool}. The last two are about processes that scripts
left behind: those that the agent has ended, and whether there are any. After a signal or a look, the same is sent with
{"answer": true}.
"""

from __future__ import annotations

import signal
import sys

from hvdtrain.signals import at_parents_end, outlive_signals


def main() -> None:
    """Serve one launch on this host, then end what is left of it."""
    # Only the end of its input ends an agent.
    outlive_signals()
    # A stopped agent is continued when its connection ends, to notice it. One that was stopped before this line
    # remains: ending it would take another program between ssh and Python, which not every host has.
    at_parents_end(signal.SIGCONT)()
    from hvdtrain.start.parts.host_agent import Agent

    agent = Agent(sys.argv[1])
    try:
        agent.serve()
    except BrokenPipeError:
        pass
    finally:
        agent.end()


if __name__ == "__main__":
    main()
