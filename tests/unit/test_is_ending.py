"""Whether a process has begun to end: not while it runs or is stopped, and from the moment its end can be noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.waiting import stop

from phalanx.system.processes import is_ending

# What /proc shows of the name may hold what it separates the name with.
PROGRAM = """
import sys
from phalanx.system.processes import set_name

set_name("a) 4 (b")
print("up", flush=True)
sys.stdin.read()
"""


def test_a_process_is_ending_once_others_can_notice_its_end() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert not is_ending(process.pid)
        stop(process.pid)
        assert not is_ending(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.close()
        assert not process.stdout.read()  # the kernel has closed its end
        assert is_ending(process.pid)
    assert is_ending(process.pid)  # it is gone
