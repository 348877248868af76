"""What the launcher says about ranks that wait in a call: where they are, and for whom and what they wait."""

from __future__ import annotations

import os
import re
import signal

from tests.launch_support import Launcher, ask_until, launcher, time_for_stacks

__all__ = ["launcher"]

SCRIPT = """
import time
import phalanx
from phalanx import rpc

def slow(seconds):
    time.sleep(seconds)

with phalanx.init() as world:
    rpc.init()
    if world.rank == 0:
        future = rpc.start(1, slow, 1000, timeout_s=1000)
        print("asked", flush=True)
        future.wait()
    time.sleep(1000)
"""
WAITING = r"worker1 \(rank 1, pid \d+ on \S+\) in slow \(script\.py:\d+\)"


def test_launcher_says_for_which_call_a_rank_waits(launcher: Launcher) -> None:
    """When it is asked by SIGQUIT, and in the failure block of a rank that was killed meanwhile."""
    errors = launcher.directory / "errors"
    environment = time_for_stacks(launcher.directory / "site")
    with open(errors, "wb") as file:
        job = launcher.start("-n", "2", launcher.script(SCRIPT), stderr=file, environment=environment)
    job.read_lines(1)
    ask_until(job.process, errors.read_text, rf"rank 0 is at\n(  .*\n)*?  waiting for {WAITING}\n")
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.finish().code == 128 + signal.SIGKILL
    said = errors.read_text()
    assert re.search(rf"^  it was waiting for {WAITING}$", said, re.MULTILINE), said
