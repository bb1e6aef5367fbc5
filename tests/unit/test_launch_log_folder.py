"""The folder of a run's files."""

import os
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.running.log_folder import make_log_dir


def test_a_log_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        UsageError, match=r"log folder .* is not writable: choose another with --log"
    ):
        make_log_dir(tmp_path)
