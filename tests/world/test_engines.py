"""Which engine carries bytes between hosts, where the user names one."""

from __future__ import annotations

import json
import os

import pytest
from tests.support.connecting import needs_ucx
from tests.support.ranks import Member
from tests.support.worlds import Ranks, in_worlds
from tests.world.test_hosts import Pair, check, pair

from phalanx.errors import PhalanxError

__all__ = ["pair"]  # a fixture


@needs_ucx
@pytest.mark.long
def test_engine_that_is_named_carries_the_bytes_of_every_group(pair: Pair) -> None:
    ended = pair.end(*[pair.rank(rank % 2, rank, 3, PHALANX_ENGINE="ucx") for rank in range(3)])
    assert [one.code for one in ended] == [0] * 3, "".join(one.err for one in ended)
    check(json.loads(ended[0].out), (0, 1, 0))
    assert "phalanx over shared memory and UCX (as PHALANX_ENGINE says)" in ended[0].err


@in_worlds(size=2, place="two hosts")
@pytest.mark.parametrize(
    ("engines", "told"),
    [
        (("mpi", "mpi"), "PHALANX_ENGINE=mpi: rank 0 cannot use it: MPI has not started this rank: start the job w"),
        (("gloo", "auto"), "PHALANX_ENGINE differs between the ranks (gloo on rank 0, auto on rank 1)"),
        (("roce", "roce"), "PHALANX_ENGINE='roce': it must be one of auto, gloo, mpi, ucx"),
    ],
)
def test_engines_that_cannot_be_had_or_differ_are_refused_on_every_rank(
    world: Ranks, engines: tuple[str, str], told: str
) -> None:
    def body(member: Member) -> str:
        os.environ["PHALANX_ENGINE"] = engines[member.rank]
        with pytest.raises((PhalanxError, ValueError)) as caught:
            member.join()
        return str(caught.value)

    for text in world.run(body, joins=False, leaves=False):
        assert told in text
