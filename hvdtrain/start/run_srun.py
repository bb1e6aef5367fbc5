"""Start ranks with srun, in the environment that horovodrun would give them:

    python -m hvdtrain.start.run_srun OPTIONS srun SRUN-OPTIONS COMMAND...

accepts horovodrun's options; hosts and ssh are left to srun. Over Gloo, Horovod's rendezvous server, through which the
ranks find each other, runs in this process. The ranks get the same environment variables as ranks on other hosts under
horovodrun, and those of a login session; they travel inside Slurm's own messages, not in command lines.

SIGUSR1 and SIGUSR2 are forwarded to every rank. SIGINT, SIGTERM and SIGHUP end the run: each rank gets SIGINT or
SIGTERM, and has HVDTRAIN_GRACE_SECONDS to end; without that variable, or on a second signal, all are killed at once.
The exit code is srun's, or that of the signal.
"""

from __future__ import annotations

import sys

from hvdtrain.signals import quit_on_ctrl_c


def main() -> None:
    """Launch, and exit with srun's exit code."""
    quit_on_ctrl_c()
    from hvdtrain.errors import exit_code_of
    from hvdtrain.start.parts.srun_launcher import launch_tasks

    sys.exit(exit_code_of(lambda: launch_tasks(sys.argv[1:])))


if __name__ == "__main__":
    main()
