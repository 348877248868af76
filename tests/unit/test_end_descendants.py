"""A process that ends all that it has started, but for some: those can still be asked how they ended."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, subprocess, time
from phalanx.system import processes

processes.adopt_orphans()
spared = subprocess.Popen(["sh", "-c", "exit 7"])
alive = subprocess.Popen(["sleep", "600"])
os.waitid(os.P_PID, spared.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
time.sleep(0.2)
processes.end_descendants(but=[spared.pid, alive.pid])
print(sorted(processes.children_of(os.getpid())) == sorted([spared.pid, alive.pid]))
print(os.waitstatus_to_exitcode(os.waitpid(spared.pid, 0)[1]), alive.poll())
alive.kill()
alive.wait()
"""


def test_a_child_that_is_spared_can_still_be_waited_for() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["True", "7 None"], done.stderr
