"""Workers that die, stop, or come and go while others wait for them; workers that are no ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import phalanx
from phalanx import rpc
from phalanx.errors import InitializationError, WorkerLost
from tests.rpc import workers
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks, run_ranks, values
from tests.support.stores import tcp_store

PATIENCE_S = 60.0


def test_worker_with_whom_nobody_talked_dies_and_shutdown_holds_nobody() -> None:
    size = 3

    def run(member: Member) -> Any:
        workers.begin(member)
        if member.rank == size - 1:
            member.await_said("leaving-0", "leaving-1")
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        member.say(f"leaving-{member.rank}")
        began = time.monotonic()
        rpc.shutdown(timeout_s=PATIENCE_S)
        return time.monotonic() - began < PATIENCE_S / 2

    assert values(run_ranks(run, size)[:-1]) == [True] * (size - 1)


def test_a_loss_that_the_function_itself_raised_is_not_called_again() -> None:
    def body(member: Member) -> None:
        if member.rank == 0:
            with pytest.raises(WorkerLost, match="another worker is gone"):
                rpc.call("worker1", workers.lose, retry=True)
            assert rpc.call("worker1", workers.times_lost) == 1

    workers.with_workers(body, 2)


def test_worker_that_is_no_rank_joins_dies_and_comes_back_by_its_name() -> None:
    """Ranks 0 and 1 are the job's. One worker gives up before they meet; the server waits through their failed try."""

    def rank(member: Member, store: Any) -> None:
        dist.init_process_group("gloo", store=PrefixStore("ranks", store), rank=member.rank, world_size=2)
        if member.rank == 0:
            with pytest.raises(InitializationError, match=r"waited 0\.2 s for rpc\.init"):
                rpc.init(wait_s=0.2)
            member.say("in vain")
        member.await_said("in vain", "early")
        rpc.init()
        if member.rank == 0:
            member.await_said("server 3")
            first = rpc.call("server", workers.pid)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(WorkerLost) as caught:
                while True:
                    rpc.call("server", workers.pid)
            assert (caught.value.worker, caught.value.pid) == ("server", first)
            member.say("died")
            second = rpc.call("server", workers.pid, retry=True)
            member.await_said("server 4")
            assert (member.folder / "pid").read_text() == str(second) != str(first)
            member.say("over")
        rpc.shutdown()

    def body(member: Member) -> None:
        store = tcp_store(member)
        if member.rank < 2:
            rank(member, store)
            return
        where = f"127.0.0.1:{store.port}"
        if member.rank == 2:
            said = f"waited 0.2 s for all ranks of the job whose store is at {where} to call rpc.init"
            with pytest.raises(InitializationError, match=said):
                rpc.init("early", join=where, wait_s=0.2)
            member.say("early")
            return
        if member.rank == 4:
            member.await_said("died")
            (member.folder / "pid").write_text(str(os.getpid()))
        rpc.init("server", join=where)
        member.say(f"server {member.rank}")
        member.await_said("over")
        rpc.shutdown()

    outcomes = run_ranks(body, 5)
    assert outcomes[3].signal == signal.SIGKILL
    values(outcomes[:3] + outcomes[4:])


def test_store_that_only_ranks_can_use_is_said_to_be_that() -> None:
    def body(member: Member) -> None:
        if member.rank == 2:
            member.await_said("there-0", "there-1")
            with pytest.raises(InitializationError) as caught:
                rpc.init("server", join=f"127.0.0.1:{port}", wait_s=1.0)
            assert f"what listens at 127.0.0.1:{port} is no store of torch's" in str(caught.value)
            assert "start them with phalanx run or torchrun" in str(caught.value)
            member.say("over")
            return
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(member.rank)}
        os.environ.update(place)
        with phalanx.init(quiet=True):
            member.say(f"there-{member.rank}")
            member.await_said("over")

    with held_port() as port:
        on_ranks(body, 3)
