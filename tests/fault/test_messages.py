"""Messages whose peer stops coming or is slow, and waits that Ctrl-C ends."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import when_waiting

from phalanx.errors import CollectiveTimeout, PeerLost
from phalanx.system.host import machine_name


def test_groups_timeout_holds_for_a_future() -> None:
    def body(member: Member) -> None:
        member.join_patiently(0.5)
        if member.rank == 1:
            member.await_said("raised")
            return
        work = dist.irecv(torch.zeros(4), 1)
        assert work is not None
        with pytest.raises(RuntimeError, match=r"CollectiveTimeout: rank 1 of the group.*test_messages\.py:"):
            work.get_future().wait()
        with pytest.raises(CollectiveTimeout):
            work.wait()
        member.say("raised")

    on_ranks(body, 2)


def hold_back(sender: int, received: torch.Tensor, lasts_s: float) -> None:
    """Stop a process again and again while its message arrives, and only after a part has come, for so long."""
    probes, until = received[:: len(received) // 64], time.monotonic() + lasts_s
    before = probes.clone()
    while time.monotonic() < until and not bool(probes.all()):
        if not torch.equal(probes, before):
            os.kill(sender, signal.SIGSTOP)
            time.sleep(0.4)
            before = probes.clone()
            os.kill(sender, signal.SIGCONT)


@pytest.mark.parametrize("timeout_s", [2.0, pytest.param(4.0, marks=pytest.mark.long)])
def test_long_message_that_keeps_moving_is_not_late(timeout_s: float) -> None:
    """The sender is stopped again and again, so that the message takes longer than the group's timeout."""
    count = 16_000_000

    def body(member: Member) -> bool:
        received = torch.from_file(str(member.folder / "received"), shared=True, size=count)
        member.join()
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))  # type: ignore[union-attr]
        if member.rank == 1:
            started = time.monotonic()
            dist.recv(received, 0)
            assert bool((received == 1).all())
            return time.monotonic() - started > timeout_s
        sender = os.getpid()
        if (holder := os.fork()) == 0:
            hold_back(sender, received, timeout_s + 0.5)
            os._exit(0)
        dist.send(torch.ones(count), 1)
        os.waitpid(holder, 0)
        return True

    # On a busy machine a message may be through before its sender is stopped often enough.
    assert any(on_ranks(body, 2) == [True, True] for _ in range(5))


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce async", "message"])
def test_ctrl_c_ends_a_wait_and_the_others_are_told(call: str) -> None:
    def body(member: Member) -> None:
        member.join()
        dist.barrier()
        if member.rank == 0:
            member.await_said("told")
            with pytest.raises(PeerLost, match="was interrupted") as lost:
                dist.all_reduce(torch.ones(1))
            error = lost.value
            assert (error.group_rank, error.rank, error.pid) == (1, 1, int((member.folder / "other").read_text()))
            assert (error.host, error.signal) == (machine_name(), 0)
            assert call == "message" or error.last_operation.startswith("all_reduce #2 (float32, 4 B, sum) at ")
            return
        (member.folder / "other").write_text(str(os.getpid()))
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
