"""The logger "hvdtrain": on the terminal by default, wherever the program wants otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = 'logger().info("resuming at epoch 3"); logger().warning("worker 1 is lost")'


@pytest.mark.parametrize(
    ("setup", "out", "err"),
    [
        ("", "resuming at epoch 3\n", "worker 1 is lost\n"),
        ("logging.getLogger('hvdtrain').setLevel('WARNING')", "", "worker 1 is lost\n"),
        ("logging.getLogger('hvdtrain').setLevel('CRITICAL')", "", ""),
        ("logging.getLogger('hvdtrain').addHandler(logging.NullHandler())", "", ""),
        (
            "logging.basicConfig(format='%(levelname)s:%(name)s:%(message)s')",
            "",
            "INFO:hvdtrain:resuming at epoch 3\nWARNING:hvdtrain:worker 1 is lost\n",
        ),
        (
            "logging.basicConfig(); logging.getLogger('hvdtrain').propagate = False",
            "resuming at epoch 3\n",
            "worker 1 is lost\n",
        ),
    ],
    ids=["as it comes", "a level", "silent", "a null handler", "the root's", "no root's"],
)
def test_messages_go_where_the_program_wants(setup: str, out: str, err: str) -> None:
    code = f"import logging; from hvdtrain.messages import logger; {setup}\n{SAY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (out, err)


def test_a_handler_that_comes_later_has_the_messages_alone() -> None:
    code = (
        f"import logging; from hvdtrain.messages import logger; {SAY}\nlogging.basicConfig()\n{SAY}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "resuming at epoch 3\n"
    assert done.stderr.splitlines()[1:] == [
        "INFO:hvdtrain:resuming at epoch 3",
        "WARNING:hvdtrain:worker 1 is lost",
    ]
