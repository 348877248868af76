"""Starting a thread while a signal handler raises."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from phalanx.errors import BackendError
from phalanx.system.bounded import within
from phalanx.system.threads import start

START = next(name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name))
real_start = getattr(threading, START)


class Interrupted(Exception):
    """What the program's signal handler raises."""


def start_and_interrupt(task: Any, *arguments: Any, **options: Any) -> None:
    """As a handler does that raises when the new thread runs already, and before ``Thread.start()`` has seen that."""
    real_start(task, *arguments, **options)
    while task.__self__ in threading._limbo:  # type: ignore[attr-defined]
        time.sleep(0.001)
    raise Interrupted


def test_the_exception_of_the_handler_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, START, start_and_interrupt)
    ran: list[int] = []
    thread = threading.Thread(target=ran.append, args=(1,))
    with pytest.raises(Interrupted):
        start(thread)
    thread.join()
    assert ran == [1]
    with pytest.raises(Interrupted):
        within(60, lambda: 2)


def test_a_key_error_of_something_else_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise KeyError("another")

    monkeypatch.setattr(threading, START, refuse)
    with pytest.raises(KeyError, match="another"):
        start(threading.Thread(target=print))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("can't start new thread"), BackendError),
        (RuntimeError("what the program's signal handler raises"), RuntimeError),
        (RuntimeError("can't create new thread at interpreter shutdown"), RuntimeError),
    ],
)
def test_only_the_systems_refusal_is_told_as_one(
    raised: RuntimeError, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(threading, START, refuse)
    with pytest.raises(RuntimeError, match=str(raised)) as caught:
        start(threading.Thread())
    assert type(caught.value) is expected
