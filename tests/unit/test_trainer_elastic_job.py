"""How a worker of an elastic job learns its new place, and when it gives up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from hvdtrain.errors import EngineError
from hvdtrain.trainer import elastic_job
from hvdtrain.trainer.elastic_job import (
    HostChanges,
    WorkersChanged,
    resume_after_restart,
    start_again,
    starts_before,
)
from hvdtrain.worker import phases
from hvdtrain.worker.elastic_place import place_after_arrival, place_in_job
from hvdtrain.worker.heartbeat import Heartbeat

ANSWERS = {
    "/hvdtrain_next_place/a:1": "2,5,1,3,0,2",
    "/hvdtrain_next_place/a:2": "-1,-1,-1,-1,-1,-1",
    "/rank_and_size/a:3": "0,1,3,1,0,1",
    "/hvdtrain_saved/disk": "disk",
}
ASKED: list[str] = []


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[dict[str, str]]:
    """The variables that tell where it is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in ANSWERS else 404)
            self.end_headers()
            self.wfile.write(ANSWERS.get(self.path, "").encode())

        def do_PUT(self) -> None:
            ASKED.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        "HOROVOD_HOSTNAME": "a",
        "HOROVOD_LOCAL_RANK": "1",
    }
    server.shutdown()
    server.server_close()


def test_the_new_place(rendezvous: dict[str, str]) -> None:
    assert place_in_job(rendezvous) == {
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "5",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "2",
    }


def test_horovods_own_launcher_knows_its_own_question(rendezvous: dict[str, str]) -> None:
    third = rendezvous | {"HOROVOD_LOCAL_RANK": "3"}
    assert place_in_job(third)["HOROVOD_LOCAL_RANK"] == "3"
    assert place_after_arrival(third) == {}


def test_a_worker_that_is_left_out_ends(rendezvous: dict[str, str]) -> None:
    with pytest.raises(SystemExit) as ended:
        place_in_job(rendezvous | {"HOROVOD_LOCAL_RANK": "2"})
    assert ended.value.code == 0


def test_a_launcher_that_has_gone(rendezvous: dict[str, str]) -> None:
    with pytest.raises(EngineError, match="the launcher of this elastic job cannot be reached"):
        place_in_job(rendezvous | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "1"})


@pytest.mark.parametrize("rank", [0, 1])
def test_changes_that_a_reset_has_discarded_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, rendezvous: dict[str, str], rank: int
) -> None:
    """Horovod forgets what the launcher told while a failed rank was replaced. Only after the reset does it listen."""
    for name, value in rendezvous.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(phases, "current", lambda: Heartbeat(rank=rank))
    ASKED.clear()
    asked_at_reset: list[list[str]] = []

    class State:
        """As Horovod's, which may be followed already."""

        def commit(self) -> None: ...

        def on_reset(self) -> None:
            asked_at_reset.append([*ASKED])

    module = ModuleType("elastic")
    vars(module).update(State=State)
    phases._follow_states(module)
    State().on_reset()
    assert asked_at_reset == [[]]
    assert ["/hvdtrain_changes/hosts"] * (rank == 0) == ASKED


@pytest.mark.parametrize(
    ("told", "steps", "before"),
    [(None, 7, 0), ("7 2", 7, 2), ("5 2", 7, 0), ("7", 7, 0), ("0 1", 0, 1)],
)
def test_starts_without_a_new_checkpoint_are_counted(
    told: str | None, steps: int, before: int
) -> None:
    environ = {} if told is None else {"HVDTRAIN_STARTED_AGAIN": told}
    assert starts_before(environ, steps) == before


def test_it_starts_again_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, rendezvous: dict[str, str], tmp_path: Path
) -> None:
    """What was set since then is not there."""
    for name, value in rendezvous.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(elastic_job, "_given", lambda: {"HOROVOD_RANK": "0", "A": "1"})
    done: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, environ: done.append(environ))
    monkeypatch.setenv("HVDTRAIN_START_FOLDER", str(tmp_path))
    monkeypatch.chdir("/")
    start_again(WorkersChanged("more."), 7, exists=True)
    assert Path.cwd() == tmp_path, "where a relative path of the script is right"
    start_again(EngineError("gone."), 0, exists=False)
    saved, anew = done
    assert saved["A"] == "1" and saved["HOROVOD_RANK"] == "2" and "HOROVOD_HOSTNAME" not in saved
    assert (saved["HVDTRAIN_SAVED_BEFORE"], saved["HVDTRAIN_STARTED_AGAIN"]) == ("1", "7 1")
    assert "HVDTRAIN_SAVED_BEFORE" not in anew

    monkeypatch.setenv("HVDTRAIN_STARTED_AGAIN", "7 3")
    with pytest.raises(EngineError, match=r"^gone\. The script was restarted 3 times"):
        start_again(EngineError("gone."), 7, exists=True)


def test_only_the_first_fit_of_a_restarted_script_must_find_a_checkpoint() -> None:
    """Later ones may be new; they do not insist on an empty folder, as they may have begun before the restart."""
    environ = {"HVDTRAIN_STARTED_AGAIN": "7 1", "HVDTRAIN_SAVED_BEFORE": "1"}
    assert [resume_after_restart(environ, resume) for resume in ("never", "auto", "never")] == [
        "must",
        "auto",
        "auto",
    ]
    assert environ == {"HVDTRAIN_STARTED_AGAIN": "7 1"}
    assert resume_after_restart({}, "never") == "never"


def test_a_worker_that_has_joined_goes_on_though_no_other_is_left(
    rendezvous: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the job has saved before the first fit of a process is not of that process."""
    joined = dict(rendezvous)
    assert [resume_after_restart(joined, resume) for resume in ("never", "auto", "never")] == [
        "must",
        "auto",
        "auto",
    ]
    from_the_beginning = dict(rendezvous)
    monkeypatch.delitem(ANSWERS, "/hvdtrain_saved/disk")
    assert resume_after_restart(from_the_beginning, "never") == "never"
    monkeypatch.undo()
    assert resume_after_restart(from_the_beginning, "never") == "never", "its own first fit saved"


def test_outside_of_elastic_jobs_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    with HostChanges().listening():
        assert not elastic_job.notification_manager._listeners
