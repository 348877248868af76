"""Ranks that know each other through a registrar: over sockets, as threads of one process."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.support.waiting import soon
from torch._C._distributed_c10d import HashStore

from phalanx.membership.abort import GroupAbort
from phalanx.membership.liveness import Membership
from phalanx.membership.protocol import Fact, Late, Lost, Position, Way

SIZE, LIMIT = 3, timedelta(seconds=60)


class Rank:
    """A rank of the group, alone on its host."""

    def __init__(self, rank: int, membership: Membership) -> None:
        self.rank, self.membership = rank, membership
        self.group = GroupAbort(membership, "group", range(SIZE))
        self.waits: dict[int, float] = {}
        self.ended: list[Fact] = []

    def awaited(self) -> Mapping[int, float]:
        return self.waits

    def position(self, fact: Fact) -> Position:
        return Position(rank=self.rank, kind="call", number=1, text=f"call of {self.rank}", group="group")

    def end_waits(self, fact: Fact) -> None:
        self.ended.append(fact)

    def cut(self) -> None:
        """End the session."""
        channel = self.membership._channel
        assert channel is not None
        channel.sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    store, hosts, names = HashStore(), range(SIZE), [f"h{host}" for host in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:

        def make(rank: int) -> Rank:
            made = Rank(rank, Membership.meet(store, rank, hosts, names, LIMIT))
            made.group.join(made, 60.0)
            return made

        made = list(pool.map(make, range(SIZE)))
    yield made
    for each in made:
        each.group.close()
        each.membership.join()


def test_rank_that_ends_breaks_the_group_of_who_waits_for_it(ranks: list[Rank]) -> None:
    first, second, victim = ranks
    victim.cut()
    assert soon(lambda: 2 in first.membership.departed and 2 in second.membership.departed)
    assert (first.group.fact, first.group.is_gone(2)) == (None, True)
    second.waits[2] = 0.0
    second.membership.later(0.0, second.membership._look)
    assert soon(lambda: bool(first.ended and second.ended))
    assert first.group.fact == second.group.fact == Lost(by=1, rank=2, way=Way.ENDED)


def test_first_fact_is_what_every_rank_raises(ranks: list[Rank]) -> None:
    facts = [Lost(by=rank, rank=0, way=Way.FAILED, text=f"found by {rank}") for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        told = set(pool.map(lambda each: each.group.publish(facts[each.rank]).by, ranks))
    assert len(told) == 1
    assert [[fact.by for fact in each.ended] for each in ranks] == [[*told]] * SIZE


def test_rank_that_does_not_answer_is_missing_among_positions(ranks: list[Rank]) -> None:
    ranks[2].group._member = lambda: None
    ranks[1].group.publish(Late(by=1))
    for each in ranks:
        assert {found.rank: found.text for found in each.group.positions() or ()} == {0: "call of 0", 1: "call of 1"}


def test_ranks_go_by_their_own_facts_without_the_registrar(ranks: list[Rank]) -> None:
    ranks[0].group.close()
    assert soon(lambda: ranks[1].group.has_left(0) and ranks[2].group.has_left(0))
    fact = Lost(by=1, rank=2, way=Way.UNKNOWN)
    assert ranks[1].group.publish(fact) == fact
    assert ranks[2].group.fact is None
    assert ranks[1].group.positions() is None
