"""Other processes: waiting for their ends and until they stand still, and ending what this one has started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

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
