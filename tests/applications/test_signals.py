"""Signals and closed pipes that stop a run, wherever they find it."""

import signal
from contextlib import suppress

import pytest

from lutjax.training import loop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_signal_is_lost(number):
    """Blocks in which nobody asks end with it, also where their callbacks swallow the exception, or make another of it."""

    def swallow():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)

    def change():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise RuntimeError("INTERNAL: callback") from None

    for block in (swallow, change, lambda: signal.raise_signal(number)):
        before = signal.getsignal(number)
        with loop.stop_on_signal() as stop:
            with pytest.raises(KeyboardInterrupt), stop.at_once():
                block()
            assert stop()
            with pytest.raises(KeyboardInterrupt), stop.at_once():
                pytest.fail("the block begins")
        assert signal.getsignal(number) is before
    with loop.stop_on_signal() as stop:
        with pytest.raises(RuntimeError), stop.at_once():
            raise RuntimeError("no signal")
        signal.raise_signal(number)
        assert stop()
        if number != signal.SIGINT:
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop.stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)
