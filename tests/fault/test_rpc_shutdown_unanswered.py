"""``rpc.shutdown()`` whose time is over while it asks: it says what has not answered, and nothing that is not so."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks

from phalanx import rpc
from phalanx.rpc import session

TIMEOUT_S = 2.0


def shut_down(slow: str, size: int) -> None:
    """All but the last rank shut down, and one of the things that they ask takes until all of them are done."""

    def body(member: Member) -> None:
        workers.begin(member, tcp=False)
        if member.rank == size - 1:
            member.await_said(*[f"over-{rank}" for rank in range(size - 1)])
            rpc.shutdown()
            return
        vars(session)["_STORE_S"] = 8.0  # in which the time of the others is over, and the question asked
        made = session.agent()

        def waits(*_: Any) -> Any:
            member.await_said(f"over-{member.rank}")
            return "" if slow == "inquiry" else []

        if slow == "inquiry":
            vars(made.inquiries)["why_not_done"] = waits
        else:
            vars(made)["not_done"] = waits
        rpc.shutdown(timeout_s=TIMEOUT_S)
        member.say(f"over-{member.rank}")

    on_ranks(body, size)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_an_inquiry_that_takes_long_is_not_blamed_on_the_store(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    shut_down("inquiry", size)
    said = capfd.readouterr().err
    assert said.count(f"ends without the others: waited {TIMEOUT_S:g} s for rpc.shutdown() of rank") == size - 1, said
    assert "store" not in said


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_store_that_does_not_answer_is_named(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    shut_down("store", size)
    said = capfd.readouterr().err
    assert said.count("ends without the others: the job's store has not answered.") == size - 1, said
