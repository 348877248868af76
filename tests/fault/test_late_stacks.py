"""A stack that a rank of another host writes after the answer that it was for is shown to nobody."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.support.hosts import why_no_hosts
from tests.support.remote import RemoteLauncher, hosts, remote
from tests.support.waiting import soon, stop

__all__ = ["hosts", "remote"]  # fixtures

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

SCRIPT = """
    import os, sys, time
    folder = sys.argv[1]
    open(f"{folder}/up-{os.environ['RANK']}", "w").write(str(os.getpid()))
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
"""


def test_a_stack_that_comes_late_is_not_printed_when_its_rank_ends(remote: RemoteLauncher) -> None:
    job = remote.start("-H", "h0:1,h1:1", "-q", "--no-preload", remote.script(SCRIPT), str(remote.folder))
    assert soon(lambda: all((remote.folder / f"up-{rank}").exists() for rank in range(2)), 240), job.said()
    victim = remote.wait_for_process(1, "rank-1")
    stop(victim)
    job.process.send_signal(signal.SIGQUIT)
    answer = re.compile(r"ranks? (0-)?1 did not say where.*\n")  # rank 0 may be late too
    assert soon(lambda: answer.search(job.err) is not None, 240), job.said()
    said = job.err
    os.kill(victim, signal.SIGCONT)
    # The handler writes in the main thread, so its stack is there when the rank has gone on.
    (remote.folder / "go").touch()
    assert job.finish() == 0
    assert job.err == said
