"""Without ``phalanx run`` a rank that waits for others to make a group says for whom, long before the timeout."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch.distributed as dist
from tests.support.ranks import Member, on_ranks
from tests.support.waiting import soon

from phalanx.diagnosis import own_waits
from phalanx.membership.rendezvous_store import RendezvousStore

PATIENCE_S = 240.0


def says(member: Member, warn_after: str) -> None:
    """Have this rank speak into a file, as soon as it has waited so long."""
    os.environ["PHALANX_WARN_AFTER"] = warn_after
    sys.stderr = open(member.folder / f"err-{member.rank}", "w", buffering=1)  # noqa: SIM115 - as long as the rank lives


def lines(member: Member) -> list[tuple[int, str]]:
    """What the ranks have said of their waits: the rank, and its line."""
    said = [(rank, (member.folder / f"err-{rank}").read_text()) for rank in range(member.size)]
    return [(rank, line) for rank, text in said for line in text.splitlines() if "waits for" in line]


@pytest.mark.parametrize(
    ("how", "size"),
    [("last", 3), ("group", 3), pytest.param("half", 5, marks=pytest.mark.long)],
)
def test_one_of_the_ranks_that_wait_says_for_whom(how: str, size: int) -> None:
    # Of the first half only rank 0 is waited for, by ranks that do not know whether the others of it have come.
    late = [*range(size // 2 + 1)] if how == "half" else [size - 1]
    come = [0] if how == "group" else [rank for rank in range(size) if rank not in late]
    missing = late[0]
    members = f"ranks 0, {size - 1}" if how == "group" else f"ranks 0-{size - 1}"
    line = re.compile(
        rf"phalanx: rank {missing} has not come as far as rank (\d+), which waits for it to make a group of {members}, "
        r"for \d+ s now"
    )

    def body(member: Member) -> None:
        says(member, "0.3")
        member.meet("are here")
        if how == "group":
            member.join()
            member.meet("joined")
        if member.rank in late:
            assert soon(lambda: any(line.fullmatch(said) for _, said in lines(member)), PATIENCE_S), lines(member)
            rank, named = next((rank, found[1]) for rank, said in lines(member) if (found := line.fullmatch(said)))
            assert rank == int(named)
            assert rank in come
        if how == "group":
            dist.new_group([0, size - 1])
        else:
            member.join(timeout_s=PATIENCE_S)
        dist.barrier()

    on_ranks(body, size)


def test_nothing_is_said_if_the_user_wants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a rank has waited for longer than the time after which it would be said."""
    monkeypatch.setattr(own_waits, "_WARN_AFTER_S", 0.01)
    own = RendezvousStore.look

    def body(member: Member) -> list[tuple[int, str]]:
        def look(store: RendezvousStore) -> None:
            own(store)
            member.say("looked")

        says(member, "0")
        member.meet("are here")
        if member.rank:
            member.await_said("looked")
        else:
            monkeypatch.setattr(RendezvousStore, "look", look)
        member.join()
        dist.barrier()
        return lines(member)

    assert on_ranks(body, 2) == [[], []]
