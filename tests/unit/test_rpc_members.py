"""The directory of workers in the job's store, while some of them are just coming."""

from __future__ import annotations

import os

import pytest
from torch._C._distributed_c10d import HashStore

from phalanx.errors import RankError
from phalanx.rpc.members import Members


class SlowToBear(HashStore):
    """A store that is stopped before the first worker's name points to it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise InterruptedError(key)


def test_a_worker_that_others_have_seen_is_found_by_its_name_at_once() -> None:
    store = SlowToBear()
    coming, other = Members(store), Members(store)
    worker = coming.new("worker1", 1, os.getpid(), "127.0.0.1", 1)
    with pytest.raises(InterruptedError):
        coming.join(worker, lambda _: False)
    assert other.ranks_seen() == {1}
    assert other.find(1) == other.find("worker1") == worker
    with pytest.raises(RankError, match="worker1"):
        other.find("worker2")
