"""A process that rank 0 has refused, and that comes again as it should have come at first: the world opens with it."""

from __future__ import annotations

import pytest
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import InitializationError

TIMEOUT_S = 120.0


def test_rank_that_was_refused_joins_when_it_comes_as_it_should() -> None:
    size = 3

    def init(rank: int, world_size: int) -> phalanx.World:
        where = f"tcp://127.0.0.1:{port}"
        return phalanx.init(timeout_s=TIMEOUT_S, quiet=True, init_method=where, rank=rank, world_size=world_size)

    def body(member: Member) -> list[int]:
        if member.rank == size - 1:
            for _ in range(2):
                with pytest.raises(InitializationError, match="was refused"):
                    init(member.rank, size + 1)
        met = []
        for _ in range(2):  # and every rank counts its worlds alike afterwards
            world = init(member.rank, size)
            met.append(world.all_gather_object(member.rank))
            phalanx.close()
        assert met[0] == met[1]
        return list(met[0])

    with held_port() as port:
        assert on_ranks(body, size) == [list(range(size))] * size
