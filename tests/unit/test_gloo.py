"""Gloo groups that connect when they are used: how long a rank waits for another, and when their threads end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from phalanx.transports.hierarchical import gloo as engine


def two_ranks(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> list[Any]:
    """In this process. Rank 1 has the higher address, so it is the one that connects."""
    store = PrefixStore("gloo", HashStore())
    ranks: list[Any] = []
    for rank in (0, 1):
        monkeypatch.setattr(engine, "LOOPBACK", f"127.0.0.{1 + rank}")
        ranks.append(engine.lazy_gloo(store, rank, 2, timedelta(seconds=timeout_s), one_host=True))
    return ranks


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_rank_that_never_connects_is_waited_for_as_long_as_the_timeout(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = two_ranks(monkeypatch, 2.0)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Connect timeout|Timed out waiting 2000ms"):
        ranks[rank].allreduce([torch.ones(1)]).wait()
    assert 1.9 < time.monotonic() - started < 8  # Gloo tries five times


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.long)])
def test_operation_may_take_longer_than_the_time_to_connect(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timeout_s = 4.0
    ranks = two_ranks(monkeypatch, timeout_s)
    tensors = [torch.ones(1), torch.ones(1)]
    for _ in range(2):  # the first one connects
        early = threading.Thread(target=lambda: ranks[1 - late].allreduce([tensors[1 - late]]).wait())
        early.start()
        time.sleep(1.25 * timeout_s / engine.CONNECT_FACTOR)
        ranks[late].allreduce([tensors[late]]).wait()
        early.join()
    assert [tensor.item() for tensor in tensors] == [4.0, 4.0]


def test_gloo_group_goes_with_its_last_user_and_not_with_garbage() -> None:
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
