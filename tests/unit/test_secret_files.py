"""Secret variables for the ranks of a host: a private file, and nobody else's."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.worker.secret_files import deliver, delivered, withdraw


def test_from_delivery_to_withdrawal(tmp_path: Path) -> None:
    path = deliver("one", {"API_KEY": "hush"}, tmp_path)
    deliver("two", {}, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert delivered("one", tmp_path) == {"API_KEY": "hush"}
    assert delivered("three", tmp_path) == {}
    withdraw("one", tmp_path)
    assert not path.exists()
    assert delivered("one", tmp_path) == {}
    withdraw("two", tmp_path)
    assert list(tmp_path.iterdir()) == []
    withdraw("two", tmp_path)


def test_what_a_killed_agent_has_left_is_removed(tmp_path: Path) -> None:
    """With the next delivery; not what an agent that lives, or has just begun, has written."""
    agent = (
        "import sys, time; from pathlib import Path; from hvdtrain.worker.secret_files import deliver, hold\n"
        "kept = hold(deliver('killed', {'API_KEY': 'hush'}, Path(sys.argv[1]))); print(kept.name, flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", agent, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    killed = Path(process.stdout.readline().strip())
    new = deliver("new", {}, tmp_path)
    os.utime(killed, (0, 0))
    deliver("another", {}, tmp_path)
    assert killed.exists()
    process.kill()
    process.communicate()
    deliver("third", {}, tmp_path)
    assert not killed.parent.exists()
    assert new.exists()


def test_what_others_have_made_is_not_looked_at(tmp_path: Path) -> None:
    """Neither a folder that others can enter, nor a link; and neither stops a launch."""
    path = deliver("one", {"API_KEY": "hush"}, tmp_path)
    ours = path.parent
    open_to_all, link = tmp_path / "hvdtrain-brought-0", tmp_path / "hvdtrain-brought-1"
    shutil.copytree(ours, open_to_all)
    open_to_all.chmod(0o755)
    link.symlink_to(ours)
    (tmp_path / "hvdtrain-brought-2").touch()
    (open_to_all / path.name.replace("one", "two")).write_text('{"API_KEY": "theirs"}')
    assert delivered("two", tmp_path) == {}
    withdraw("one", tmp_path)
    assert not ours.exists()
    assert delivered("one", tmp_path) == {}
    deliver("one", {"API_KEY": "mine"}, tmp_path)
    assert delivered("one", tmp_path) == {"API_KEY": "mine"}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(HvdtrainError, match=r"cannot keep secret variables in .*/missing: No such"):
        deliver("one", {}, tmp_path / "missing")
