"""Which engine carries bytes between hosts, where the user names one."""

from __future__ import annotations

import json

from tests.support.connecting import needs_ucx
from tests.world.test_hosts import Ended, Pair, check, pair

__all__ = ["pair"]  # a fixture


def ran(pair: Pair, *engines: str) -> list[Ended]:
    """Run a rank on each host, with what it names."""
    return pair.end(*[pair.rank(rank % 2, rank, len(engines), PHALANX_ENGINE=e) for rank, e in enumerate(engines)])


@needs_ucx
def test_the_engine_that_is_named_carries_the_bytes_of_every_group(pair: Pair) -> None:
    ended = ran(pair, "ucx", "ucx", "ucx")
    assert [one.code for one in ended] == [0] * 3, "".join(one.err for one in ended)
    check(json.loads(ended[0].out), (0, 1, 0))
    assert "phalanx over shared memory and UCX (as PHALANX_ENGINE says)" in ended[0].err


def test_engines_that_cannot_be_had_or_differ_are_refused_on_every_rank(pair: Pair) -> None:
    for engines, told in (
        (("mpi", "mpi"), "PHALANX_ENGINE=mpi: rank 0 cannot use it: MPI has not started this rank: start the job w"),
        (("gloo", "auto"), "PHALANX_ENGINE differs between the ranks (gloo on rank 0, auto on rank 1)"),
        (("roce", "roce"), "PHALANX_ENGINE='roce': it must be one of auto, gloo, mpi, ucx"),
    ):
        ended = ran(pair, *engines)
        assert all(one.code != 0 for one in ended)
        for one in ended if engines[0] != "roce" else ended[:1]:  # the other hears that rank 0 has given up
            assert told in one.err
