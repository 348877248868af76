"""When large parts of an all_to_all between hosts move: memory waits for them before the leaders compare the calls, so
a sender need not wait to hear of it, one way more; and nothing is sent before the calls were compared.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from tests.support.connecting import PLACEMENTS, SIZES, NotedEngine, over_hosts
from tests.support.ranks import Member, run_ranks, values
from torch._C._distributed_c10d import Store

from phalanx.transports.hosts.lane import Engine

PART = 5 * SIZES.frame_bytes  # bytes; no frame can carry it


def exchange_twice(member: Member) -> tuple[list[tuple[str, int]], list[list[float]]]:
    """What begins in the second of two exchanges, which need connect no rank, and what has come from each rank."""
    engines: list[NotedEngine] = []

    def noting(store: Store, rank: int, size: int, timeout: timedelta) -> Engine:
        engines.append(NotedEngine(store, rank, size, timeout))
        return engines[0]

    communicator = over_hosts(member.store(), member.rank, member.size, PLACEMENTS["two hosts"], engine=noting)
    inputs = [torch.full((PART // 4,), float(member.rank * 10 + peer)) for peer in range(member.size)]
    outputs = [torch.empty(PART // 4) for _ in inputs]
    communicator.all_to_all(outputs, inputs)
    engines[0].begun.clear()
    for output in outputs:
        output.fill_(-1.0)
    communicator.all_to_all(outputs, inputs)
    begun = list(engines[0].begun)
    communicator.barrier()  # nobody closes while another one still waits
    communicator.close()
    return begun, [output.unique().tolist() for output in outputs]


@pytest.mark.parametrize("size", [2, 4, 5])
def test_large_parts_are_expected_before_the_calls_are_compared_and_sent_after_that(size: int) -> None:
    host_of = PLACEMENTS["two hosts"]
    outcomes = values(run_ranks(exchange_twice, size))
    leaders = {min(rank for rank in range(size) if host_of(rank, size) == host) for host in (0, 1)}
    for rank, (begun, came) in enumerate(outcomes):
        assert came == [[float(peer * 10 + rank)] for peer in range(size)]
        elsewhere = sum(host_of(peer, size) != host_of(rank, size) for peer in range(size))
        large = [verb for verb, nbytes in begun if nbytes == PART]
        assert large == ["recv"] * elsewhere + ["send"] * elsewhere
        if rank not in leaders:
            continue
        frame = begun.index(next(each for each in begun if each[0] == "send" and each[1] != PART))
        assert [each for each in begun[:frame] if each[1] == PART] == [("recv", PART)] * elsewhere
        assert ("send", PART) in begun[frame:]
