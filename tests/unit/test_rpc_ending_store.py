"""The job's store as RPC asks it: when it has been closed, nobody is in the middle of a request."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phalanx.rpc.ending_store import EndingStore


class SlowStore(HashStore):
    """A store whose ``get`` waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        self.asked.set()
        assert self.go_on.wait(60.0)
        return b"value of " + key.encode()


def test_close_waits_for_requests_under_way_and_refuses_others() -> None:
    slow = SlowStore()
    store = EndingStore(slow)
    got: list[bytes] = []
    order: list[str] = []

    def ask() -> None:
        got.append(store.get("a"))
        order.append("asked")

    def close() -> None:
        store.close()
        order.append("closed")

    asking = threading.Thread(target=ask)
    asking.start()
    assert slow.asked.wait(60.0)
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(dist.DistError, match="closed"):
        while True:
            store.add("b", 1)
    assert not order
    slow.go_on.set()
    asking.join()
    closing.join()
    assert got == [b"value of a"]
    assert sorted(order) == ["asked", "closed"]
    with pytest.raises(dist.DistError, match="closed"):
        store.get("a")
