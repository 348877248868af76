"""Objects that live on another worker."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import rpc
from phalanx.errors import ArgumentError, CallTimeout
from tests.rpc import workers
from tests.rpc.workers import next_of, with_workers
from tests.support.ranks import Member
from tests.support.waiting import soon


class Account(workers.Account):
    def fail(self) -> None:
        raise KeyError("no such thing")

    def payments(self, count: int) -> Iterator[float]:
        for _ in range(count):
            yield self.pay(1)

    async def pay_later(self, amount: float) -> float:
        return self.pay(amount)


class Broken:
    def __init__(self) -> None:
        raise OSError("it cannot be made")


def holders(worker: str) -> list[tuple[str, ...]]:
    return [info.holders for info in rpc.call(worker, rpc.objects)]


def takes_it(timeout: float = 0, **others: float) -> tuple[float, dict[str, float]]:
    return timeout, others


@pytest.mark.parametrize("size", [1, 3])
def test_object_is_made_there_remembers_and_refuses_what_it_is_not(size: int) -> None:
    def body(member: Member) -> Any:
        to = next_of(member)
        account = rpc.make(to, Account, 5)
        paid = account.pay(1), account.start.pay(2).wait(), rpc.call(account, "pay", 3, timeout_s=30)
        later = account.pay_later(4)
        amount = rpc.call(account, getattr, "amount")
        assert (*paid, later, amount, list(account.payments(3))) == (6, 8, 11, 15, 15, [16, 17, 18])
        with pytest.raises(KeyError, match="no such thing"):
            account.fail()
        with pytest.raises(AttributeError):
            account.nothing()
        with pytest.raises(OSError, match="cannot be made"):
            rpc.make(to, Broken)
        with pytest.raises(AttributeError, match=r"rpc\.call\(object, setattr, 'amount', value\)"):
            account.amount = 7
        with pytest.raises(TypeError, match=r"rpc\.call\(object, getattr, 'amount'\)"):
            assert account.amount
        rpc.call(account, setattr, "amount", 7)
        assert rpc.call(account, getattr, "amount") == 7
        for name, call in (  # a limit that is no argument of the function
            ("timeout", lambda: rpc.call(to, workers.add, 1, 2, timeout=5)),
            ("timeout", lambda: rpc.make(to, Account, 5, timeout=5)),
            ("timeout", lambda: account.pay(1, timeout=5)),
            ("timeout_s", lambda: account.pay(1, timeout_s=5)),
        ):
            with pytest.raises(ArgumentError, match=rf"takes no {name}; .*timeout_s=5"):
                call()
        assert rpc.call(to, takes_it, timeout=5, retries=1) == (5, {"retries": 1})
        assert rpc.make(to, takes_it, timeout=5).index(5) == 0

    with_workers(body, size)


class Turns:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.inside = self.most = self.taken = 0

    def meet(self) -> None:
        self.barrier.wait(300.0)

    def take(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        workers.wait_for_gate()
        self.inside -= 1
        self.taken += 1


def test_one_method_runs_at_a_time_unless_asked_otherwise() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        together = rpc.make(1, Turns, 5, serial=False)
        for waiting in [together.start.meet() for _ in range(5)]:
            waiting.wait()
        turns = rpc.make(1, Turns, 5)
        under_way = [turns.start.take() for _ in range(5)]
        with pytest.raises(CallTimeout) as caught:
            rpc.call(turns, Turns.take, timeout_s=0.5)
        rpc.call(1, workers.open_gate_once_given_up)
        for taking in under_way:
            taking.wait()
        return caught.value.cause, rpc.call(turns, getattr, "most"), rpc.call(turns, getattr, "taken")

    assert with_workers(body, 2)[0] == ("queued", 1, 5)


def test_object_is_listed_and_lives_as_long_as_a_reference() -> None:
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# made here\n"))

    def body(member: Member) -> None:
        if member.rank:
            return
        account = rpc.make("worker1", Account, 5)  # made here
        [info] = rpc.call("worker1", rpc.objects)
        assert (info.made_by, info.made_at) == (str(rpc.session.worker().me), f"{__file__}:{line}")
        rpc.call("worker2", workers.keep, account)
        del account
        gc.collect()
        assert soon(lambda: holders("worker1") == [("worker2",)])
        [back] = rpc.call("worker2", workers.give_all)
        rpc.call("worker2", workers.let_go)
        assert back.pay(1) == 6
        assert soon(lambda: holders("worker1") == [("worker0",)])
        del back
        gc.collect()
        assert soon(lambda: holders("worker1") == [])

    with_workers(body, 3)
