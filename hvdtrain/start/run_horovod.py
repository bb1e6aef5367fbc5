"""Horovod's own launcher, given what horovodrun would have to find out, and supervised:

    python -m hvdtrain.start.run_horovod OPTIONS COMMAND...

accepts the arguments of horovodrun, and takes its place. The differences:

- What Horovod was built with is read off its extension; horovodrun imports TensorFlow to ask (3 to
  4 seconds).
- Only a named set of environment variables, and those that HVDTRAIN_FORWARD names, go to other hosts (see
  `hvdtrain.launch.env_forwarding`), and no value that looks secret stands in a command line; horovodrun
  puts every variable there.
- Each of the other hosts is asked once, all at a time, whether it can run ranks (`agents`); this
  takes the place of Horovod's five attempts at ssh and of its search for a common interface, and
  its agent leaves nothing of the launch behind there.
- SIGUSR1 warns every rank, on all hosts.
"""

from __future__ import annotations

import sys

from hvdtrain.signals import listen_for_warnings, quit_on_ctrl_c


def main() -> None:
    """Launch; exit with the launch's exit code."""
    quit_on_ctrl_c()
    listen_for_warnings()
    # Horovod starts a helper process a rank over Gloo, which loads this module again: it stays light.
    from hvdtrain.errors import exit_code_of
    from hvdtrain.start.parts.horovod_launcher import launch_ranks

    sys.exit(exit_code_of(lambda: launch_ranks(sys.argv[1:])))


if __name__ == "__main__":
    main()
