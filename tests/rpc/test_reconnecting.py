"""Connections that break while calls are under way: no call is lost, none runs twice, and a death is still a death."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import WorkerLost
from phalanx.rpc import session
from phalanx.rpc.links.socket import SocketLink
from phalanx.wire import dial
from tests.rpc import workers
from tests.rpc.workers import next_of
from tests.support.proxies import Proxy
from tests.support.ranks import Member, on_ranks, run_ranks

PATIENCE_S = 60.0


def through(proxies: Callable[[Member], Proxy], body: Callable[[Member, Proxy], Any]) -> Callable[[Member], Any]:
    def run(member: Member) -> Any:
        os.environ["PHALANX_HOST"] = f"host{member.rank}"  # so they do not try to share memory
        member.join("gloo")
        proxy = proxies(member)
        vars(dial)["connect"] = proxy.connect
        rpc.init(timeout_s=PATIENCE_S)
        try:
            return body(member, proxy)
        finally:
            proxy.longest = 0
            rpc.shutdown()

    return run


def count(key: str, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """How often it was called with this key, and what it was called with, doubled."""
    return workers.count(key), tensor * 2


def counted() -> dict[str, int]:
    return workers.calls


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
def test_every_call_runs_once_though_connections_are_reset_in_the_middle_of_frames(size: int, seed: int) -> None:
    sizes = [0, 1, 100, 10_000, 20_000, 300_000]

    def work(to: str, name: str, numbers: random.Random, failed: list[BaseException]) -> None:
        try:
            for number in range(30):
                tensor = torch.full((numbers.choice(sizes),), float(number))
                times, doubled = rpc.call(to, count, f"{name}/{number}", tensor)
                assert times == 1
                assert torch.equal(doubled, tensor * 2)
        except BaseException as error:
            failed.append(error)

    def body(member: Member, proxy: Proxy) -> Any:
        to = next_of(member)
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=work, args=(to, f"{member.rank}.{each}", random.Random(1000 * seed + each), failed))
            for each in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        ran = rpc.call(to, counted)
        assert sorted(ran.values()) == [1] * len(ran)
        assert {f"{member.rank}.{each}/{number}" for each in range(3) for number in range(30)} <= ran.keys()
        return proxy.resets

    resets = on_ranks(through(lambda member: Proxy(random.Random(100 * seed + member.rank), 1_000_000), body), size)
    assert sum(resets) > 0


def links() -> list[SocketLink]:
    return [link for link in session.agent()._connections._peers if isinstance(link, SocketLink)]


@pytest.mark.parametrize("side", [0, 1])
def test_a_call_that_runs_while_its_connection_breaks_returns(side: int) -> None:
    def body(member: Member, proxy: Proxy) -> Any:
        if member.rank:
            return None
        future = rpc.start(1, workers.sleep, 0.3)
        if side:
            rpc.start(1, cut)
        else:
            time.sleep(0.1)
            cut()
        assert future.wait() == 0.3
        assert rpc.call(1, workers.add, 1, 2) == 3
        return "returned"

    assert on_ranks(through(lambda member: Proxy(random.Random(0), 0), body), 2)[0] == "returned"


def cut() -> None:
    for link in links():
        link.sock.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_is_killed_after_its_connection_broke_is_lost() -> None:
    def body(member: Member, proxy: Proxy) -> Any:
        if member.rank:
            time.sleep(PATIENCE_S)
        pid = rpc.call(1, workers.pid)
        waiting = [rpc.start(1, workers.sleep, PATIENCE_S) for _ in range(3)]
        cut()
        time.sleep(0.2)
        assert not any(future.done() for future in waiting)
        os.kill(pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(WorkerLost):
                future.wait()
        return "lost"

    outcomes = run_ranks(through(lambda member: Proxy(random.Random(0), 0), body), 2)
    assert outcomes[0].error is None, outcomes[0].traceback
    assert outcomes[0].value == "lost"
