"""A process that rank 0 has refused, and that comes again as it should have come at first: the world opens with it."""

from __future__ import annotations

import pytest
from tests.support.ports import held_port
from tests.support.ranks import Member, on_ranks

import phalanx
from phalanx.errors import InitializationError


def test_rank_that_was_refused_joins_when_it_comes_as_it_should() -> None:
    def init(rank: int, world_size: int) -> phalanx.World:
        where = f"tcp://127.0.0.1:{port}"
        return phalanx.init(timeout_s=120, quiet=True, init_method=where, rank=rank, world_size=world_size)

    def body(member: Member) -> None:
        if member.rank == 2:
            for _ in range(2):
                with pytest.raises(InitializationError, match="was refused"):
                    init(2, 4)
        for _ in range(2):  # and every rank counts its worlds alike afterwards
            assert init(member.rank, 3).all_gather_object(member.rank) == [0, 1, 2]
            phalanx.close()

    with held_port() as port:
        on_ranks(body, 3)
