"""How ranks of other hosts have ended, as the agent of a host notes it for the ranks there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from phalanx.launch.rank.other_ends import ended_elsewhere
from phalanx.launch.rank.trace import _ELSEWHERE, Trace, open_own, open_trace

RUN = "px-test-ends"
KNOWN = {"last_operation": "all_reduce #2", "last_line": "train.py:4", "was_in_it": False}


@pytest.fixture
def trace() -> Iterator[Trace]:
    descriptor = open_trace(RUN)
    try:
        yield Trace(descriptor, RUN)
    finally:
        os.close(descriptor)


def note(trace: Trace, host: str, pid: int, status: int, **known: Any) -> None:
    trace.note_elsewhere(json.dumps({"host": host, "pid": pid, "status": status, **known}).encode())


def in_a_rank(trace: Trace, ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns in a process that has a part of the trace."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open_own(os.dup(trace.descriptor), 1)
            os.write(tell, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(ready, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(told)


def test_a_rank_of_another_host_is_found_by_its_host_and_its_pid(trace: Trace) -> None:
    note(trace, "h1", 70, -9, **KNOWN)
    note(trace, "h2", 70, 3)
    note(trace, "h1", 71, -11)

    def ask() -> list[Any]:
        ranks = [("h1", 70), ("h2", 70), ("h1", 71), ("h2", 71)]
        return [ended_elsewhere(RUN, host, pid) for host, pid in ranks]

    assert in_a_rank(trace, ask) == [
        {**KNOWN, "how": "by signal 9 (SIGKILL)", "signal": 9},
        {"how": "with exit code 3", "signal": 0},
        {"how": "by signal 11 (SIGSEGV)", "signal": 11},
        None,
    ]


@pytest.mark.parametrize("length", [1, 20, 38])
def test_a_line_that_its_writer_has_not_finished_is_not_taken(trace: Trace, length: int) -> None:
    line = json.dumps({"host": "h1", "pid": 70, "status": -9}).encode()
    assert length < len(line)
    os.pwrite(trace.descriptor, line[:length], _ELSEWHERE)
    assert in_a_rank(trace, lambda: ended_elsewhere(RUN, "h1", 70)) is None
    os.pwrite(trace.descriptor, line, _ELSEWHERE)
    assert in_a_rank(trace, lambda: ended_elsewhere(RUN, "h1", 70)) is None
    os.pwrite(trace.descriptor, line + b"\n", _ELSEWHERE)
    assert in_a_rank(trace, lambda: ended_elsewhere(RUN, "h1", 70)) == {"how": "by signal 9 (SIGKILL)", "signal": 9}


def test_after_very_many_failures_no_more_are_noted_and_the_first_are_known(trace: Trace) -> None:
    for pid in range(2000):
        note(trace, "h1", pid, -9)
    first, last = in_a_rank(trace, lambda: [ended_elsewhere(RUN, "h1", pid) for pid in (0, 1999)])
    assert first == {"how": "by signal 9 (SIGKILL)", "signal": 9}
    assert last is None


def test_a_process_that_has_no_part_of_the_trace_knows_of_nothing(trace: Trace) -> None:
    note(trace, "h1", 70, -9)
    assert ended_elsewhere(RUN, "h1", 70) is None
