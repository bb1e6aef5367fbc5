"""tests/tiers.py: what is counted, and what makes the whole fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiers

TESTS = """
import pytest

@pytest.fixture
def broken_end():
    yield
    assert False

def test_good(): pass
def test_bad(): assert False
def test_bad_twice(broken_end): assert False
def test_bad_end(broken_end): pass
def test_skipped(): pytest.skip("not here")
"""


def test_every_test_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("")
    parts = [["test_some.py"], ["test_none.py"], ["--no-such-option"]]
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "TIERS", parts)
    assert tiers.main([]) == 1
    *_, bad, twice, end, option, last = capfd.readouterr().out.splitlines()
    assert [bad, twice, end] == [
        f"FAILED test_some::test_{n}" for n in ("bad", "bad_twice", "bad_end")
    ]
    assert option == "FAILED pytest --no-such-option: exit code 4"
    assert last.startswith("4 failed, 1 passed, 1 skipped in ")


def test_nothing_but_good_tests_is_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text("def test_good(): pass\n")
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    monkeypatch.setattr(tiers, "TIERS", [["test_some.py"]])
    assert tiers.main([]) == 0
    monkeypatch.setattr(tiers, "TIERS", [])
    assert tiers.main([]) == 1
    assert tiers.main(["--alll"]) == 2
