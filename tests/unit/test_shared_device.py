"""Ranks that compute on one device without having said that they want to: one of them says so."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore

from phalanx.c10d.shared_device import shared_device


def test_each_shared_device_of_a_host_is_said_once() -> None:
    store = HashStore()
    said = [shared_device(store, rank, 6, "h1", f"cuda {rank % 2}") for rank in (0, 1, 3, 2, 4, 5)]
    assert [bool(text) for text in said] == [False, False, True, True, False, False]
    assert said[2].startswith("warning: ranks 1, 3 compute on the same device (cuda 1)")
    assert said[3].startswith("warning: ranks 0, 2 compute on the same device (cuda 0)")
