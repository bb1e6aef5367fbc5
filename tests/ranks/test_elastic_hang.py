"""A rank that hangs in an elastic job is named, and started again; a job of which all ranks hang is ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import program, run_command

# Ranks without TensorFlow: they meet as Horovod's do. The first rank 1 sleeps, and rank 0 waits for it as after a
# collective that failed. In the next round each of them sleeps.
SCRIPT = """
import json, os, sys, time
os.chdir(sys.argv[1])
from hvdtrain.worker.elastic_place import place_after_arrival, place_in_job
from hvdtrain.worker.heartbeat import beat
first = "events" not in os.listdir()
place = place_after_arrival(os.environ)
while True:
    rank = int(place["HOROVOD_RANK"])
    with open("events", "a") as events:
        events.write(json.dumps({"pid": os.getpid(), "rank": rank}) + "\\n")
    for step in range(4):
        beat("training", step, rank=rank)
        time.sleep(0.1)
    if not first or rank == 1:
        beat("training" if not first else "callbacks")
        time.sleep(1000)
    first = False
    os.environ.update(place_in_job(os.environ))
    place = place_after_arrival(os.environ)
"""


@pytest.mark.slow
def test_ranks_that_hang(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [program("hvdtrain"), "run", "-np", "2", "--min-np", "1", "--controller", "gloo"]
    command += ["--hang-timeout", "4", "--log-dir", str(tmp_path / "logs")]
    command += [str(tmp_path / "train.py"), str(tmp_path)]
    ended = run_command(command, timeout=60)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    ranks = {one["rank"]: one["pid"] for one in events[:2]}
    assert [one["rank"] for one in sorted(events[2:], key=lambda one: one["rank"])] == [0, 1]
    assert {ranks[0]} == {one["pid"] for one in events[2:]} & {*ranks.values()}, "rank 0 lived on"
    named = (
        f"rank 1 (process {ranks[1]}) is missing: others have waited 4 s for it in hvdtrain.init()"
    )
    assert (
        f"\n{named}\n  rank 0: in hvdtrain.init()\n  rank 1: in callbacks\nended, to be restarted: rank 1"
        in (ended.output)
    )
    assert 'train.py", line 17' in ended.output, ended.output
    assert "local rank 1 of host localhost failed and is being restarted" in ended.output
    assert (
        "no worker has made progress for 4 s (--hang-timeout)\n  ranks 0, 1: in training, step 4"
        in ended.output
    )
    assert ended.returncode == 124
