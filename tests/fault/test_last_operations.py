"""The error about a rank that is lost, or late, says what that rank did last, from its flight recorder."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Member, run_ranks, values
from tests.support.waiting import await_end, when_waiting
from torch.distributed.distributed_c10d import _set_pg_timeout

import phalanx
from phalanx.errors import CollectiveTimeout, PeerLost
from phalanx.system.host import machine_name

HERE = Path(__file__)


def test_lost_rank_is_said_with_its_last_operation() -> None:
    def body(member: Member) -> PeerLost:
        member.join()
        dist.all_reduce(torch.ones(3))
        if member.rank == 1:
            (member.folder / "pid.part").write_text(str(os.getpid()))
            (member.folder / "pid.part").rename(member.folder / "pid")
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGKILL))
            with phalanx.label("evaluation"):
                dist.all_reduce(torch.ones(8))  # the last call of rank 1
        member.await_said("pid")
        await_end(int((member.folder / "pid").read_text()))  # in its call, into which it had put its part
        dist.all_reduce(torch.ones(8))
        with pytest.raises(PeerLost) as caught:
            dist.all_reduce(torch.ones(8))
        return caught.value

    lines = enumerate(HERE.read_text().splitlines(), 1)
    place = f"{HERE}:{next(number for number, line in lines if line.endswith('# the last call of rank 1'))}"
    outcomes = run_ranks(body, 3)
    for error in values([outcomes[0], outcomes[2]]):
        did = f'It was in all_reduce #2 (float32, 32 B, sum) at {place} in "evaluation". '
        assert f"{did}Look at that rank's own output" in str(error)
        assert str(error).count("\n") < 12
        assert (error.group_rank, error.rank, error.host) == (1, 1, machine_name())
        assert error.last_line == place
        assert error.last_operation.startswith("all_reduce #2")
        assert (error.group, 0 < error.elapsed_s < 60) == ("0", True)
        assert (error.sequence, error.signal) == (3, 0)  # nobody says by which signal: there is no launcher


def test_late_rank_is_said_with_its_last_operation() -> None:
    def body(member: Member) -> int:
        member.join()
        dist.broadcast(torch.ones(4), 0)
        member.meet("done")  # rank 0 waits for nobody in the broadcast
        _set_pg_timeout(timedelta(seconds=0.5))
        if member.rank == 1:
            member.await_said("raised")
            return os.getpid()
        with pytest.raises(
            CollectiveTimeout, match=r"Its last operation was broadcast #1 .* at .*\.py:\d+\. Is it"
        ) as e:
            dist.all_reduce(torch.ones(8))
        member.say("raised")
        assert (e.value.rank, e.value.elapsed_s, e.value.sequence) == (1, 0.5, 2)
        return e.value.pid

    late, own = values(run_ranks(body, 2))
    assert late == own


def test_rank_of_a_smaller_group_is_named_by_its_rank_in_the_world_too() -> None:
    def body(member: Member) -> PeerLost | None:
        member.join()
        group = dist.new_group([1, 2])
        if member.rank == 0:
            return None
        dist.barrier(group=group)
        if member.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            dist.barrier(group=group)
        return caught.value

    (error,) = values(run_ranks(body, 3)[1:2])
    assert (error.group_rank, error.rank) == (1, 2)
    assert (error.group, error.sequence, error.elapsed_s > 0) == ("1", 2, True)
