"""Secret variables for the ranks of a host: a private file, and nobody else's."""

import stat
from pathlib import Path

import pytest

from hvdtrain.errors import HvdtrainError
from hvdtrain.worker.delivery import deliver, delivered, withdraw


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


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = deliver("one", {"API_KEY": "hush"}, tmp_path).parent
    folder.chmod(0o755)
    for use in (lambda: deliver("two", {}, tmp_path), lambda: delivered("one", tmp_path)):
        with pytest.raises(HvdtrainError, match="is not a private folder"):
            use()


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = deliver("one", {}, tmp_path).parent
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(HvdtrainError, match="is not a private folder"):
        deliver("two", {"API_KEY": "hush"}, tmp_path)


def test_a_link_in_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    path = deliver("one", {}, tmp_path)
    path.unlink()
    other = tmp_path / "other"
    other.write_text("mine")
    path.symlink_to(other)
    deliver("one", {"API_KEY": "hush"}, tmp_path)
    assert other.read_text() == "mine"
    assert delivered("one", tmp_path) == {"API_KEY": "hush"}
