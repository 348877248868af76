"""The contract of communicators, on every transport and in groups of real worlds.

3 and 5 ranks catch power-of-two mistakes. Chunks of shared memory are set small, so that a few kilobytes go through
many of them. A new transport is one more entry of ``TRANSPORTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.connecting import PLACEMENTS, over_hosts
from tests.support.ranks import Member, on_ranks
from tests.support.worlds import Ranks, in_worlds
from tests.world.contract import run_checks
from torch._C._distributed_c10d import PrefixStore, Store

from phalanx.transports.contract import Communicator
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.tuning import Tuning

TIMEOUT = timedelta(seconds=60)
MOST_BYTES = 600_000
# An operation that a rank gives up stays unanswered, and MPI cannot end: tests/mpi/test_backend.py has a job for it.
NOT_UNDER_MPI = ("a_rank_that_does_not_come_is_named",)


def over_shm(store: Store, rank: int, size: int, chunk_bytes: int) -> Communicator:
    # Outputs lie on both sides of every switch.
    return SharedMemoryCommunicator(store, rank, size, TIMEOUT, Tuning(chunk_bytes, stream_bytes=3000))


Connect = Callable[[Store, int, int], Communicator]
# How a rank of each transport connects, the world sizes and those for a long run, and the largest tensor: small chunks
# make large ones slow.
TRANSPORTS: dict[str, tuple[Connect, tuple[int, ...], tuple[int, ...], int]] = {
    "shm in chunks of 64 B": (partial(over_shm, chunk_bytes=64), (1, 3), (2, 5), 32_000),
    "shm in chunks of 4 KiB": (partial(over_shm, chunk_bytes=4096), (5,), (2, 3, 4, 8), MOST_BYTES),
    "shm in chunks of 256 KiB": (partial(over_shm, chunk_bytes=256 * 1024), (2,), (3, 5), MOST_BYTES),
    "two hosts": (partial(over_hosts, host_of=PLACEMENTS["two hosts"]), (), (2, 4, 5), 100_000),
    "two hosts, cyclic": (partial(over_hosts, host_of=PLACEMENTS["two hosts, cyclic"]), (3,), (4,), 100_000),
    "three hosts": (partial(over_hosts, host_of=PLACEMENTS["three hosts"]), (5,), (3,), 100_000),
}


def transports() -> list[Any]:
    found: list[Any] = []
    for name, (_, sizes, more, _) in TRANSPORTS.items():
        found += [(name, size) for size in sizes]
        found += [pytest.param(name, size, marks=pytest.mark.long) for size in more]
    return found


def assert_kept(by_rank: list[tuple[list[str], list[str]]]) -> None:
    """Every rank made the same checks, and found nothing wrong in any of them."""
    assert [wrong for _, wrong in by_rank] == [[]] * len(by_rank)
    assert all(made == by_rank[0][0] for made, _ in by_rank)


@pytest.mark.parametrize(("transport", "size"), transports())
def test_a_transport_keeps_the_contract(transport: str, size: int) -> None:
    connect, _, _, most = TRANSPORTS[transport]

    def body(member: Member) -> tuple[list[str], list[str]]:
        store = member.store()
        return run_checks(lambda name: connect(PrefixStore(name, store), member.rank, size), most)

    assert_kept(on_ranks(body, size))


@in_worlds(3, "two hosts", ["phalanx", "mpi"])
def test_a_group_keeps_the_contract(world: Ranks) -> None:
    def body(member: Member) -> tuple[list[str], list[str]]:
        groups: list[Any] = []

        def connect(name: str) -> Communicator:
            groups.append(dist.new_group(timeout=TIMEOUT))
            communicator: Communicator = groups[-1]._communicator
            return communicator

        found = run_checks(connect, 100_000, NOT_UNDER_MPI if world.backend == "mpi" else ())
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        return found

    assert_kept(world.run(body))
