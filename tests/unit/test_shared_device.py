"""Ranks that compute on one device without having said that they want to: one of them says so."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from phalanx.c10d.shared_device import shared_device


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_all_ranks_on_the_first_device_are_warned_of_once(order: list[int]) -> None:
    store = HashStore()
    said = [shared_device(store, rank, 3, "h1", "cuda 0") for rank in order]
    assert said[0] == said[2] == ""
    first, second = sorted(order[:2])
    spans = f"{first}-{second}" if second == first + 1 else f"{first}, {second}"
    assert said[1].startswith(f"warning: ranks {spans} compute on the same device (cuda 0)")


@pytest.mark.parametrize(
    "places",
    [
        [("h1", "cuda 0"), ("h1", "cuda 1"), ("h2", "cuda 0"), ("h2", "cuda 1")],
        [("h1", ""), ("h1", "")],  # the CPU, which ranks may share
        [("h1", "cuda 0")],
    ],
)
def test_ranks_on_different_devices_or_hosts_are_not_warned_of(places: list[tuple[str, str]]) -> None:
    store = HashStore()
    assert not any(shared_device(store, rank, len(places), *place) for rank, place in enumerate(places))


def test_each_shared_device_is_said_once() -> None:
    store = HashStore()
    said = [shared_device(store, rank, 6, "h1", f"cuda {rank % 2}") for rank in range(6)]
    assert [bool(text) for text in said] == [False, False, True, True, False, False]
    assert "ranks 0, 2 compute on the same device (cuda 0)" in said[2]
    assert "ranks 1, 3 compute on the same device (cuda 1)" in said[3]
