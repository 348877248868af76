"""Messages whose peer dies, stops coming or is slow, and messages that Ctrl-C ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks, run_ranks
from tests.support.waiting import when_waiting

from phalanx.errors import CollectiveTimeout, PeerLost


@pytest.mark.parametrize("size", [2, 3])
def test_the_future_of_a_message_tells_that_its_peer_has_died(size: int) -> None:
    def body(member: Member) -> bool:
        member.join()
        if member.rank == member.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.irecv(torch.zeros(4), member.size - 1)
        assert work is not None
        future = work.get_future()
        deadline = time.monotonic() + 60
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert future.done()
        with pytest.raises(RuntimeError, match="PeerLost"):
            future.wait()
        with pytest.raises(PeerLost):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        return True

    for outcome in run_ranks(body, size)[:-1]:
        assert outcome.error is None, outcome.traceback


def test_asking_whether_a_message_is_done_finds_that_its_peer_has_died() -> None:
    def body(member: Member) -> bool:
        member.join()
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = dist.irecv(torch.zeros(4), 1)
        assert work is not None
        deadline = time.monotonic() + 60
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        return isinstance(work.exception(), PeerLost)

    assert run_ranks(body, 2)[0].value is True


def test_the_groups_timeout_holds_for_a_future() -> None:
    def body(member: Member) -> bool:
        member.join_patiently(0.5)
        if member.rank == 1:
            member.await_said("raised")
            return True
        work = dist.irecv(torch.zeros(4), 1)
        assert work is not None
        with pytest.raises(RuntimeError, match=r"CollectiveTimeout: rank 1 of the group.*test_messages\.py:"):
            work.get_future().wait()
        with pytest.raises(CollectiveTimeout):
            work.wait()
        member.say("raised")
        return True

    assert on_ranks(body, 2) == [True, True]


def test_a_long_message_that_keeps_moving_is_not_late() -> None:
    """The sender is stopped again and again, so that the whole takes several times the group's timeout."""

    def body(member: Member) -> float:
        member.join()
        communicator = dist.group.WORLD._communicator  # type: ignore[union-attr]
        tensor = torch.full((64_000_000,), float(1 - member.rank))
        dist.barrier()
        if member.rank == 0:
            sender = os.getpid()
            if os.fork() == 0:
                for _ in range(8):
                    os.kill(sender, signal.SIGSTOP)
                    member.say("stopped")
                    time.sleep(0.4)
                    before = cpu_ns(sender)
                    os.kill(sender, signal.SIGCONT)
                    while cpu_ns(sender) < before + 500_000:  # a busy machine may let the sender wait
                        time.sleep(0.0005)
                os._exit(0)
            member.await_said("stopped")  # else it may be done before it is stopped at all
            dist.send(tensor, 1)
            return 0.0
        communicator.set_timeout(timedelta(seconds=1.5))
        started = time.monotonic()
        dist.recv(tensor, 0)
        assert bool((tensor == 1).all())
        return time.monotonic() - started

    assert on_ranks(body, 2)[1] > 1.5


def cpu_ns(pid: int) -> int:
    """For how long a process has had a core."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def test_a_message_that_ctrl_c_ended_stays_failed() -> None:
    def body(member: Member) -> bool:
        member.join()
        if member.rank == 1:
            member.await_said("told")
            return True
        work = dist.irecv(torch.zeros(4), 1)
        assert work is not None
        with pytest.raises(KeyboardInterrupt):
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            work.wait()
        for _ in range(2):
            with pytest.raises(PeerLost, match="was interrupted"):
                work.wait()
            assert not work.is_success()
        member.say("told")
        return True

    assert on_ranks(body, 2) == [True, True]


LEAVES_A_MESSAGE = """
import atexit, os, threading

def say():
    left = [t.name for t in threading.enumerate() if t.name.startswith("phalanx")]
    os.write(1, f"{left}\\n".encode())  # at once: print may write the end of the line later

# The first that is registered runs last: right before the interpreter finalises.
atexit.register(say)

import torch, torch.distributed as dist
import phalanx

dist.init_process_group("phalanx")
if dist.get_rank() == 0:
    dist.isend(torch.zeros(1 << 22), 1)
else:
    dist.irecv(torch.zeros(4), 0, tag=1)
dist.all_reduce(torch.ones(1), async_op=True).wait()
"""


def test_no_thread_outlives_the_interpreter_when_a_message_is_under_way(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES_A_MESSAGE)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = subprocess.run(
        [*torchrun, "leaves.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["[]", "[]", ""]), ended.stderr
