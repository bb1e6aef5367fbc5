"""Horovod's own launcher, told what horovodrun would have to ask:

    python -m hvdtrain.start.horovodrun [--env NAME]... -- OPTIONS COMMAND...

takes the options of horovodrun. What is different:

- what Horovod was built with is read off its extension; horovodrun imports TensorFlow to ask (3 to
  4 seconds);
- only a named set of environment variables goes to other hosts (see `hvdtrain.launch.passing`), and
  no value that looks secret stands in a command line; horovodrun puts every variable there.
"""

from __future__ import annotations

import codecs
import functools
import os
import sys
from types import SimpleNamespace

from horovod.runner import launch
from horovod.runner.common.util import env as horovod_env
from horovod.runner.common.util import safe_shell_exec

from hvdtrain.launch.engine import find_engine
from hvdtrain.launch.passing import looks_secret, travelling


def main() -> None:
    split = sys.argv.index("--")
    asked = [
        name
        for flag, name in zip(sys.argv[1:split:2], sys.argv[2:split:2], strict=True)
        if flag == "--env"
    ]
    sys.argv = ["horovodrun", *sys.argv[split + 1 :]]
    _teach_horovod(asked, over_command_line="--gloo" in sys.argv)
    launch.run_commandline()


def _teach_horovod(asked: list[str], over_command_line: bool) -> None:
    """Answer Horovod's questions, in this process only."""
    built = find_engine().built
    launch.mpi_built = lambda verbose=False: "mpi" in built
    launch.gloo_built = lambda verbose=False: "gloo" in built

    exportable = horovod_env.is_exportable

    def may_travel(name: str) -> bool:
        if over_command_line and looks_secret(name, os.environ.get(name, "")):
            return False
        return name in asked or (exportable(name) and bool(travelling({name: ""}, ())))

    horovod_env.is_exportable = may_travel

    # A rank may print any bytes; a strict decoder would end the thread that reads them.
    lenient = functools.partial(codecs.getincrementaldecoder("utf8"), errors="surrogateescape")
    safe_shell_exec.codecs = SimpleNamespace(getincrementaldecoder=lambda name: lenient)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
