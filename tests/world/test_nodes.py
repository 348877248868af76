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


def test_groups_of_a_node_and_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, nodes = "abbab", [(0, 3), (1, 2, 4)]

    def body(world: phalanx.World) -> tuple[Any, ...]:
        assert [node.ranks for node in world.nodes] == nodes
        assert world.nodes[world.node_rank].ranks[world.local_rank] == world.rank
        assert world.num_nodes == len(nodes)
        assert world.local_world_size == len(nodes[world.node_rank])
        inside, across = world.node_group, world.peers_group
        assert world.node_group is inside
        assert (inside.rank, inside.size) == (world.local_rank, world.local_world_size)
        sums = []
        for group in (inside, across):
            tensor = torch.tensor([10.0**world.rank])
            group.all_reduce(tensor)
            sums.append(tensor.item())
        return inside.ranks, across.ranks, across.rank, *sums

    answers = on_hosts(monkeypatch, hosts, body)
    for rank, (inside, across, number, inner_sum, outer_sum) in enumerate(answers):
        node = next(ranks for ranks in nodes if rank in ranks)
        local_rank = node.index(rank)
        peers = tuple(ranks[local_rank] for ranks in nodes if local_rank < len(ranks))
        assert (inside, across, number) == (node, peers, peers.index(rank))
        assert inner_sum == sum(10.0**member for member in node)
        assert outer_sum == sum(10.0**member for member in peers)


def test_split_by_color_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: phalanx.World) -> tuple[Any, ...]:
        # Ranks 0 and 3 come together in the opposite order, 1 and 4 in their own; 2 joins nobody.
        group = world.split(None if world.rank == 2 else world.rank % 3, key=-world.rank if world.rank % 3 == 0 else 0)
        tensor = torch.tensor([float(world.rank)])
        if group is not None:
            group.broadcast(tensor, src=0)
        everyone = world.split(0)
        assert everyone is not None
        assert everyone.ranks == world.ranks
        world.barrier()
        return (None if group is None else (group.ranks, group.rank)), tensor.item()

    assert on_hosts(monkeypatch, "aabba", body) == [
        (((3, 0), 1), 3.0),
        (((1, 4), 0), 1.0),
        (None, 2.0),
        (((3, 0), 0), 3.0),
        (((1, 4), 1), 1.0),
    ]


def test_the_table_shows_the_hosts_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = on_hosts(monkeypatch, "ab", lambda world: world.describe())[0]
    lines = [line.split() for line in table.splitlines()]
    assert [line[:4] for line in lines[2:]] == [["0", "0", "a", "0"], ["1", "1", "b", "0"]]
