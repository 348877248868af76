"""One group's queue and its threads, without a group."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from phalanx.c10d.progress import Progress


def _wait(event: threading.Event) -> None:
    event.wait(10)


def test_a_group_closes_while_its_thread_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that runs callbacks starts a second one for what is queued. The group may close in just that moment."""
    progress = Progress("closing")
    start, starting = threading.Thread.start, threading.Event()

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        if threading.current_thread() is not threading.main_thread():
            starting.set()
            time.sleep(0.2)  # the new thread runs, and the one that starts it has not noted it yet

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    gate = threading.Event()
    progress.submit(partial(_wait, gate), [], urgent=True)
    progress.submit(lambda: None, [], urgent=True)
    gate.set()
    assert starting.wait(10)
    closing = threading.Thread(target=progress.close, daemon=True)
    start(closing)
    closing.join(10)
    assert not closing.is_alive()
