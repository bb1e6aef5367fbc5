"""The agent: one process on each host for the lifetime of a launch.

    [ssh HOST | srun ...] python -m hvdtrain.start.agent LAUNCH_ID

It reads orders from standard input and writes news to standard output, as lines of JSON. The first order is the
greeting (`Greeting`), with the environment and the secrets, which must not appear in a command line; the agent answers
with a report on its host. It watches the ranks that Horovod's launcher starts here, and starts processes itself for
parameter servers. When its input ends, or is silent for SILENCE_SECONDS, the supervisor is gone or cut off: then the
agent ends everything of the launch on this host.

Orders, after the greeting: {"start": number, ...}, {"warn": number} of one process, {"warn": null} of all ranks,
{"stacks": true}, {"end": process id} of a rank, {"signal": number}, {"look": true}. News: {"report": ..., "ports":
[...]}, {"problem": text}, {"output": [number, descriptor, text]}, {"ended": [number, exit code]}, and once a second
{"ranks": [...], "stopped": [programs], "left": [names], "leaving": whether}, of processes that scripts left behind:
which the agent has ended, and whether there are any; with {"answer": true} also after a signal and a look.
"""

from __future__ import annotations

import signal
import sys

from hvdtrain.signals import at_parents_end, outlive_signals


def main() -> None:
    """Serve one launch on this host, and end what is left of it."""
    outlive_signals()  # An agent ends with its input only,
    # also one that is stopped later. One that is stopped before this line stays when its connection has ended: whatever
    # ends it there would have to be started by ssh in front of Python, and is not on every host.
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
