"""The lines that rank 0 prints where there is no progress bar."""

from __future__ import annotations

import pytest

from hvdtrain.trainer import progress
from hvdtrain.trainer.progress import Progress


@pytest.mark.parametrize(
    ("steps", "done", "place"),
    [
        (1_000, 0, "step 120/1,000, 7 min left"),
        (1_000, 500, "step 620/1,000, 3 min left"),
        (None, 0, "step 120"),
    ],
)
def test_a_long_epoch_shows_where_it_is_every_minute(
    steps: int | None, done: int, place: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    shown = Progress(2, None, "Epoch 1/2", steps, done)
    for _ in range(130):
        now += 0.5
        shown.step(1, 32, {"loss": 0.5})
    shown.stop()
    shown.end({"loss": 0.25})
    during, end = capsys.readouterr().out.splitlines()
    assert during == f"Epoch 1/2  {place}  64 examples/s  loss: 0.5"
    assert end == "Epoch 1/2  65.0s  64 examples/s  loss: 0.25"
