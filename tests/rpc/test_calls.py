"""Calls of functions on other workers."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import CallTimeout, ClosedError, InitializationError, RankError
from phalanx.rpc import session
from tests.rpc import workers
from tests.rpc.workers import SIZES, next_of, with_workers
from tests.support.ranks import Member, on_ranks


@pytest.mark.parametrize("size", SIZES)
def test_a_call_runs_on_the_other_worker_and_returns_what_it_returned(size: int) -> None:
    def body(member: Member) -> Any:
        to = next_of(member)
        by_rank = rpc.call((member.rank + 1) % member.size, workers.pid)
        return rpc.call(to, workers.add, 1, b=2), rpc.call(to, workers.pid) == by_rank, by_rank

    outcomes = with_workers(body, size)
    assert [outcome[:2] for outcome in outcomes] == [(3, True)] * size
    assert len({outcome[2] for outcome in outcomes}) == size


@pytest.mark.parametrize("size", SIZES)
def test_each_reaches_all_others(size: int) -> None:
    def body(member: Member) -> list[int]:
        return [future.wait() for future in rpc.each(None, workers.add, member.rank, 1)]

    assert with_workers(body, size) == [[rank + 1] * (size - 1) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_arrive_with_their_values_and_are_copies(size: int) -> None:
    def body(member: Member) -> Any:
        sent = torch.arange(100_000, dtype=torch.float64).reshape(1000, 100)[::2, ::3]
        got = rpc.call(next_of(member), workers.add, sent, 1)
        return torch.equal(got, sent + 1), torch.equal(
            sent, torch.arange(100_000.0).reshape(1000, 100)[::2, ::3].double()
        )

    assert with_workers(body, size) == [(True, True)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_function_raises_arrives_as_its_own_type_with_the_remote_traceback(size: int) -> None:
    def body(member: Member) -> tuple[str, str]:
        with pytest.raises(KeyError) as caught:
            rpc.call(next_of(member), workers.fail, "this key")
        return caught.value.args[0], str(caught.value.__cause__)

    for key, cause in with_workers(body, size):
        assert key == "this key"
        assert "workers.py" in cause
        assert "raise KeyError(text)" in cause
        assert "rank" in cause


@pytest.mark.parametrize("size", [2, 3])
def test_coroutines_are_awaited_and_generators_come_item_by_item(size: int) -> None:
    def body(member: Member) -> Any:
        to = next_of(member)
        items = rpc.call(to, workers.count_and_fail, 10)
        with pytest.raises(ValueError, match="after the last"):
            for number, item in enumerate(items):
                assert number == item
        listed = list(rpc.call(to, workers.count_to, 7)), list(rpc.call(to, workers.count_later, 9))
        return rpc.call(to, workers.add_later, 2, 3), *listed

    assert with_workers(body, size) == [(5, list(range(7)), list(range(9)))] * size


def test_a_future_can_be_awaited_and_followed() -> None:
    def body(member: Member) -> Any:
        to = next_of(member)

        async def both() -> list[Any]:
            futures = [rpc.start(to, workers.add, 1, 2), rpc.start(to, workers.add, "a", "b")]
            return [await future for future in futures]

        return asyncio.run(both()), rpc.start(to, workers.add, 1, 2).then(lambda three: three * 2).wait()

    assert with_workers(body, 2) == [([3, "ab"], 6)] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_calls_may_wait_for_each_other_as_deep_as_they_like(size: int) -> None:
    names = [f"worker{rank}" for rank in range(size)]
    assert with_workers(lambda member: rpc.call(next_of(member), workers.descend, names, 40), size) == [40] * size


def test_many_threads_may_call_at_the_same_time() -> None:
    def body(member: Member) -> bool:
        wrong: list[Any] = []

        def work(number: int) -> None:
            sums = [rpc.call(next_of(member), workers.add, number, step) for step in range(50)]
            wrong.extend(total for step, total in enumerate(sums) if total != number + step)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not wrong

    assert with_workers(body, 3) == [True] * 3


def test_a_call_that_takes_too_long_says_who_was_asked_what_and_where() -> None:
    def body(member: Member) -> str:
        if member.rank:
            return ""
        with pytest.raises(CallTimeout) as caught:
            rpc.call("worker1", workers.wait_for_gate, timeout_s=0.1)
        rpc.call("worker1", workers.open_gate)
        return str(caught.value)

    text = with_workers(body, 2)[0]
    assert "worker1 (rank 1" in text
    assert "wait_for_gate" in text
    assert "test_calls.py:" in text


def test_a_cancelled_call_that_has_not_begun_does_not_begin() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        future = rpc.start("worker1", workers.wait_for_gate)
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(rpc.Cancelled):
            future.wait()
        rpc.call("worker1", workers.open_gate)
        return rpc.call("worker1", workers.add, 1, 1)

    assert with_workers(body, 2)[0] == 2


def test_a_worker_that_is_not_there_is_refused_with_the_names_of_those_that_are() -> None:
    def body(member: Member) -> str:
        with pytest.raises(RankError) as caught:
            rpc.call("nobody", workers.pid)
        return str(caught.value)

    assert all("worker0, worker1" in text for text in with_workers(body, 2))


def test_only_a_worker_can_call_and_only_once_can_a_process_become_one() -> None:
    def body(member: Member) -> Any:
        with pytest.raises(InitializationError, match="twice"):
            rpc.init()
        rpc.shutdown()
        with pytest.raises(ClosedError, match=r"rpc\.init\(\)"):
            rpc.call(0, workers.pid)
        rpc.shutdown()
        return rpc.init(name=f"again{member.rank}").name

    assert with_workers(body, 2) == ["again0", "again1"]


def test_no_thread_and_no_descriptor_is_left() -> None:
    import os

    def body(member: Member) -> Any:
        member.join()
        before = held()
        for _ in range(3):
            rpc.init()
            names = [f"worker{rank}" for rank in range(member.size)]
            rpc.call(next_of(member), workers.descend, names, 10)
            rpc.call(next_of(member), workers.add_later, 1, 2)
            rpc.shutdown()
        until = time.monotonic() + 60  # a thread that has just answered is not waited for, and ends soon
        while (after := held()) != before and time.monotonic() < until:
            time.sleep(0.01)
        return before, after

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for before, after in on_ranks(body, 3):
        assert before == after


def test_one_that_waits_long_says_so_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that only serves waits in ``shutdown`` for as long as the others train."""
    now_s = 0.0

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s

    told: list[str] = []
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    monkeypatch.setattr(session, "tell", told.append)
    with pytest.raises(InitializationError, match="waited 3600 s for ranks 1-2"):
        session.wait_for(lambda: [1, 2], 3600.0, "for", 2)
    assert told == ["waiting for ranks 1-2."] * 5  # after 5 s, 20 s, 80 s, 320 s and 1280 s
