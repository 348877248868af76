"""A rank of a host gives up waiting for another one of it, which is in a message: the group's reason is the first's.

The other one learns from their shared memory that the group is broken. That is a consequence: what it could say of it
would name its own timeout, which nobody has waited for.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.support.connecting import PLACEMENTS, over_hosts
from tests.support.ranks import Member, on_ranks

from phalanx.errors import CollectiveTimeout, PhalanxError
from phalanx.transports.hosts import breaking
from phalanx.transports.hosts.breaking import Reason
from phalanx.transports.hosts.wording import Fact

SUM = 0  # torch's number
SHORT_S, LONG_S = 2.0, 200.0


def speaks_last(member: Member) -> None:
    """Let this rank tell a reason only when the other one of its host has told its own, or waits to be told."""
    tell = Reason._tell

    def slowly(reason: Reason, fact: Fact) -> Fact:
        member.await_said("spoken")
        return tell(reason, fact)

    Reason._tell = slowly  # type: ignore[assignment, method-assign]


def says_when_it_speaks(member: Member) -> None:
    vars(breaking)["PATIENCE_S"] = LONG_S  # the other one speaks soon, but nobody knows how soon on a busy machine
    error, told = Reason.error, Reason._told

    def saying(reason: Reason, *arguments: Any, **options: Any) -> BaseException:
        try:
            return error(reason, *arguments, **options)
        finally:
            member.say("spoken")

    def being_told(reason: Reason) -> Fact | None:
        member.say("spoken")
        return told(reason)

    Reason.error, Reason._told = saying, being_told  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_gives_up_says_how_long_it_has_waited_itself(size: int) -> None:
    def body(member: Member) -> str:
        c = over_hosts(member.store(), member.rank, size, PLACEMENTS["two hosts, cyclic"], timedelta(seconds=LONG_S))
        c.barrier()
        missing = 2  # of the host of rank 0
        if member.rank == missing:
            says_when_it_speaks(member)
            with pytest.raises(PhalanxError) as missed:
                c.recv(torch.zeros(1), 0, 9).wait()
            return str(missed.value)
        if member.rank == 0:
            speaks_last(member)
            c.set_timeout(timedelta(seconds=SHORT_S))
        began = time.monotonic()
        with pytest.raises(CollectiveTimeout) as caught:
            c.all_reduce(torch.ones(2), SUM)
        assert time.monotonic() - began < LONG_S
        assert caught.value.group_rank == missing
        return str(caught.value)

    texts = on_ranks(body, size)
    assert "rank 2 of the group" in texts[0]
    assert f"did not come within {SHORT_S:g} s" in texts[0]
