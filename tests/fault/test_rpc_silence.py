"""Workers over TCP that are stopped, and are not lost for it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import stop

from phalanx import rpc
from phalanx.rpc import session

STOPPED_S = 6.0  # longer than a silent host is waited for


def stop_for_long(pid: int) -> None:
    stop(pid)
    threading.Timer(STOPPED_S, os.kill, [pid, signal.SIGCONT]).start()


@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_that_is_stopped_is_not_lost_though_more_is_sent_to_it_than_it_can_take(size: int) -> None:
    def body(member: Member) -> Any:
        workers.use_tcp()
        member.join("gloo")
        rpc.init()
        last = size - 1
        if member.rank != last:
            pid = rpc.call(last, workers.pid)
            if member.rank == 0:
                stop_for_long(pid)
            assert rpc.call(last, torch.numel, torch.zeros(8 << 20)) == 8 << 20
        rpc.shutdown()

    on_ranks(body, size)


def test_a_worker_that_is_stopped_when_it_is_called_for_the_first_time_is_not_lost() -> None:
    def body(member: Member) -> Any:
        workers.use_tcp()
        member.join("gloo")
        rpc.init()
        if member.rank == 0:
            stop_for_long(session.agent().member(1).pid)
            assert rpc.call(1, workers.add, 1, 2) == 3
        rpc.shutdown()

    on_ranks(body, 2)
