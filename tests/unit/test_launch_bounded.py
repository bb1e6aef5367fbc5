"""Commands within a time: the signals that end them with the one who started them."""

import os
import signal
import time

import pytest
from click.testing import CliRunner

from hvdtrain.cli import main
from hvdtrain.install import build, probe, recipe
from hvdtrain.launch.running.bounded import ending_commands
from hvdtrain.signals import leaving_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_take_the_way_out(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left, ending_commands():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_an_ignored_hangup_is_no_way_out() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with leaving_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_installation_ends_with_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def install(*_: object, **__: object) -> bool:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(10)
        finally:
            ended.append("the build")
        return True

    monkeypatch.setattr(probe, "survey", lambda **_: object())
    monkeypatch.setattr(probe, "missing_tools", lambda *_: [])
    monkeypatch.setattr(recipe, "recipe_for", lambda found: object())
    monkeypatch.setattr(build, "install", install)
    result = CliRunner().invoke(main, ["install-horovod"])
    assert (result.exit_code, ended) == (129, ["the build"])
