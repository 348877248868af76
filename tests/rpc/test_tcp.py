"""Workers that talk over TCP, as between hosts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.errors import CallTimeout, WorkerLost
from phalanx.rpc import connections, session
from phalanx.rpc.links.contract import LinkEnded
from phalanx.rpc.links.shared import SharedHub, SharedLink
from tests.rpc import workers
from tests.rpc.workers import next_of
from tests.support.ranks import Member, on_ranks, run_ranks
from tests.support.waiting import soon, stop


def over_tcp(body: Callable[[Member], Any]) -> Callable[[Member], Any]:
    def run(member: Member) -> Any:
        os.environ["PHALANX_HOST"] = f"host{member.rank}"  # so they do not try to share memory
        member.join("gloo")
        rpc.init()
        try:
            return body(member)
        finally:
            rpc.shutdown()

    return run


def way_to(name: str) -> str:
    agent = session.agent()
    return agent._connections.link_to(agent.member(name), time.monotonic() + 60).name


def double(tensors: list[torch.Tensor], number: int) -> tuple[list[torch.Tensor], int]:
    return [tensor * 2 for tensor in tensors], number


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_all_sizes_arrive_whole_beside_each_other(size: int) -> None:
    def exchange(to: str, seed: int, failed: list[BaseException]) -> None:
        numbers = random.Random(seed)
        try:
            for number in range(8):
                sizes = [numbers.choice([0, 1, 100, 16384, 16385, 65536, 700_001]) for _ in range(3)]
                sent = [torch.arange(size, dtype=torch.float32) for size in sizes]
                got, same = rpc.call(to, double, sent, number)
                assert same == number
                assert all(torch.equal(there, here * 2) for there, here in zip(got, sent, strict=True))
        except BaseException as error:
            failed.append(error)

    def body(member: Member) -> Any:
        to = next_of(member)
        failed: list[BaseException] = []
        threads = [threading.Thread(target=exchange, args=(to, seed, failed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for number in range(100):
            assert rpc.call(to, workers.add, number, 1) == number + 1
        for thread in threads:
            thread.join()
        assert not failed, failed
        return way_to(to)

    assert on_ranks(over_tcp(body), size) == ["tcp"] * size


def test_a_stopped_worker_holds_up_nobody_longer_than_they_said() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        pid = rpc.call(1, workers.pid)
        large = torch.zeros(8 << 20)
        stop(pid)
        try:
            late: list[str] = []

            def send_much(timeout_s: float) -> None:
                with contextlib.suppress(CallTimeout):
                    rpc.call(1, torch.numel, large, timeout_s=timeout_s)
                    return
                late.append(f"a large call of {timeout_s} s")

            # What the quicker ones wait for would take as long as the test may.
            threads = [threading.Thread(target=send_much, args=(timeout_s,)) for timeout_s in (1000.0, 3.0)]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            with pytest.raises(CallTimeout):
                rpc.call(1, workers.add, 1, 2, timeout_s=0.3)
            threads[1].join()
            assert late == ["a large call of 3.0 s"]
            assert threads[0].is_alive()
        finally:
            os.kill(pid, signal.SIGCONT)
        threads[0].join()
        assert rpc.call(1, workers.add, 1, 2) == 3
        assert rpc.call(1, torch.numel, large) == 8 << 20
        return len(late)

    assert on_ranks(over_tcp(body), 2)[0] == 1


def test_a_worker_that_is_stopped_for_seconds_takes_the_rest_of_a_large_message_afterwards() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        pid = rpc.call(1, workers.pid)
        futures: list[rpc.Future[Any]] = []
        large = torch.ones(8 << 20)
        stop(pid)
        thread = threading.Thread(target=lambda: futures.append(rpc.start(1, double, [large], 7)))
        thread.start()
        time.sleep(4.5)  # longer than a kernel that is told so waits for a peer that takes nothing
        os.kill(pid, signal.SIGCONT)
        thread.join()
        (doubled,), number = futures[0].wait()
        assert torch.equal(doubled, large * 2)
        return number

    assert on_ranks(over_tcp(body), 2)[0] == 7


def test_a_peer_that_dies_within_a_large_message_is_lost() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            time.sleep(60)
        pid = rpc.call(1, workers.pid)
        threading.Timer(0.2, os.kill, [pid, signal.SIGKILL]).start()
        with pytest.raises(WorkerLost):
            while True:
                rpc.call(1, torch.numel, torch.zeros(8 << 20))
        return "lost"

    outcomes = run_ranks(over_tcp(body), 2)
    assert outcomes[0].error is None, outcomes[0].traceback
    assert outcomes[0].value == "lost"


@pytest.mark.parametrize("size", [2, 3])
def test_a_worker_that_cannot_attach_the_memory_of_one_that_could_talks_to_it_over_tcp(size: int) -> None:
    def out_of_reach(hub: SharedHub, offer: bytes) -> SharedLink:
        hub.withdraw(offer)
        raise LinkEnded("its shared memory is out of reach: Permission denied")

    def body(member: Member) -> Any:
        changes: list[str] = []
        watch = rpc.watch(lambda worker, event: changes.append(event))
        assert soon(lambda: len(changes) >= size - 1)
        for number in range(20):
            assert rpc.call(next_of(member), workers.add, number, 1) == number + 1
        dist.barrier()
        watch.stop()
        return way_to(next_of(member)), set(changes)

    def run(member: Member) -> Any:
        member.join()
        vars(connections)["SharedHub"] = type("Blind", (SharedHub,), {"confirm": out_of_reach})
        rpc.init()
        try:
            return body(member)
        finally:
            rpc.shutdown()
            dist.destroy_process_group()

    assert on_ranks(run, size) == [("tcp", {"came"})] * size
