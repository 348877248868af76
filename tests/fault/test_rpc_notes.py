"""What the launcher says about ranks that wait in a call: where they are, and for whom and what they wait."""

from __future__ import annotations

import re
import signal

from tests.launch_support import Launcher, launcher

__all__ = ["launcher"]

SCRIPT = """
import os, signal, sys, time
import phalanx
from phalanx import rpc

def slow(seconds):
    time.sleep(seconds)

with phalanx.init() as world:
    rpc.init()
    if world.rank == 0:
        future = rpc.start(1, slow, 100, timeout_s=100)
        time.sleep(1.5)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        print("it waits", flush=True)
        future.wait()
    time.sleep(100)
"""
WAITING = r"worker1 \(rank 1, pid \d+ on \S+\) in slow \(\S*script\.py:\d+\)"


def test_the_failure_block_of_a_rank_that_was_killed_says_for_what_it_waited(launcher: Launcher) -> None:
    ended = launcher.run("-n", "2", launcher.script(SCRIPT), "killed")
    assert ended.code == 128 + signal.SIGKILL
    assert re.search(rf"^  it was waiting for {WAITING}$", ended.err.decode(), re.MULTILINE), ended.err


def test_sigquit_and_ctrl_c_say_it_too(launcher: Launcher) -> None:
    job = launcher.start("-n", "2", launcher.script(SCRIPT), "waits")
    job.read_lines(1)
    job.process.send_signal(signal.SIGQUIT)
    assert job.process.stderr is not None
    said = ""
    while "waiting for" not in said:
        line = job.process.stderr.readline().decode()
        assert line, said
        said += line
    assert re.search(rf"rank 0 is at\n(  .*\n)*?  waiting for {WAITING}\n", said), said
    job.process.send_signal(signal.SIGINT)
    said = job.finish().err.decode()
    assert re.search(rf"^  rank 0: .*script\.py:\d+ future\.wait\(\); it waits for {WAITING}$", said, re.MULTILINE), (
        said
    )
