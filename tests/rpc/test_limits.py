"""What waits for a slow callee is bounded and runs in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout
from phalanx.rpc import connections, handlers, peer, session, worker
from phalanx.rpc.links.readers import Readers
from phalanx.rpc.links.shared import SharedHub
from tests.rpc import workers
from tests.rpc.workers import with_workers
from tests.support.ranks import Member
from tests.support.waiting import soon


def resident(incoming: Any, value: Any) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def serve_beside_calls(_: Member) -> None:
    """Have every worker open the gate, and say how much memory it has, though all handlers wait."""

    def serve(made: worker.Worker) -> None:
        made.serve("open", workers.open_gate, quick=True)
        made.serve("resident", resident, quick=True)

    session.on_init(serve)


def begun(start: Callable[[int], rpc.Future[str]], count: int, *, until: int) -> tuple[list[Any], threading.Thread]:
    """Calls that a thread begins one after the other, a while after so many have begun; and the thread."""
    futures: list[rpc.Future[str]] = []

    def start_each() -> None:
        for number in range(count):
            futures.append(start(number))  # noqa: PERF401 - counted meanwhile

    starter = threading.Thread(target=start_each)
    starter.start()
    assert soon(lambda: len(futures) >= until)
    time.sleep(0.2)  # so that one more would have begun if it could
    return futures, starter


def test_caller_has_a_limited_number_of_calls_at_a_slow_callee() -> None:
    most = 40

    def before(member: Member) -> None:
        peer.MOST_CALLS, handlers.MOST = most, 10
        serve_beside_calls(member)

    def body(member: Member) -> None:
        if member.rank == 0:
            futures, starter = begun(lambda _: rpc.start(1, workers.wait_for_gate), 3 * most, until=most)
            assert len(futures) == most
            session.worker().notify(1, "open", None)
            starter.join()
            assert [future.wait() for future in futures] == ["open"] * (3 * most)

    with_workers(body, 2, before=before, tcp=True)


@pytest.mark.parametrize("tcp", [False, True])
def test_caller_has_a_limited_number_of_bytes_at_a_slow_callee(tcp: bool) -> None:
    nbytes, fit, more = 1 << 20, 8, 20
    larger = torch.zeros(12 << 20, dtype=torch.uint8)  # than all that may be under way

    def before(member: Member) -> None:
        peer.MOST_BYTES = fit * nbytes
        vars(connections)["SharedHub"] = partial(SharedHub, threads=4)  # which all wait
        serve_beside_calls(member)

    def body(member: Member) -> None:
        if member.rank:
            return
        assert rpc.call(1, torch.numel, larger) == larger.numel()
        argument = torch.zeros(nbytes, dtype=torch.uint8)
        futures, starter = begun(lambda _: rpc.start(1, workers.wait_for_gate, argument), more, until=fit)
        assert len(futures) == fit
        with pytest.raises(CallTimeout):
            rpc.call(1, workers.wait_for_gate, argument, timeout_s=0.2)
        assert rpc.call(1, workers.add, 1, 2) == 3  # small ones pass
        assert rpc.call(2, torch.numel, argument) == nbytes  # and so do those to others
        session.worker().notify(1, "open", None)
        starter.join()
        assert rpc.call(1, torch.numel, larger) == larger.numel()
        assert [future.wait() for future in futures] == ["open"] * more

    with_workers(body, 3, before=before, tcp=tcp)


def test_calls_given_up_before_they_began_give_their_memory_back() -> None:
    nbytes, count = 16 << 20, 10

    def before(member: Member) -> None:
        handlers.MOST = 1
        vars(connections)["Readers"] = partial(Readers, threads=1)  # which runs no handler, since none would read then
        serve_beside_calls(member)

    def body(member: Member) -> None:
        if member.rank:
            return
        own = session.worker()
        at_first = own.request(1, "resident", None).wait()
        argument = torch.zeros(nbytes, dtype=torch.uint8)
        futures = [rpc.start(1, workers.wait_for_gate, argument) for _ in range(count)]

        def held() -> int:
            return int(own.request(1, "resident", None).wait() - at_first) // nbytes

        assert soon(lambda: held() >= count - 1)
        for future in futures[1:]:
            future.cancel()
        assert soon(lambda: held() <= 2)  # that of the one that runs, and one that had just come
        own.notify(1, "open", None)
        assert futures[0].wait() == "open"

    with_workers(body, 2, before=before, tcp=True)


@pytest.mark.parametrize(("tcp", "count"), [(False, 10_000), pytest.param(True, 70_000, marks=pytest.mark.long)])
def test_value_may_have_very_many_tensors(tcp: bool, count: int) -> None:
    def body(member: Member) -> None:
        if member.rank == 0:
            sent = [torch.ones(1)] * 3 + [torch.ones(1) for _ in range(count)]
            assert rpc.call(1, len, sent) == count + 3

    with_workers(body, 2, tcp=tcp)
