"""Waiting for the ends of processes: as soon as all have ended, and no longer than was said."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from phalanx.system.processes import await_ends


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield started
    for process in started:
        process.kill()
        process.wait()


@contextlib.contextmanager
def handles_of(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    handles = [os.pidfd_open(process.pid) for process in processes]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def test_those_that_have_not_ended_are_returned_when_the_time_is_over(sleepers: list[subprocess.Popen[bytes]]) -> None:
    with handles_of(sleepers) as handles:
        assert await_ends(handles, 0.0) == handles
        sleepers[1].kill()
        assert await_ends(handles[1:2], 60.0) == []
        began = time.monotonic()
        assert await_ends(handles, 0.2) == [handles[0], handles[2]]
        assert time.monotonic() - began >= 0.2


def test_the_wait_is_over_when_the_last_one_has_ended(sleepers: list[subprocess.Popen[bytes]]) -> None:
    with handles_of(sleepers) as handles:
        for process in sleepers:
            process.kill()
        assert await_ends(handles, 300.0) == []  # also of one that nobody has reaped yet
        assert await_ends([], 300.0) == []


def test_children_are_awaited_and_reaped_but_for_those_that_are_not_meant() -> None:
    code = """
import os, subprocess, time
from phalanx.system.processes import await_children, children_of
stays = subprocess.Popen(["sleep", "600"])
for _ in range(3):
    subprocess.Popen(["sleep", "0.1"])
await_children(300.0, but=[stays.pid])
assert children_of(os.getpid()) == [stays.pid]
began = time.monotonic()
await_children(0.2)
assert time.monotonic() - began >= 0.2
assert stays.poll() is None
stays.kill()
await_children(300.0)
assert children_of(os.getpid()) == []
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
