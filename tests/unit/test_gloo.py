"""Gloo groups that connect when they are used: how long a rank waits for another."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from phalanx.transports.gloo import engine

TIMEOUT_S = 2.0
LONG_S = 10.0  # of operations that must end before it, also on a busy machine


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two ranks in this process. Rank 1 has the higher address, so it is the one that connects."""
    store = PrefixStore("gloo", HashStore())
    ranks: list[Any] = []
    timeout = timedelta(seconds=getattr(request, "param", TIMEOUT_S))
    for rank in (0, 1):
        monkeypatch.setattr(engine, "LOOPBACK", f"127.0.0.{1 + rank}")
        gloo = engine.lazy_gloo(store, rank, 2, timeout, one_host=True)
        ranks.append(gloo)
    yield ranks
    ranks.clear()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_connects_is_waited_for_no_longer_than_the_timeout(rank: int, ranks: list[Any]) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Connect timeout|Timed out waiting 2000ms"):
        ranks[rank].allreduce([torch.ones(1)]).wait()
    assert TIMEOUT_S - 0.1 < time.monotonic() - started < 3 * TIMEOUT_S


@pytest.mark.parametrize("ranks", [LONG_S], indirect=True)
@pytest.mark.parametrize("late", [0, 1])
def test_an_operation_may_take_longer_than_the_timeout_with_which_gloo_was_made(late: int, ranks: list[Any]) -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    for _ in range(2):  # the first one connects
        early = threading.Thread(target=lambda: ranks[1 - late].allreduce([tensors[1 - late]]).wait())
        early.start()
        time.sleep(1.25 * LONG_S / engine.CONNECT_FACTOR)
        ranks[late].allreduce([tensors[late]]).wait()
        early.join()
    assert [tensor.item() for tensor in tensors] == [4.0, 4.0]


def test_a_gloo_group_goes_with_its_last_user_and_not_when_garbage_is_collected() -> None:
    """Its threads must be gone before the interpreter ends: one that asks for it later aborts the process."""
    told: list[timedelta] = []
    on_demand = engine.GlooOnDemand(
        lambda timeout: engine.lazy_gloo(HashStore(), 0, 1, timeout, one_host=True), timedelta(seconds=5)
    )
    on_demand.on_timeout = told.append
    on_demand.get()._set_default_timeout(timedelta(seconds=7))
    assert (told, on_demand.timeout) == ([timedelta(seconds=7)], timedelta(seconds=7))
    made = weakref.ref(on_demand.get())
    gc.collect()
    gc.disable()
    try:
        on_demand.shutdown()
        del on_demand
        assert made() is None
    finally:
        gc.enable()
