"""What a worker can do from the moment when others can find it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phalanx import rpc
from phalanx.errors import InitializationError, PhalanxError
from phalanx.rpc import session
from phalanx.rpc.agent import Agent
from phalanx.rpc.members import Members
from tests.rpc.workers import add, next_of
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_worker_that_can_be_found_can_make_calls(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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

    for name, names in on_ranks(body, size):
        assert names == [name]


def test_a_worker_that_could_not_join_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PhalanxError("the store does not answer")

    def body(member: Member) -> bool:
        member.join()
        with monkeypatch.context() as patch:
            patch.setattr(Members, "join", fail)
            with pytest.raises(PhalanxError, match="does not answer"):
                rpc.init()
        is_none = session.current() is None
        rpc.init()  # and may try again
        rpc.shutdown()
        return is_none

    assert on_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("first", [True, False], ids=["rank 0", "the last rank"])
def test_one_that_could_not_join_meets_the_others_when_it_tries_again(
    first: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it meanwhile."""

    def fail(*_: Any) -> None:
        raise PhalanxError("the store does not answer")

    def body(member: Member) -> Any:
        member.join()
        if member.rank == (0 if first else size - 1):
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setattr(Members, "join", fail)
                    with pytest.raises(PhalanxError, match="does not answer"):
                        rpc.init()
        rpc.init()
        value = rpc.call(next_of(member), add, member.rank, 1)
        rpc.shutdown()
        return value

    assert on_ranks(body, size) == [rank + 1 for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_second_init_changes_nothing(size: int) -> None:
    """Neither where processes that are no ranks find this world, nor where its ranks meet the next time."""

    def body(member: Member) -> Any:
        member.join()
        values = []
        for _ in range(2):
            rpc.init()
            if member.rank == 0:
                with pytest.raises(InitializationError, match="called twice"):
                    rpc.init()
            values.append(rpc.call(next_of(member), add, member.rank, 1))
            rpc.shutdown()
        return values

    assert on_ranks(body, size) == [[rank + 1] * 2 for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_worker_begins_when_the_one_before_it_has_let_go_of_everything(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another thread shuts that one down, and a third tries to."""
    close = Agent.close
    closing, go_on = threading.Event(), threading.Event()

    def close_late(agent: Agent) -> None:
        if not go_on.is_set():
            closing.set()
            go_on.wait(60.0)
        close(agent)

    def body(member: Member) -> tuple[int, int]:
        member.join()
        rpc.init()
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "close", close_late)
            leaving = [threading.Thread(target=rpc.shutdown) for _ in range(2)]
            for thread in leaving:
                thread.start()
            assert closing.wait(60.0)
            assert soon(lambda: sum(thread.is_alive() for thread in leaving) == 1)  # the other one has nothing to do
            threading.Timer(0.2, go_on.set).start()
            rpc.init()  # waits
            for thread in leaving:
                thread.join()
        with rpc.context() as number:
            weight = torch.ones(2, requires_grad=True)
            rpc.backward(number, [rpc.call(next_of(member), add, weight, 1).sum()])
            gradient = rpc.get_gradients(number)[weight]
        value = rpc.call(next_of(member), add, member.rank, 1)
        rpc.shutdown()
        return value, int(gradient.sum())

    assert on_ranks(body, size) == [(rank + 1, 2) for rank in range(size)]
