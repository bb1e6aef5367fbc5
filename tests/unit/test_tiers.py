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
def test_bad(): raise ValueError("x" * 9999)
def test_bad_twice(broken_end): raise ValueError("its reason")
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
    *shown, option, last = capfd.readouterr().out.splitlines()
    said = "\n".join(shown)
    for name, reason in {
        "bad": "x" * 1000,
        "bad_twice": "ValueError: its reason",
        "bad_end": "assert False",
    }.items():
        text = said.partition(f"\nFAILED test_some::test_{name}: ")[2]
        assert reason in text.partition("\nFAILED ")[0]
        assert len(text.partition("\nFAILED ")[0]) <= tiers.LONGEST
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


def test_a_failure_without_a_report_is_one(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    case = '<testcase classname="test_some" name="test_bad"><failure message="gone"/></testcase>'
    path.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    counted, failed = tiers.read(path)
    assert (counted["failed"], counted["passed"]) == (1, 0)
    assert failed == {"test_some::test_bad": ""}
