"""Calls of functions on other workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import ClosedError, InitializationError, RankError
from phalanx.rpc import session
from phalanx.rpc.members import Members
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member, on_ranks


@pytest.mark.parametrize("size", [1, 3])
def test_a_call_runs_there_and_returns_or_raises_what_the_function_did(size: int) -> None:
    def body(member: Member) -> int:
        to = next_of(member)
        by_rank = rpc.call((member.rank + 1) % member.size, workers.pid)
        assert rpc.call(to, workers.pid) == by_rank
        assert rpc.call(to, workers.add, 1, b=2) == 3
        assert [each.wait() for each in rpc.each(None, workers.add, member.rank, 1)] == [member.rank + 1] * (size - 1)
        sent = torch.arange(100_000, dtype=torch.float64).reshape(1000, 100)[::2, ::3]
        kept = sent.clone()
        got = rpc.call(to, add_in_place, sent, 1)
        assert torch.equal(got, kept + 1)
        assert torch.equal(sent, kept)  # the callee has a copy
        with pytest.raises(KeyError) as caught:
            rpc.call(to, workers.fail, "this key")
        assert caught.value.args[0] == "this key"
        cause = str(caught.value.__cause__)
        assert all(words in cause for words in ("workers.py", "raise KeyError(text)", "rank")), cause
        return int(by_rank)

    assert len(set(with_workers(body, size))) == size


def add_in_place(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.add_(number)


def test_coroutines_are_awaited_and_generators_come_item_by_item() -> None:
    def body(member: Member) -> Any:
        to = next_of(member)
        items = rpc.call(to, workers.count_and_fail, 10)
        with pytest.raises(ValueError, match="after the last"):
            for number, item in enumerate(items):
                assert number == item
        listed = list(rpc.call(to, workers.count_to, 7)), list(rpc.call(to, workers.count_later, 9))
        return rpc.call(to, workers.add_later, 2, 3), *listed

    assert with_workers(body, 2) == [(5, list(range(7)), list(range(9)))] * 2


def test_a_future_can_be_awaited_and_followed() -> None:
    def body(member: Member) -> Any:
        to = next_of(member)

        async def both() -> list[Any]:
            futures = [rpc.start(to, workers.add, 1, 2), rpc.start(to, workers.add, "a", "b")]
            return [await future for future in futures]

        return asyncio.run(both()), rpc.start(to, workers.add, 1, 2).then(lambda three: three * 2).wait()

    assert with_workers(body, 2) == [([3, "ab"], 6)] * 2


def test_calls_may_wait_for_each_other_as_deep_as_they_like() -> None:
    names = ["worker0", "worker1", "worker2"]
    assert with_workers(lambda member: rpc.call(next_of(member), workers.descend, names, 40), 3) == [40] * 3


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


def test_only_a_worker_can_call_and_only_once_can_a_process_become_one() -> None:
    def body(member: Member) -> Any:
        with pytest.raises(RankError, match="worker0, worker1"):  # those that are there
            rpc.call("nobody", workers.pid)
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


def test_a_worker_that_can_be_found_can_make_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may call it before its own ``rpc.init()`` has returned, and what is called may call in turn."""
    join = Members.join
    found: list[str] = []

    def join_and_look(members: Members, me: Any, is_there: Callable[[Any], Any]) -> None:
        join(members, me, is_there)
        found.append(session.agent().me.name)

    monkeypatch.setattr(Members, "join", join_and_look)

    def body(member: Member) -> tuple[str, list[str]]:
        member.join()
        me = rpc.init()
        rpc.shutdown()
        return me.name, found

    for name, names in on_ranks(body, 2):
        assert names == [name]
