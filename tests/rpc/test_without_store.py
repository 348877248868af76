"""Workers whose store is gone with its host, and workers that are many."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from phalanx import rpc
from phalanx.errors import InitializationError
from phalanx.rpc import session
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks, run_ranks
from tests.support.stores import tcp_store


def test_workers_go_on_when_the_store_is_gone_with_its_host() -> None:
    def body(member: Member) -> Any:
        dist.init_process_group("gloo", store=tcp_store(member), rank=member.rank, world_size=member.size)
        rpc.init()
        member.say(f"in{member.rank}")
        to = 3 - member.rank
        if member.rank == 0:
            member.await_said("in0", "in1", "in2")
            rpc.call(1, workers.add, 1, 2)
            rpc.call(2, workers.add, 1, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        while "worker0" in {found.name for found in session.agent().members()}:
            time.sleep(0.01)
        got = rpc.call(to, workers.add, 1, 2), rpc.call(f"worker{to}", workers.add, 3, 4)
        others = [found.name for found in session.agent().members()]
        member.say(f"done{member.rank}")
        member.await_said(f"done{to}")
        rpc.shutdown()
        return got, others

    outcomes = run_ranks(body, 3)
    for outcome in outcomes[1:]:
        assert outcome.error is None, outcome.traceback
        assert outcome.value == ((3, 7), ["worker1", "worker2"])


def test_a_rank_that_waits_in_init_says_that_the_store_is_gone() -> None:
    def body(member: Member) -> Any:
        dist.init_process_group("gloo", store=tcp_store(member), rank=member.rank, world_size=member.size)
        if member.rank == 0:
            member.await_said("waits")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for = session.wait_for

        def said(*arguments: Any) -> None:
            member.say("waits")
            wait_for(*arguments)

        pytest.MonkeyPatch().setattr(session, "wait_for", said)  # in a process of its own
        with pytest.raises(InitializationError, match="lost the job's store") as caught:
            rpc.init()
        return str(caught.value)

    outcomes = run_ranks(body, 2)
    assert outcomes[1].error is None, outcomes[1].traceback


@pytest.mark.long
def test_workers_that_are_many_find_each_other() -> None:
    def body(member: Member) -> Any:
        member.join("gloo")
        rpc.init()
        try:
            return len(session.agent().members()), rpc.call((member.rank + 7) % member.size, workers.add, 1, 2)
        finally:
            rpc.shutdown()

    assert on_ranks(body, 32) == [(32, 3)] * 32
