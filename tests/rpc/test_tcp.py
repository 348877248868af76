"""Workers that talk over TCP, as between hosts, also when connections break."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc import connections, session
from phalanx.rpc.links.contract import LinkEnded
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.shared import SharedHub, SharedLink
from phalanx.rpc.links.socket import SocketLink
from phalanx.rpc.message import Kind, Message
from phalanx.wire import dial
from phalanx.wire.session import Session
from tests.rpc import workers
from tests.rpc.workers import next_of
from tests.support.proxies import Proxy
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon, stop

STOPPED_S = 6.0  # longer than a silent host is waited for


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


def test_a_worker_that_is_stopped_for_long_is_not_lost() -> None:
    """Whether it is called for the first time then, or is sent more than it can take."""

    def body(member: Member) -> None:
        large = torch.zeros(8 << 20)
        if member.rank == 1:
            pid = rpc.call(2, workers.pid)
            stop(pid)
            threading.Timer(STOPPED_S, os.kill, [pid, signal.SIGCONT]).start()
            member.say("stopped")
            assert rpc.call(2, torch.numel, large) == large.numel()
        if member.rank == 0:
            member.await_said("stopped")
            assert rpc.call(2, workers.add, 1, 2) == 3

    on_ranks(over_tcp(body), 3)


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


def test_a_worker_that_cannot_attach_the_memory_of_one_that_could_talks_to_it_over_tcp() -> None:
    size = 2

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


def test_messages_behind_an_interrupted_one_are_delivered_by_others() -> None:
    side, readers = Mock(), Readers()
    side.deliver.side_effect = [KeyboardInterrupt, None]
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    link, far = (SocketLink(end, Session(b"k" * 32, is_listener=end is ends[1]), side, b"", readers) for end in ends)
    link.begin()
    with link._reading:  # so that both are read at once
        for number in (1, 2):
            far.send(Message(Kind.NOTICE, number, "note", b"", []), 60)
    with pytest.raises(KeyboardInterrupt):
        link.wait(lambda: False, 1, 60)
    assert soon(lambda: side.deliver.call_count == 2)
    for each in (far, link, readers):
        each.close()
