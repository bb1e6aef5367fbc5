"""How long each program of a launch waits for those below it to end, until it takes the next step. Seconds.

A run that is told to end (Ctrl-C), whose scripts handle no signals:

    when                                  who                what it does
    at once                               `hvdtrain run`     sends the signal on to the launch command
    at once                               its supervisor     ends the launcher, and the launch on all other hosts
    DEAF_SECONDS                          its supervisor     repeats that
    PASSING_SECONDS                       `hvdtrain run`     sends SIGTERM to what is left on this host
    PASSING_SECONDS + TERM_SECONDS        `hvdtrain run`     sends it SIGKILL: the run is over, within RUN_SECONDS
    TERM_SECONDS, on other hosts          the agent there    sends SIGKILL to what is left there
    END_SECONDS                           its supervisor     no longer waits for agents

Scripts that handle the signal get --grace-seconds more. Each is longer than what it waits for, or made of it.
"""

from __future__ import annotations

SLACK_SECONDS = 1.5
"""For the way of a signal over ssh, on a busy machine."""

TERM_SECONDS = 2.5
"""From SIGTERM to SIGKILL."""

PASSING_SECONDS = 2.0
"""How much longer than the grace a launcher may take to pass a signal on, and to end its ranks."""

RUN_SECONDS = PASSING_SECONDS + TERM_SECONDS
"""A run whose scripts handle no signals is gone."""

COMMAND_SECONDS = RUN_SECONDS + SLACK_SECONDS
"""From SIGTERM to SIGKILL for a command that may be `hvdtrain run`, which ends its ranks on all hosts itself."""

END_SECONDS = TERM_SECONDS + SLACK_SECONDS
"""For agents to end the launch on their hosts; a host that takes longer is left behind."""

FAILURE_SECONDS = 3.0
"""For the launcher to end the job by itself, after a rank reported a failure."""

DEAF_SECONDS = 2.0
"""After which a supervisor repeats the signal. The first one has no effect while mpirun starts its ranks, and Horovod's
helpers over Gloo may miss a rank that they have just started."""

ENDING_SECONDS = 10.0
"""For a launcher to end its ranks, if no `hvdtrain run` is there that ends both before. mpirun would wait forever for a
host that is cut off."""
