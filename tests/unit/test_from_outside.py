"""Where another process is in its program, found without its help."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator

import pytest
from tests.support.waiting import stop

from phalanx.watch import from_outside
from phalanx.watch.from_outside import Place, place_of

LIMIT_S = 60.0


def spins() -> None:
    while True:
        pass


@contextlib.contextmanager
def spinning() -> Iterator[tuple[int, str]]:
    """A process that can be looked at, in :func:`spins`: its pid and its name."""
    name = f"test-{secrets.token_hex(4)}"
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            Place(name)
            os.write(writes, b"!")
            spins()
        finally:
            os._exit(1)
    try:
        os.read(reads, 1)
        yield pid, name
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


def test_the_place_is_told_as_soon_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_outside, "_WRITTEN_S", 10 * LIMIT_S)
    with spinning() as (pid, name):
        began = time.monotonic()
        places = {place_of(pid, name).split(" ")[0] for _ in range(20)}
        assert places <= {"spins", "spinning"}  # where it was right after it had said that it is there
        assert "spins" in places
        assert time.monotonic() - began < LIMIT_S


def test_a_stopped_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_outside, "_WRITTEN_S", 10 * LIMIT_S)
    with spinning() as (pid, name):
        stop(pid)
        began = time.monotonic()
        assert place_of(pid, name) == ""
        assert time.monotonic() - began < LIMIT_S
