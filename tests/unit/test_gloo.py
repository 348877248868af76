"""Gloo groups that connect when they are used: how long a rank waits for another."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from phalanx.transports.gloo import engine
from phalanx.transports.gloo.engine import AttachedGloo, lazy_gloo

TIMEOUT = timedelta(seconds=2)


def pair(monkeypatch: pytest.MonkeyPatch) -> list[AttachedGloo]:
    """Two ranks of a group in this process. Rank 1 has the higher address, so it is the one that connects."""
    store = PrefixStore("gloo", HashStore())
    ranks = []
    for rank in (0, 1):
        monkeypatch.setattr(engine, "LOOPBACK", f"127.0.0.{1 + rank}")
        ranks.append(lazy_gloo(store, rank, 2, TIMEOUT, one_host=True))
    return ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_connects_is_waited_for_no_longer_than_the_timeout(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = pair(monkeypatch)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Connect timeout|Timed out waiting 2000ms"):
        ranks[rank].allreduce([torch.ones(1)]).wait()
    assert TIMEOUT.total_seconds() - 0.1 < time.monotonic() - started < 3 * TIMEOUT.total_seconds()


def test_an_operation_has_the_whole_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = pair(monkeypatch)
    assert [gloo.options._timeout for gloo in ranks] == [TIMEOUT] * 2
    tensors = [torch.ones(1), torch.ones(1)]
    first = ranks[0].allreduce([tensors[0]])
    time.sleep(TIMEOUT.total_seconds() / 2)
    ranks[1].allreduce([tensors[1]]).wait()
    first.wait()
    late = ranks[1].allreduce([tensors[1]])
    time.sleep(TIMEOUT.total_seconds() / 2)
    ranks[0].allreduce([tensors[0]]).wait()
    late.wait()
    assert [tensor.item() for tensor in tensors] == [4.0, 4.0]
