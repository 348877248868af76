"""Ranks that are asked where they are: who has not answered is said, also when they have been asked before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.support.waiting import stop

from phalanx.launch.rank.trace import STACK_SIGNAL, Trace, open_own, open_trace
from phalanx.system import processes

RUN = "px-test-trace"
PART = 2


def rank_of(descriptor: int) -> int:
    """A process that has this part, and sleeps."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open_own(os.dup(descriptor), PART)
            os.write(tell, b"x")
            while True:
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


@pytest.fixture
def asked() -> Iterator[tuple[Trace, Trace, int]]:
    """The file as the process sees it that asks, and as the one sees it that reads, and the rank."""
    descriptor = open_trace(RUN)
    pid = rank_of(descriptor)
    try:
        yield Trace(descriptor, RUN), Trace(descriptor, RUN), pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)


@pytest.mark.parametrize("taken", [True, False])
def test_a_rank_that_has_answered_before_is_waited_for_again(asked: tuple[Trace, Trace, int], taken: bool) -> None:
    asker, reader, pid = asked
    assert asker.ask({PART: pid}, 60) == []
    if taken:
        assert "test_trace.py" in reader.take([PART])[PART]
    stop(pid)
    assert asker.ask({PART: pid}, 0.2) == [PART]
    assert (PART in reader.take([PART])) is not taken
    os.kill(pid, signal.SIGCONT)
    assert asker.ask({PART: pid}, 60) == []
    assert "test_trace.py" in reader.take([PART])[PART]


def test_a_rank_that_answers_late_is_read_late(asked: tuple[Trace, Trace, int]) -> None:
    asker, reader, pid = asked
    stop(pid)
    assert asker.ask({PART: pid}, 0.05) == [PART]
    assert reader.take([PART]) == {}
    os.kill(pid, signal.SIGCONT)
    assert asker.ask({PART: pid}, 60) == []
    assert "test_trace.py" in reader.take([PART])[PART]


def stop_while_it_writes(trace: Trace, pid: int) -> int:
    """Ask a rank again and again until it could be stopped in the middle of its stack; returns where that begins."""
    for _ in range(2000):
        begin = trace._end(PART)
        assert trace._ask(PART, pid)
        while not any(os.pread(trace.descriptor, 1, begin)):
            pass
        stop(pid)
        if processes.blocks(pid, STACK_SIGNAL):
            return begin
        os.kill(pid, signal.SIGCONT)
        trace.ask({PART: pid}, 60)
        trace.take([PART])
    raise AssertionError("it could not be stopped")


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_has_written_a_part_of_its_stack_has_not_answered(
    asked: tuple[Trace, Trace, int], answers: bool
) -> None:
    trace, _, pid = asked
    begin = stop_while_it_writes(trace, pid)
    assert not trace._has_written(begin, pid, blocked=False)
    if answers:
        os.kill(pid, signal.SIGCONT)
        while not trace._has_written(begin, pid, blocked=False):
            time.sleep(0.001)
        # All of it, down to the frame that began it all.
        whole = os.pread(trace.descriptor, 1 << 16, begin).rstrip(b"\0")
        time.sleep(0.1)
        assert os.pread(trace.descriptor, 1 << 16, begin).rstrip(b"\0") == whole
