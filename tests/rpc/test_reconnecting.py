"""Connections that break while calls are under way: no call is lost, and none runs twice."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch

from phalanx import rpc
from phalanx.wire import dial
from tests.rpc import workers
from tests.rpc.workers import next_of
from tests.support.proxies import Proxy
from tests.support.ranks import Member, on_ranks

PATIENCE_S = 60.0


def count(key: str, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """How often it was called with this key, and what it was called with, doubled."""
    return workers.count(key), tensor * 2


def counted() -> dict[str, int]:
    return workers.calls


def test_every_call_runs_once_though_connections_are_reset_in_the_middle_of_frames() -> None:
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
            threading.Thread(target=work, args=(to, f"{member.rank}.{each}", random.Random(each), failed))
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

    def run(member: Member) -> Any:
        workers.use_tcp()
        member.join("gloo")
        proxy = Proxy(random.Random(member.rank), 1_000_000)
        vars(dial)["connect"] = proxy.connect
        rpc.init(timeout_s=PATIENCE_S)
        try:
            return body(member, proxy)
        finally:
            proxy.longest = 0
            rpc.shutdown()

    assert sum(on_ranks(run, 2)) > 0
