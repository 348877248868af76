"""Messages whose peer stops coming or is slow, and waits that Ctrl-C ends."""

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
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import when_waiting

from phalanx.errors import CollectiveTimeout, PeerLost


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


def hold_back(sender: int, received: torch.Tensor, end: Path) -> None:
    """Stop a process again and again while its message arrives: a few times in each, and only after a part has come.

    Args:
        sender: the process.
        received: what arrives, in memory that is shared.
        end: a file; return once it is there.
    """
    probes, stops = received[:: len(received) // 64], 8
    message, count = 0.0, 0
    while True:
        before = probes.clone()
        while torch.equal(probes, before):
            if end.exists():
                return
            time.sleep(0.0005)
        if float(probes[0]) != message:
            message, count = float(probes[0]), 0
        if count < stops:
            count += 1
            os.kill(sender, signal.SIGSTOP)
            time.sleep(0.8)
            os.kill(sender, signal.SIGCONT)


def test_a_long_message_that_keeps_moving_is_not_late() -> None:
    """The sender is stopped again and again, so that one message takes longer than the group's timeout."""
    timeout_s, count = 4.0, 64_000_000

    def body(member: Member) -> bool:
        received = torch.from_file(str(member.folder / "received"), shared=True, size=count)
        member.join()
        communicator = dist.group.WORLD._communicator  # type: ignore[union-attr]
        if member.rank == 0:
            sender = os.getpid()
            holder = os.fork()
            if holder == 0:
                hold_back(sender, received, member.folder / "end")
                os._exit(0)
        member.meet("all are here")
        communicator.set_timeout(timedelta(seconds=timeout_s))
        lasted_s, again = 0.0, torch.ones(1)
        for number in range(1, 20):  # on a busy machine a message may be through before its sender is stopped
            started = time.monotonic()
            if member.rank == 0:
                dist.send(torch.full((count,), float(number)), 1)
                dist.recv(again, 1)
            else:
                dist.recv(received, 0)
                assert bool((received == number).all())
                lasted_s = time.monotonic() - started
                dist.send(torch.tensor([float(lasted_s <= timeout_s)]), 0)
            if (member.rank == 0 and not again) or lasted_s > timeout_s:
                break
        if member.rank == 0:
            (member.folder / "end").touch()
            os.waitpid(holder, 0)
        return member.rank == 0 or lasted_s > timeout_s

    assert on_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce async", "message"])
def test_ctrl_c_ends_a_wait_and_the_others_are_told(call: str) -> None:
    def body(member: Member) -> None:
        member.join()
        dist.barrier()
        if member.rank == 0:
            member.await_said("told")
            with pytest.raises(PeerLost, match="was interrupted"):
                dist.all_reduce(torch.ones(1))
            return
        started = time.monotonic()
        work = dist.irecv(torch.zeros(4), 0) if call == "message" else None
        with pytest.raises(KeyboardInterrupt):
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            if work is None:
                work = dist.all_reduce(torch.ones(1), async_op=call.endswith("async"))
            assert work is not None
            work.wait()
        assert time.monotonic() - started < 20  # not the group's timeout
        if call == "message":  # it stays failed
            assert work is not None
            for _ in range(2):
                with pytest.raises(PeerLost, match="was interrupted"):
                    work.wait()
                assert not work.is_success()
        member.say("told")

    on_ranks(body, 2)


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
