"""Starting a thread while a signal handler raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from phalanx.system.bounded import within
from phalanx.system.threads import start


class Interrupted(Exception):
    """What the program's signal handler raises."""


def start_and_interrupt(task: Callable[[], object], arguments: tuple[object, ...]) -> None:
    """As a handler does that raises when the new thread runs already, and before ``Thread.start()`` has seen that."""
    before = threading.active_count()  # the thread that is being started counts already
    real_start(task, arguments)
    while threading.active_count() == before:  # until it has ended
        time.sleep(0.001)
    raise Interrupted


real_start = threading._start_new_thread  # type: ignore[attr-defined]


def test_the_exception_of_the_handler_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "_start_new_thread", start_and_interrupt)
    ran: list[int] = []
    with pytest.raises(Interrupted):
        start(threading.Thread(target=ran.append, args=(1,)))
    with pytest.raises(Interrupted):
        within(60, lambda: ran.append(2))
    assert ran == [1, 2]


def test_a_key_error_of_something_else_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: Callable[[], object], arguments: tuple[object, ...]) -> None:
        raise KeyError("another")

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(KeyError, match="another"):
        start(threading.Thread(target=print))
