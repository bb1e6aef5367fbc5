"""TF_CONFIG: what is read, and what is refused; how a worker or server waits for its chief."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import EngineError, UsageError
from hvdtrain.start.tf_server import ATTEMPTS, wait_for_end
from hvdtrain.tf_config import TfConfig, lost_server, read_tf_config

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "[::1]:3"], "ps": ["c:4"]}


def environ(cluster: Any = CLUSTER, kind: Any = "worker", index: Any = 1) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_what_is_read() -> None:
    config = read_tf_config(environ())
    assert config == TfConfig("a:1", ("b:2", "[::1]:3"), ("c:4",), "worker", 1)
    assert config.cluster == CLUSTER
    assert config.name == "worker 1"


def test_lists_may_be_tables_by_number() -> None:
    config = read_tf_config(environ(CLUSTER | {"worker": {"10": "x:1", "2": "y:1"}}, index="0"))
    assert config is not None
    assert config.workers == ("y:1", "x:1")


@pytest.mark.parametrize("text", ["", "{}", '{"environment": "cloud"}', '{"cluster": {}}'])
def test_no_cluster(text: str) -> None:
    assert read_tf_config({"TF_CONFIG": text}) is None
    assert read_tf_config({}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"TF_CONFIG": "{"}, "not JSON"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER})}, "the task must be"),
        (environ(index="one"), "the task must be"),
        (environ(kind="evaluator"), "'evaluator', not one of chief, worker, ps"),
        (environ(index=2), "no worker 2: the cluster has 2"),
        (environ(index=-1), "no worker -1"),
        (environ(["a:1"]), "the cluster must be an object"),
        (environ(CLUSTER | {"chief": ["a:1", "b:1"]}), "one chief, not 2"),
        (environ({"chief": ["a:1"], "worker": ["b:2"]}), "the cluster has no ps"),
        (
            environ(CLUSTER | {"ps": {"x": "c:1"}}),
            "addresses of ps must be a list, not {'x': 'c:1'}",
        ),
        (environ(CLUSTER | {"ps": 5}), "addresses of ps must be a list, not 5"),
        (environ(CLUSTER | {"ps": ["c"]}), "address of a ps must be host:port, not 'c'"),
        (environ(CLUSTER | {"ps": ["c:70000"]}), "host:port"),
        (environ(CLUSTER | {"ps": [5]}), "host:port"),
    ],
)
def test_what_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_tf_config(given)


def test_which_server_was_lost() -> None:
    config = read_tf_config(environ(CLUSTER | {"ps": ["c:4", "d:5"]}))
    assert config is not None
    lost = lost_server("error from /job:ps/replica:0/task:1 while calling", config)
    assert lost is not None
    assert lost.startswith("Parameter server 1 (d:5) is lost")
    assert lost_server("error from /job:worker/replica:0/task:1", config) is None


class Clock:
    """Answers of a chief, one a poll; counts the polls."""

    def __init__(self, answers: str) -> None:
        self.answers = answers
        self.polls = 0

    def ask(self) -> bool:
        self.polls += 1
        return self.answers[self.polls - 1] == "+"


@pytest.mark.parametrize("answers", ["+---", "--+++---", "++--+-+---"])
def test_a_server_ends_when_the_chief_has_gone(answers: str) -> None:
    assert ATTEMPTS == 3
    clock = Clock(answers + "+" * 9)
    config = read_tf_config(environ())
    assert config is not None
    wait_for_end(clock.ask, config, sleep=lambda seconds: None)
    assert clock.polls == len(answers)


def test_a_chief_that_does_not_come() -> None:
    config = read_tf_config(environ())
    assert config is not None
    with pytest.raises(EngineError, match="worker 1: the chief did not answer at a:1 for 10 s"):
        wait_for_end(lambda: False, config, sleep=lambda seconds: None, start_seconds=10)


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "set TF_CONFIG"), (environ(kind="chief", index=0), "a chief runs the training script")],
)
def test_the_program_refuses_what_it_cannot_serve(given: dict[str, str], message: str) -> None:
    foreign = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hvdtrain.start.tf_server"],
        env=foreign | given,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
