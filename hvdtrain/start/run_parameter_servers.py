"""Launch a chief, workers and parameter servers, on this host or on several:

    python -m hvdtrain.start.run_parameter_servers --workers N --ps M [OPTIONS] -- COMMAND...

The chief runs COMMAND on this host; workers and servers run `hvdtrain.start.tf_server` with the same Python. Each gets
TF_CONFIG and its share of the host. An agent on every host (`agent`), reached by ssh or, inside a Slurm job, by srun,
starts and ends them.

When the chief ends, all others are ended, and its exit code is the launch's. A worker that ends earlier is restarted at
its port, up to RESTARTS times in a row. When a server ends, its variables are lost, and the run ends with one message.
A process that is stopped (SIGSTOP) for too long is ended. SIGUSR1 warns the chief. SIGINT, SIGTERM and SIGHUP are
forwarded to the chief, and the others are ended after it, or after HVDTRAIN_GRACE_SECONDS.

Output is marked with the number of its process, as by horovodrun: 0 is the chief, then workers, then servers.
"""

from __future__ import annotations

import sys

from hvdtrain.signals import quit_on_ctrl_c


def main() -> None:
    """Launch, and exit with the chief's exit code."""
    quit_on_ctrl_c()
    from hvdtrain.errors import exit_code_of
    from hvdtrain.start.parts.parameter_server_launcher import launch_roles

    sys.exit(exit_code_of(lambda: launch_roles(sys.argv[1:])))


if __name__ == "__main__":
    main()
