"""How another process has ended, as its parent says it before it reaps it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.watch import ends
from phalanx.watch.ends import Ending, how_ended, learn_by

KILLED = Ending("by signal 9 (SIGKILL)", 9)


@pytest.fixture
def said() -> Iterator[dict[int, Ending]]:
    before, found = ends._look, dict[int, Ending]()
    learn_by(found.get)
    yield found
    ends._look = before


@pytest.fixture
def zombie() -> Iterator[int]:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    yield pid
    with contextlib.suppress(ChildProcessError):  # a test has
        os.waitpid(pid, 0)


def test_a_late_parent_is_waited_for_as_long_as_it_has_not_reaped(
    said: dict[int, Ending], zombie: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "_POLL_S", 0.01)
    parent = threading.Timer(0.5, said.__setitem__, (zombie, KILLED))
    parent.start()
    assert how_ended(zombie, 300.0) == KILLED
    parent.join()


def test_nobody_is_waited_for_once_the_process_has_been_reaped(said: dict[int, Ending], zombie: int) -> None:
    os.waitpid(zombie, 0)
    began = time.monotonic()
    assert how_ended(zombie, 300.0) == Ending()
    assert time.monotonic() - began < 60
    said[zombie] = KILLED
    assert how_ended(zombie, 300.0) == KILLED


def test_a_parent_that_says_nothing_is_waited_for_no_longer_than_it_may_take(
    said: dict[int, Ending], zombie: int
) -> None:
    assert how_ended(zombie, 0.05) == Ending()
