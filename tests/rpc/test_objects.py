"""Objects that live on another worker."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest

from phalanx import rpc
from phalanx.errors import ArgumentError, CallTimeout, ObjectLost
from tests.rpc import workers
from tests.rpc.workers import Account, Broken, next_of, with_workers
from tests.support.ranks import Member
from tests.support.waiting import soon

PATIENCE_S = 30.0


def holders(worker: str) -> list[tuple[str, ...]]:
    return [info.holders for info in rpc.call(worker, rpc.objects)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_object_is_made_there_and_remembers(size: int) -> None:
    def body(member: Member) -> Any:
        account = rpc.make(next_of(member), Account, 5)
        paid = account.pay(1), account.start.pay(2).wait(), rpc.call(account, "pay", 3, timeout_s=30)
        later = account.pay_later(4)
        amount = rpc.call(account, getattr, "amount")
        return (*paid, later, amount, list(account.payments(3)))

    assert with_workers(body, size) == [(6, 8, 11, 15, 15, [16, 17, 18])] * size


def test_what_a_method_or_making_raises_arrives() -> None:
    def body(member: Member) -> None:
        account = rpc.make(next_of(member), Account, 5)
        with pytest.raises(KeyError, match="no such thing"):
            account.fail()
        with pytest.raises(AttributeError):
            account.nothing()
        with pytest.raises(OSError, match="cannot be made"):
            rpc.make(next_of(member), Broken)

    with_workers(body, 2)


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
        rpc.call(1, workers.open_gate)
        for taking in under_way:
            taking.wait()
        return caught.value.cause, rpc.call(turns, getattr, "most"), rpc.call(turns, getattr, "taken")

    assert with_workers(body, 2)[0] == ("queued", 1, 5)


def test_an_attribute_is_not_taken_for_a_method_or_set_on_the_reference() -> None:
    def body(member: Member) -> None:
        account = rpc.make(next_of(member), Account, 5)
        with pytest.raises(AttributeError, match=r"rpc\.call\(object, setattr, 'amount', value\)"):
            account.amount = 7
        with pytest.raises(TypeError, match=r"rpc\.call\(object, getattr, 'amount'\)"):
            assert account.amount
        rpc.call(account, setattr, "amount", 7)
        assert rpc.call(account, getattr, "amount") == 7

    with_workers(body, 2)


def takes_it(timeout: float = 0, **others: float) -> tuple[float, dict[str, float]]:
    return timeout, others


def test_a_limit_that_is_no_argument_of_the_function_is_refused() -> None:
    def body(member: Member) -> None:
        to = next_of(member)
        account = rpc.make(to, Account, 5)
        for name, call in (
            ("timeout", lambda: rpc.call(to, workers.add, 1, 2, timeout=5)),
            ("timeout", lambda: rpc.make(to, Account, 5, timeout=5)),
            ("timeout", lambda: account.pay(1, timeout=5)),
            ("timeout_s", lambda: account.pay(1, timeout_s=5)),
        ):
            with pytest.raises(ArgumentError, match=rf"takes no {name}; .*timeout_s=5"):
                call()
        assert rpc.call(to, takes_it, timeout=5, retries=1) == (5, {"retries": 1})
        assert rpc.make(to, takes_it, timeout=5).index(5) == 0
        assert account.pay(0) == 5

    with_workers(body, 2)


@pytest.mark.parametrize("size", [3, 5])
def test_a_reference_that_is_handed_on_keeps_the_object(size: int) -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return True
        account = rpc.make("worker1", Account, 5)
        for rank in range(2, size):
            rpc.call(rank, workers.keep, account)
        del account
        gc.collect()
        others = tuple(f"worker{rank}" for rank in range(2, size))
        assert soon(lambda: holders("worker1") == [others])
        back = rpc.call(size - 1, workers.give)
        for rank in range(2, size):
            rpc.call(rank, workers.let_go)
        assert back.pay(1) == 6
        assert soon(lambda: holders("worker1") == [("worker0",)])
        del back
        gc.collect()
        return soon(lambda: holders("worker1") == [])

    assert with_workers(body, size) == [True] * size


def test_a_reference_travels_home_and_through_a_chain() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        account = rpc.make("worker1", Account, 5)
        rpc.call("worker1", workers.keep, account)
        rpc.call("worker2", workers.keep, rpc.call("worker1", workers.give))
        del account
        gc.collect()
        paid = rpc.call("worker2", workers.give).pay(2)
        for worker in ("worker1", "worker2"):
            rpc.call(worker, workers.let_go)
        assert soon(lambda: holders("worker1") == [])
        return paid

    assert with_workers(body, 3)[0] == 7


def test_a_holder_that_dies_frees_what_it_held() -> None:
    def body(member: Member) -> Any:
        if member.rank == 0:
            account = rpc.make("worker1", Account, 5)
            rpc.call("worker2", workers.keep, account)
            del account
            gc.collect()
            assert soon(lambda: holders("worker1") == [("worker2",)])
            os.kill(rpc.call("worker2", workers.pid), signal.SIGKILL)
            return soon(lambda: holders("worker1") == [])
        return True

    from tests.support.ranks import run_ranks

    def run(member: Member) -> Any:
        import torch.distributed as dist

        member.join()
        rpc.init()
        outcome = body(member)
        if member.rank == 2:
            time.sleep(PATIENCE_S)
        rpc.shutdown()
        dist.destroy_process_group()
        return outcome

    outcomes = run_ranks(run, 3)
    assert outcomes[0].error is None, outcomes[0].traceback
    assert outcomes[0].value is True
    assert outcomes[2].signal == signal.SIGKILL


def test_an_object_whose_worker_has_left_is_lost() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        account = rpc.make("worker1", Account, 5)
        rpc.start("worker1", os._exit, 0)
        with pytest.raises(ObjectLost, match="worker1"):
            for _ in range(1000):
                account.pay(1)
                time.sleep(0.01)
        with pytest.raises(ObjectLost):
            account.pay(1)
        return "done"

    def run(member: Member) -> Any:
        member.join()
        rpc.init()
        return body(member) if member.rank == 0 else time.sleep(PATIENCE_S)

    from tests.support.ranks import run_ranks

    outcomes = run_ranks(run, 2)
    assert outcomes[0].error is None, outcomes[0].traceback
    assert outcomes[0].value == "done"


def test_an_owner_lists_who_made_an_object_and_at_which_line() -> None:
    def body(member: Member) -> Any:
        if member.rank:
            return None
        kept = rpc.make(1, Account, 1.0)  # made here
        [info] = rpc.call(1, rpc.objects)
        assert kept.pay(1) == 2
        return info.made_by, info.made_at, str(rpc.session.agent().me)

    by, at, me = with_workers(body, 2)[0]
    assert by == me
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# made here\n"))
    assert at == f"{__file__}:{line}"
