"""Where another process is in its program, found without its help; and asking for a stack does it no harm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.support.waiting import soon, stop

from phalanx.diagnosis import stacks
from phalanx.diagnosis.stacks import PLACE_SIGNAL, be_seen, frames_of, place_of, place_of_main
from phalanx.launch.rank.trace import StackRequest, Trace, open_trace

LIMIT_S = 60.0
# With the handler that Python itself has for this, such a process died of one question in a hundred.
QUESTIONS = 300
CALLS_FUNCTIONS = """
    import os, sys
    from phalanx.launch.rank.trace import open_own
    from phalanx.diagnosis.stacks import Mark

    open_own(int(sys.argv[1]), 0)
    mark = Mark("test-caller")

    def calls():
        print("up", flush=True)
        while True:
            list(map(lambda each: each, range(50)))

    calls()
"""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAIN_S", "_WRITTEN_S"):
        monkeypatch.setattr(stacks, name, 10 * LIMIT_S)


@contextlib.contextmanager
def running(
    folder: Path, program: str, *arguments: str, fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A small process, quickly copied, that has printed a line; it is killed in the end."""
    script = folder / "script.py"
    script.write_text(dedent(program))
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_process_that_enters_functions_all_the_time_tells_where_it_is(patient: None, tmp_path: Path) -> None:
    """Others ask it for its place, and the launcher for its stack; neither ends it."""
    descriptor = open_trace("test")
    trace = Trace(descriptor, "test")
    try:
        with running(tmp_path, CALLS_FUNCTIONS, str(descriptor), fds=(descriptor,)) as process:
            for number in range(QUESTIONS):
                place = place_of(process.pid, "test-caller")
                assert place.partition(" ")[0] in ("<lambda>", "calls"), (number, place, process.poll())
                request = StackRequest(trace, {0: process.pid}, LIMIT_S)
                assert soon(request.look, LIMIT_S)
                assert not request.late, (number, process.poll())
                *_, stack = trace.take([0])[0].split("Stack (")
                assert frames_of(stack)[0].function in ("<lambda>", "calls"), stack
    finally:
        os.close(descriptor)


def test_a_fault_of_the_program_itself_ends_it_as_before(tmp_path: Path) -> None:
    """Also in a child of a process that was asked, and with the program's own handler, here Python's."""
    program = """
        import ctypes, faulthandler, os, signal
        from phalanx.diagnosis.stacks import write_stacks_on

        faulthandler.enable()
        file = os.open("stacks", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        write_stacks_on(signal.SIGRTMAX - 4, file)
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGRTMAX - 4)
            list(map(lambda each: each, range(50)))
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os.kill(os.getpid(), signal.SIGRTMAX - 4)
        ctypes.string_at(0)
    """
    command = [sys.executable, "-c", dedent(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "Segmentation fault" in done.stderr
    assert "string_at" in done.stderr
    assert (tmp_path / "stacks").read_text().count("Stack (") >= 101


SPINS = """
    import collections, threading
    from phalanx.diagnosis.stacks import Mark

    mark = Mark("test-spins")
    threading.Thread(target=collections.deque, args=(iter(threading.active_count, 0), 0), daemon=True).start()

    def spins():
        print("up", flush=True)
        while True:
            pass

    spins()
"""


def test_many_that_ask_at_once_each_read_a_whole_stack(patient: None, tmp_path: Path) -> None:
    """A stack of which only the end was read would begin with a caller. A stopped process is not waited for.

    Not all ask the same threads.
    """
    found: list[str] = []
    with running(tmp_path, SPINS) as process:
        ask = lambda: found.extend(place_of(process.pid, "test-spins").split(" ")[0] for _ in range(20))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == ["spins"] * 60
        stop(process.pid)
        began = time.monotonic()
        assert place_of(process.pid, "test-spins") == ""
        assert time.monotonic() - began < LIMIT_S


@pytest.mark.skipif(sys.version_info < (3, 11), reason="faulthandler alone writes the stack, and of such a thread none")
def test_thread_that_runs_no_python_is_not_waited_for(patient: None, tmp_path: Path) -> None:
    program = """
        import ctypes
        from phalanx.diagnosis.stacks import Mark

        mark, libc, thread = Mark("test-foreign"), ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
        print("up", flush=True)
        input()
    """
    with running(tmp_path, program) as process:
        foreign = max(map(int, os.listdir(f"/proc/{process.pid}/task")))
        began = time.monotonic()
        assert stacks._place(process.pid, [foreign, process.pid], 10 * LIMIT_S).startswith("<module> ")
        assert time.monotonic() - began < LIMIT_S


def descriptors() -> list[str]:
    """The files in memory that this process has for those who look at it."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}").split(" ")[0])
    return sorted(name for name in names if name.startswith("/memfd:phalanx-stacks"))


@pytest.mark.parametrize("how", ["handles", "blocks"])
def test_a_program_that_uses_the_signal_itself_is_not_sent_it(how: str) -> None:
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            came: list[int] = []
            if how == "handles":
                signal.signal(PLACE_SIGNAL, lambda number, frame: came.append(number))
            else:
                signal.pthread_sigmask(signal.SIG_BLOCK, [PLACE_SIGNAL])
            be_seen()
            place = place_of_main(os.getpid())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [PLACE_SIGNAL])
            os.write(writes, repr((place, came, descriptors())).encode())
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(writes)
    with os.fdopen(reads) as said:
        assert said.read() == "('', [], [])"
