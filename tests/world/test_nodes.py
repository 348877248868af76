"""Nodes, local ranks, devices and the groups that follow from them, on hosts that the ranks are made to report."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import Member, on_ranks
from torch.utils.backend_registration import rename_privateuse1_backend

import phalanx


def on_hosts(
    monkeypatch: pytest.MonkeyPatch, hosts: str, body: Callable[[phalanx.World], Any], device: str | None = None
) -> list[Any]:
    """Run ``body(world)`` on one rank for each letter, which names its host; with four stand-in devices a host."""

    def rank(member: Member) -> Any:
        os.environ.update(
            {"RANK": str(member.rank), "WORLD_SIZE": str(member.size), "PHALANX_HOST": hosts[member.rank]}
        )
        monkeypatch.setattr("phalanx.world.meet", lambda *_: member.store())
        if device is not None:
            if device != "cuda":
                rename_privateuse1_backend(device)
            monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
            monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device(device))
            monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
            monkeypatch.setattr("phalanx.topology.device.open_device", lambda *_: None)
        world = phalanx.init("phalanx", quiet=True)
        try:
            return body(world)
        finally:
            phalanx.close()

    return on_ranks(rank, len(hosts))


@pytest.mark.parametrize("device", ["npu", pytest.param("cuda", marks=pytest.mark.long)])
def test_two_machines_with_two_devices_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: phalanx.World) -> tuple[Any, ...]:
        evens = world.subgroup(range(0, world.world_size, 2))
        return world.rank, world.node_rank, world.local_rank, str(world.device), None if evens is None else evens.rank

    assert on_hosts(monkeypatch, "aabb", body, device=device) == [
        (0, 0, 0, f"{device}:0", 0),
        (1, 0, 1, f"{device}:1", None),
        (2, 1, 0, f"{device}:0", 1),
        (3, 1, 1, f"{device}:1", None),
    ]


def test_the_table_shows_the_hosts_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = on_hosts(monkeypatch, "ab", lambda world: world.describe())[0]
    lines = [line.split() for line in table.splitlines()]
    assert [line[:4] for line in lines[2:]] == [["0", "0", "a", "0"], ["1", "1", "b", "0"]]
