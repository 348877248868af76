"""Other processes: waiting for their ends and until they stand still, and ending what this one has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import soon

from phalanx.system import processes

PATIENCE_S = 100.0


@pytest.fixture
def handles() -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """Three processes that sleep, and what stands for them."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    opened = [os.pidfd_open(process.pid) for process in started]
    yield started, opened
    for process, handle in zip(started, opened, strict=True):
        process.kill()
        process.wait()
        os.close(handle)


def test_wait_for_ends_is_over_with_the_last_or_the_time(
    handles: tuple[list[subprocess.Popen[bytes]], list[int]],
) -> None:
    sleepers, opened = handles
    assert processes.await_ends(opened, 0.0) == opened
    sleepers[1].kill()
    assert processes.await_ends(opened[1:2], PATIENCE_S) == []
    began = time.monotonic()
    assert processes.await_ends(opened, 0.2) == [opened[0], opened[2]]
    assert time.monotonic() - began >= 0.2
    for process in sleepers:
        process.kill()
    assert processes.await_ends(opened, PATIENCE_S) == []  # also of one that nobody has reaped yet


CHILDREN = """
import os, subprocess
from phalanx.system.processes import adopt_orphans, await_children, children_of, end_descendants

adopt_orphans()
stays = subprocess.Popen(["sleep", "600"])
for _ in range(3):
    subprocess.Popen(["sleep", "0.1"])
await_children(300.0, but=[stays.pid])
assert children_of(os.getpid()) == [stays.pid]
await_children(0.1)
assert stays.poll() is None
spared = subprocess.Popen(["sh", "-c", "exit 7"])
os.waitid(os.P_PID, spared.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
ready, says = os.pipe()
subprocess.Popen(["sh", "-c", f"sleep 600 & echo x >&{says}; sleep 600"], pass_fds=[says])
os.read(ready, 1)
end_descendants(but=[spared.pid, stays.pid])
assert sorted(children_of(os.getpid())) == sorted([spared.pid, stays.pid])
assert os.waitstatus_to_exitcode(os.waitpid(spared.pid, 0)[1]) == 7
assert stays.poll() is None
stays.kill()
await_children(300.0)
assert children_of(os.getpid()) == []
"""


def test_children_are_awaited_and_ended_but_for_those_that_are_spared() -> None:
    subprocess.run([sys.executable, "-c", CHILDREN], check=True, timeout=250)


# A thread waits in the kernel until the file is opened by somebody else, and no signal but SIGKILL interrupts it:
# a process that it starts opens the file before its program, and until then the kernel holds the thread.
HELD = """
import os, sys, threading, time
open_first = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
threading.Thread(target=lambda: os.posix_spawn("/bin/true", ["true"], {}, file_actions=open_first)).start()
time.sleep(600)
"""


def test_standstill_is_that_of_every_thread_or_the_end(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", HELD, str(fifo)]) as process:
        try:
            # Any thread may be so for a moment, while it reads from a disk; this one is from when it has a child.
            assert soon(lambda: bool(processes.children_of(process.pid)))
            process.send_signal(signal.SIGSTOP)
            assert soon(lambda: processes.state_of(process.pid) == "T")
            assert not processes.await_standstill(process.pid, 0.1)
            os.close(os.open(fifo, os.O_WRONLY))
            assert processes.await_standstill(process.pid, PATIENCE_S)
            threads = os.listdir(f"/proc/{process.pid}/task")
            assert {processes.state_of_thread(process.pid, int(thread)) for thread in threads} == {"T"}
        finally:
            process.kill()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"]) as process:
        assert processes.await_standstill(process.pid, PATIENCE_S)
        assert process.wait() == 3  # left to be reaped
