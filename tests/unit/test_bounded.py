"""Doing something for a limited time, also when no thread can be started any more."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from phalanx.system.bounded import keep_spare_thread, within


class User:
    """It may want something when the interpreter ends."""


def refuse(thread: threading.Thread) -> None:
    """As Python does from 3.12 on, when the interpreter ends."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_what_takes_too_long_is_left_alone() -> None:
    goes_on = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, lambda: goes_on.wait(100))
    goes_on.set()
    assert within(60, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)


def test_a_thread_that_was_kept_does_it_when_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    user = User()
    keep_spare_thread(user)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert within(60, lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            within(60, lambda: 1 / 0)
        goes_on = threading.Event()
        with pytest.raises(TimeoutError):
            within(0.05, lambda: goes_on.wait(100))
        goes_on.set()
        assert within(60, lambda: 8) == 8
        del user
        gc.collect()
        with pytest.raises(RuntimeError, match="none was kept"):
            within(60, lambda: 7)
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)  # that no thread is left is checked after each test
