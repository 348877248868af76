"""Numbering hosts and ranks from what the ranks report, and comparing with what the launcher said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phalanx.errors import LauncherEnvironmentError
from phalanx.system.host import Host
from phalanx.topology.topology import Whereabouts, arrange


def placed(hosts: str, local: Sequence[int | None] | None = None, sizes: bool = False) -> list[Whereabouts]:
    """Reports of ranks on the hosts with these letters, with the local ranks that a launcher gave."""
    given_ranks = [None] * len(hosts) if local is None else local
    return [
        Whereabouts(
            rank,
            Host(host),
            launcher="mpich",
            local_rank=given_ranks[rank],
            local_world_size=hosts.count(host) if sizes else None,
        )
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("a", [(0,)]),
        ("aabb", [(0, 1), (2, 3)]),  # block
        ("abab", [(0, 2), (1, 3)]),  # cyclic, as mpiexec -ppn 1 places them
        ("abbb", [(0,), (1, 2, 3)]),  # unequal
        ("baab", [(0, 3), (1, 2)]),  # by first appearance, not by name
        ("abcacb", [(0, 3), (1, 5), (2, 4)]),
    ],
)
def test_hosts_are_numbered_by_first_appearance(hosts: str, nodes: list[tuple[int, ...]]) -> None:
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    topology = arrange(placed(hosts, local, sizes=True))
    assert topology.nodes == arrange(placed(hosts)).nodes
    assert [node.ranks for node in topology.nodes] == nodes
    assert [node.node_rank for node in topology.nodes] == list(range(len(nodes)))
    assert [node.host for node in topology.nodes] == list(dict.fromkeys(hosts))


def test_contradiction_between_launcher_and_hosts_is_named() -> None:
    for reports, words in (
        (placed("aabb", [0, 1, 2, 3]), "on b there are the ranks 2-3, and by the launcher rank 2 has local rank 2"),
        (placed("aab", [0, None, 0]), r"rank 1 has local rank \?"),
        # The trap of rank % devices: cyclic placement, and local ranks by arithmetic.
        (placed("abab", [0, 1, 0, 1]), "on a there are the ranks 0, 2"),
    ):
        with pytest.raises(LauncherEnvironmentError, match=f"mpich contradicts what the ranks see: .*{words}"):
            arrange(reports)
    containers = [
        Whereabouts(rank, Host("h", "boot", f"pid:[{rank}]"), launcher="slurm", local_rank=rank, local_world_size=2)
        for rank in range(2)
    ]
    with pytest.raises(LauncherEnvironmentError, match=r"is rank 0 alone, and by the launcher .* set PHALANX_HOST"):
        arrange(containers)


def test_two_agents_on_one_host_are_one_node_and_that_is_said() -> None:
    reports = [
        Whereabouts(rank, Host("h"), launcher="torchrun", local_rank=rank % 2, local_world_size=2, node_rank=rank // 2)
        for rank in range(4)
    ]
    topology = arrange(reports)
    assert [node.ranks for node in topology.nodes] == [(0, 1, 2, 3)]
    assert topology.notes == ("nodes 0-1 of torchrun are one host, h; its ranks get the local ranks 0-3",)
