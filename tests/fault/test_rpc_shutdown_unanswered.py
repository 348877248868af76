"""``rpc.shutdown()`` whose time is over while it asks: it ends, and says that it does not know why."""

from __future__ import annotations

from typing import Any

import pytest
from tests.rpc import workers
from tests.support.ranks import Member, on_ranks

from phalanx import rpc
from phalanx.rpc import session

TIMEOUT_S = 1.0


def shut_down(slow: str, size: int) -> None:
    """All but the last rank shut down, and one of the things that they ask takes until all of them are done."""

    def body(member: Member) -> None:
        workers.begin(member, tcp=False)
        if member.rank == size - 1:
            member.await_said(*[f"over-{rank}" for rank in range(size - 1)])
            rpc.shutdown()
            return
        vars(session)["_STORE_S"] = 2.0  # in which the time of the others is over, and the question asked
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


@pytest.mark.parametrize("slow", ["inquiry", "store"])
def test_a_question_that_takes_long_does_not_hold_it_up(slow: str, capfd: pytest.CaptureFixture[str]) -> None:
    size = 3
    shut_down(slow, size)
    said = capfd.readouterr().err
    assert said.count(f"ends without the others: waited {TIMEOUT_S:g} s for rpc.shutdown()") == size - 1, said
    assert said.count("could not be found out within 2 s more: does the job's store answer?") == size - 1, said
