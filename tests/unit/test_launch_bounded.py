"""Commands within a time: the signals that end them with the one who started them."""

import os
import signal
import time

import pytest

from hvdtrain.launch.running.bounded import ending_commands, leaving_on_signals


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
