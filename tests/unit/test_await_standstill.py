"""Waiting until a child that was sent SIGSTOP has stopped, with every thread of its."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import soon

from phalanx.system import processes

PATIENCE_S = 100.0
# A thread waits in the kernel until the file is opened by somebody else, and no signal but SIGKILL interrupts it:
# a process that it starts opens the file before its program, and until then the kernel holds the thread.
HELD = """
import os, sys, threading, time
open_first = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
threading.Thread(target=lambda: os.posix_spawn("/bin/true", ["true"], {}, file_actions=open_first)).start()
time.sleep(600)
"""


def test_a_thread_that_still_runs_is_waited_for(tmp_path: Path) -> None:
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
            assert threads_of(process.pid) == {"T"}
        finally:
            process.kill()


def test_the_end_of_the_child_ends_the_wait_and_is_left_to_be_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"]) as process:
        assert processes.await_standstill(process.pid, PATIENCE_S)
        assert process.wait() == 3


def threads_of(pid: int) -> set[str]:
    return {processes.state_of_thread(pid, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}
