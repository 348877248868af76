"""The launcher says what a rank did last, however the rank ended: it has the rank's flight recorder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.launch_support import Launcher, launcher
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, reachable_hosts

__all__ = ["launcher"]  # a fixture

PROGRAM = """
import os, signal, sys, threading, time
import torch
import phalanx
from phalanx.launch.rank import trace
from phalanx.watch.glance import glance

def kill_in_a_call():
    seen = None
    while seen is None or not seen.under_way_since_ns:
        time.sleep(0.01)
        seen = glance(*trace.place_of_recorder(os.environ["PHALANX_RUN_ID"]))
    os.kill(os.getpid(), signal.SIGKILL)

world = phalanx.init()
x = torch.ones(1024)
for step in range(3):
    world.step(step)
    world.all_reduce(x)
if world.rank == 1:
    if sys.argv[1] == "in a call":
        threading.Thread(target=kill_in_a_call).start()
        with phalanx.label("evaluation"):
            world.broadcast(x, src=0)
    if sys.argv[1] == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(60)
"""

CALL = r"all_reduce #\d+ \(float32, 4\.0 KiB, sum\) at script\.py:18 in step 2"
DONE = rf"  its last operation, {CALL}, was done \d+\.\d s before\n"
IN = (
    r'  it was in broadcast #\d+ \(float32, 4\.0 KiB, src=0\) at script\.py:23 in step 2, "evaluation", for \d+\.\d s\n'
)


@pytest.mark.parametrize(("how", "line"), [("9", DONE), ("11", DONE), ("os._exit", DONE), ("in a call", IN)])
def test_a_killed_ranks_last_operation_and_line_are_said(launcher: Launcher, how: str, line: str) -> None:
    done = launcher.run("-n", "2", launcher.script(PROGRAM), how)
    assert done.code != 0
    assert re.search(line, done.err_text), done.err_text


def test_a_rank_that_raised_is_shown_by_its_traceback_alone(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", launcher.script(PROGRAM), "nothing")
    assert "ValueError" in done.err_text
    assert "last operation" not in done.err_text


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_the_last_operation_of_a_rank_on_another_host_is_said(tmp_path: Path) -> None:
    with reachable_hosts(2, tmp_path) as hosts:
        remote = RemoteLauncher(hosts, tmp_path)
        try:
            job = remote.start("-H", "h0:1,h1:1", remote.script(PROGRAM), "in a call")
            assert job.finish() != 0
            assert re.search(IN, job.err), job.said()
        finally:
            remote.clear()
