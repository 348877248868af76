"""Where another process is in its program, found without its help."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import soon, stop

from phalanx.watch import from_outside
from phalanx.watch.from_outside import PLACE_SIGNAL, Place, place_of, place_of_main

LIMIT_S = 60.0


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MAIN_S", "_WRITTEN_S"):
        monkeypatch.setattr(from_outside, name, 10 * LIMIT_S)


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
            place = Place(name)
            os.write(writes, b"!")
            spins()
            place.close()
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


def test_a_stopped_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    with spinning() as (pid, name):
        stop(pid)
        began = time.monotonic()
        assert place_of(pid, name) == ""
        assert time.monotonic() - began < LIMIT_S


def descriptors() -> list[str]:
    """The files in memory that this process has for those who look at it."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}").split(" ")[0])
    return sorted(name for name in names if name.startswith(("/memfd:phalanx-stacks", "/memfd:test-")))


def test_many_that_ask_at_once_each_read_a_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of which only the end was read would begin with a caller."""
    be_patient(monkeypatch)
    found: list[str] = []
    with spinning() as (pid, _):
        while place_of_main(pid).startswith("spinning"):
            pass
        threads = [
            threading.Thread(target=lambda: found.extend(place_of_main(pid).split(" ")[0] for _ in range(100)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 300
    assert set(found) == {"spins"}


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
            Place()
            place = place_of_main(os.getpid())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [PLACE_SIGNAL])
            os.write(writes, repr((place, came, descriptors())).encode())
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(writes)
    with os.fdopen(reads) as said:
        assert said.read() == "('', [], [])"


def test_a_process_that_has_become_another_program_gets_no_signal() -> None:
    """Its reader has waited for another reader meanwhile; the signal would end a program that does not expect it."""
    program = (
        "import os; from phalanx.watch.from_outside import Place; place = Place(); print(flush=True); input(); "
        "os.execvp('cat', ['cat'])"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        child.stdout.readline()
        path = from_outside._file_of(child.pid, from_outside._stacks_of(child.pid))
        with open(path, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the other reader
            asked: list[str] = []
            reader = threading.Thread(target=lambda: asked.append(place_of_main(child.pid)))
            reader.start()
            child.stdin.write(b"go\n")
            child.stdin.flush()
            assert soon(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "cat\n")
            reader.join()
        assert asked == [""]
        assert child.communicate(b"still here")[0] == b"still here"
    assert child.returncode == 0
