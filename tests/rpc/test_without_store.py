"""Workers whose store is gone with its host."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

from phalanx import rpc
from tests.rpc import workers
from tests.support.ranks import Member, run_ranks, values
from tests.support.stores import tcp_store
from tests.support.waiting import soon


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
        assert soon(lambda: "worker0" not in {found.name for found in rpc.workers()})
        got = rpc.call(to, workers.add, 1, 2), rpc.call(f"worker{to}", workers.add, 3, 4)
        others = [found.name for found in rpc.workers()]
        member.say(f"done{member.rank}")
        member.await_said(f"done{to}")
        rpc.shutdown()
        return got, others

    assert values(run_ranks(body, 3)[1:]) == [((3, 7), ["worker1", "worker2"])] * 2
