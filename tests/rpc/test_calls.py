"""Calls of functions on other workers."""

from __future__ import annotations

import concurrent.futures
import os
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import ClosedError, InitializationError, RankError
from phalanx.rpc import session
from phalanx.rpc.failure import Failure
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon


@pytest.mark.parametrize("size", [1, 3])
def test_call_returns_or_raises_what_the_function_did(size: int) -> None:
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


async def count_later(most: int) -> AsyncIterator[int]:
    for number in range(most):
        yield number


def count_and_fail(most: int) -> Iterator[int]:
    yield from range(most)
    raise ValueError("after the last")


def add_in_place(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return tensor.add_(number)


def test_coroutines_are_awaited_and_generators_come_item_by_item() -> None:
    def body(member: Member) -> Any:
        to = next_of(member)
        items = rpc.call(to, count_and_fail, 10)
        with pytest.raises(ValueError, match="after the last"):
            for number, item in enumerate(items):
                assert number == item
        listed = list(rpc.call(to, workers.count_to, 7)), list(rpc.call(to, count_later, 9))
        return rpc.call(to, workers.add_later, 2, 3), *listed

    assert with_workers(body, 2) == [(5, list(range(7)), list(range(9)))] * 2


def test_calls_may_wait_for_each_other_as_deep_as_they_like() -> None:
    names = ["worker0", "worker1", "worker2"]
    assert with_workers(lambda member: rpc.call(next_of(member), workers.descend, names, 40), 3) == [40] * 3


def test_only_a_worker_can_call_and_it_becomes_one_once() -> None:
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


def call_back(to: int) -> int:
    return int(rpc.call(to, workers.pid))


def test_worker_can_be_called_and_call_before_its_init_returns() -> None:
    """The last rank has not come, and the first two have found each other."""

    def body(member: Member) -> None:
        member.join("gloo")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            if member.rank == 0:
                early = pool.submit(call_early, member)
            if member.rank == 2:
                member.await_said("called")
            rpc.init()
            assert member.rank or early.result() == os.getpid()
        rpc.shutdown()

    def call_early(member: Member) -> int:
        assert soon(lambda: session.current() is not None and len(rpc.workers()) == 2)
        got: int = rpc.call(1, call_back, 0)
        member.say("called")
        return got

    on_ranks(body, 3)


def test_error_whose_traceback_cannot_be_formatted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython parses the lines of a traceback, and fails with a SystemError if another thread disturbs it."""

    def fail(*_: object) -> list[str]:
        raise SystemError("AST constructor recursion depth mismatch (before=60, after=55)")

    monkeypatch.setattr(traceback, "format_exception", fail)
    failure = Failure.decode(Failure.of(KeyError("weights")).encode())
    assert (failure.type_name, failure.text) == ("KeyError", "'weights'")
    assert failure.traceback == "KeyError: 'weights'\n"


@pytest.mark.parametrize("tcp", [False, True])
def test_workers_that_dial_each_other_at_once_have_one_link(tcp: bool) -> None:
    def body(member: Member) -> None:
        if tcp:
            workers.use_tcp()
        member.join("gloo")
        for turn in range(5):
            rpc.init()
            member.meet(f"turn {turn}")
            others = [member.rank ^ number for number in range(member.size)]  # so two ranks begin with each other
            assert [each.wait() for each in rpc.each(others, workers.add, 1, 2)] == [3] * member.size
            member.meet(f"called {turn}")
            assert len(session.worker()._connections._links()) == member.size
            rpc.shutdown()

    on_ranks(body, 4)
