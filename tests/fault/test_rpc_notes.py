"""What the launcher says about ranks that wait in a call: where they are, and for whom and what they wait."""

from __future__ import annotations

import os
import re
import signal

from tests.launch_support import Launcher, RunningJob, ask_until, launcher, time_for_stacks

__all__ = ["launcher"]

SCRIPT = """
import sys, time
import phalanx
from phalanx import rpc

def slow(seconds):
    time.sleep(seconds)

with phalanx.init() as world:
    rpc.init()
    if world.rank == 0:
        future = rpc.start(1, slow, 1000, timeout_s=1000)
        print("asked", flush=True)
        if sys.argv[1] == "waits":
            future.wait()
    time.sleep(1000)
"""
WAITING = r"worker1 \(rank 1, pid \d+ on \S+\) in slow \(script\.py:\d+\)"


def started(launcher: Launcher, what: str) -> RunningJob:
    """The job, as soon as it knows for what rank 0 waits; its standard error is in a file."""
    errors = launcher.directory / "errors"
    environment = time_for_stacks(launcher.directory / "site")
    with open(errors, "wb") as file:
        job = launcher.start("-n", "2", launcher.script(SCRIPT), what, stderr=file, environment=environment)
    job.read_lines(1)
    ask_until(job.process, errors.read_text, rf"rank 0 is at\n(  .*\n)*?  waiting for {WAITING}\n")
    return job


def test_the_failure_block_of_a_rank_that_was_killed_says_for_what_it_waited(launcher: Launcher) -> None:
    job = started(launcher, "killed")
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.finish().code == 128 + signal.SIGKILL
    said = (launcher.directory / "errors").read_text()
    assert re.search(rf"^  it was waiting for {WAITING}$", said, re.MULTILINE), said


def test_sigquit_and_ctrl_c_say_it_too(launcher: Launcher) -> None:
    job = started(launcher, "waits")
    job.process.send_signal(signal.SIGINT)
    job.finish()
    said = (launcher.directory / "errors").read_text()
    assert re.search(rf"^  rank 0: .*script\.py:\d+ future\.wait\(\); it waits for {WAITING}$", said, re.MULTILINE), (
        said
    )
