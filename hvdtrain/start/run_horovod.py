"""Run Horovod's own launcher, supervised, with what horovodrun would have to find out:

    python -m hvdtrain.start.run_horovod OPTIONS COMMAND...

accepts the arguments of horovodrun, and replaces it. The differences:

- What Horovod was built with is read from its extension; horovodrun imports TensorFlow to find out (3
  to 4 seconds).
- Only a fixed set of environment variables, and those named in HVDTRAIN_FORWARD, are forwarded to other
  hosts (see `hvdtrain.launch.env_forwarding`), and no value that looks secret appears in a command line;
  horovodrun puts every variable there.
- Each of the other hosts is asked once, all in parallel, whether it can run ranks (`agents`). This
  replaces Horovod's five attempts at ssh and its search for a common interface, and the agent leaves
  nothing of the launch behind on its host.
- SIGUSR1 warns every rank, on all hosts.
"""

from __future__ import annotations

import sys

from hvdtrain.signals import listen_for_warnings, quit_on_ctrl_c


def main() -> None:
    """Launch, and exit with the launch's exit code."""
    quit_on_ctrl_c()
    listen_for_warnings()
    # Kept light: Horovod starts a helper process per rank over Gloo, which loads this module again.
    from hvdtrain.errors import exit_code_of
    from hvdtrain.start.parts.horovod_launcher import launch_ranks

    sys.exit(exit_code_of(lambda: launch_ranks(sys.argv[1:])))


if __name__ == "__main__":
    main()
