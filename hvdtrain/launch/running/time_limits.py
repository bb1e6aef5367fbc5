"""Time limits, in seconds, for the programs of a launch to end before the next step is taken.

Sequence for a run that is interrupted (Ctrl-C), whose scripts handle no signals:

    when                                  who                what it does
    at once                               `hvdtrain run`     forwards the signal to the launch command
    at once                               its supervisor     ends the launcher, and the launch on all other hosts
    REPEAT_SECONDS                          its supervisor     repeats that
    FORWARDING_SECONDS                       `hvdtrain run`     sends SIGTERM to what is left on this host
    FORWARDING_SECONDS + TERM_SECONDS        `hvdtrain run`     sends SIGKILL to it; the run ends within RUN_SECONDS
    TERM_SECONDS, on other hosts          the agent there    sends SIGKILL to what is left there
    END_SECONDS                           its supervisor     stops waiting for agents

Scripts that handle the signal get --grace-seconds more. Each limit exceeds those it waits for, or is their sum.
"""

from __future__ import annotations

START_SECONDS = 30
"""Horovod's default for --start-timeout: time for the hosts to answer."""

SLACK_SECONDS = 1.5
"""Allowance for delivering a signal over ssh on a busy machine."""

TERM_SECONDS = 2.5
"""Time from SIGTERM to SIGKILL."""

FORWARDING_SECONDS = 2.0
"""Time beyond the grace period for a launcher to forward a signal and end its ranks."""

RUN_SECONDS = FORWARDING_SECONDS + TERM_SECONDS
"""Time within which a run ends if its scripts handle no signals."""

COMMAND_SECONDS = RUN_SECONDS + SLACK_SECONDS
"""Time from SIGTERM to SIGKILL for a command that may be `hvdtrain run`, which ends its ranks on all hosts itself."""

END_SECONDS = TERM_SECONDS + SLACK_SECONDS
"""Time for agents to end the launch on their hosts. A slower host is abandoned."""

FAILURE_SECONDS = 3.0
"""Time for the launcher to end the job by itself after a rank reported a failure."""

REPEAT_SECONDS = 2.0
"""Time after which a supervisor repeats a signal. mpirun ignores the first while it starts its ranks, and Horovod's
helpers over Gloo may miss a rank that has just started."""

ENDING_SECONDS = 10.0
"""Time for a launcher to end its ranks when no `hvdtrain run` ends both sooner. mpirun would wait forever for an
unreachable host."""
