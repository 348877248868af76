"""Asking a process for its stack does not harm it, whatever its interpreter is about to do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from phalanx.launch.rank.trace import Trace, open_own, open_trace
from phalanx.watch.from_outside import Place, place_of_main
from phalanx.watch.stack_text import frames_of

# With the handler that Python itself has for this, such a process died of one question in a hundred.
QUESTIONS = 500
FUNCTIONS = {"<lambda>", "calls_functions", "running"}


def calls_functions() -> None:
    while True:
        list(map(lambda each: each, range(50)))  # noqa: C417 - a call into Python from C


@contextlib.contextmanager
def running(begin: Callable[[], object], then: Callable[[], None] = calls_functions) -> Iterator[int]:
    """A process that begins with this, and then does that for ever; its pid."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kept = begin()
            os.write(writes, b"!")
            then()
            del kept
        finally:
            os._exit(1)
    try:
        os.read(reads, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


def ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_process_that_enters_functions_all_the_time_tells_its_place() -> None:
    with running(Place) as pid:
        for number in range(QUESTIONS):
            place = place_of_main(pid)
            assert not ended(pid), f"it died of question {number}"
            assert not place or place.partition(" ")[0] in FUNCTIONS, place  # none of one that gets no core for seconds


def test_rank_that_enters_functions_all_the_time_tells_its_stack() -> None:
    descriptor = open_trace("test")
    trace = Trace(descriptor, "test")
    try:
        with running(lambda: open_own(os.dup(descriptor), 0)) as pid:
            for number in range(QUESTIONS):
                late = trace.ask({0: pid}, 60.0)
                assert not ended(pid), f"it died of question {number}"
                assert not late
                *_, stack = trace.take([0])[0].split("Stack (")
                assert frames_of(stack)[0].function in FUNCTIONS, stack
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("forks", [False, True])
def test_a_fault_of_the_program_itself_ends_it_as_before(tmp_path: Path, forks: bool) -> None:
    """Also in a child of a process that was asked, and with the program's own handler, here Python's."""
    script = tmp_path / "script.py"
    script.write_text(
        dedent(f"""
        import ctypes, faulthandler, os, signal, threading, time
        from phalanx.watch.stack_signal import write_stacks_on

        faulthandler.enable()
        file = os.open("stacks", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        write_stacks_on(signal.SIGRTMAX - 4, file)
        for _ in range(300):
            os.kill(os.getpid(), signal.SIGRTMAX - 4)
            list(map(lambda each: each, range(50)))
        child = os.fork() if {forks} else 0
        if child:
            _, status = os.waitpid(child, 0)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os.kill(os.getpid(), signal.SIGRTMAX - 4)
        ctypes.string_at(0)
    """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "Segmentation fault" in done.stderr
    assert "string_at" in done.stderr
    assert (tmp_path / "stacks").read_text().count("Stack (") >= 301
