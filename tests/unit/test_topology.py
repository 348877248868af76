"""Numbering hosts and ranks from what the ranks report, and comparing with what the launcher said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import LauncherEnvironmentError
from phalanx.system.host import Host, this_host
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
    topology = arrange(placed(hosts))
    assert [node.ranks for node in topology.nodes] == nodes
    assert [node.node_rank for node in topology.nodes] == list(range(len(nodes)))
    assert [node.host for node in topology.nodes] == list(dict.fromkeys(hosts))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_any_placement_gives_every_rank_one_place(hosts: list[str], random: object) -> None:
    seen: dict[str, int] = {}
    local = [seen.setdefault(host, 0) or 0 for host in hosts]
    for rank, host in enumerate(hosts):
        local[rank], seen[host] = seen[host], seen[host] + 1
    topology = arrange(placed("".join(hosts), local, sizes=True))
    assert sorted(rank for node in topology.nodes for rank in node.ranks) == list(range(len(hosts)))
    for rank, host in enumerate(hosts):
        node = topology.node_of(rank)
        assert node.host == host
        assert node.ranks.index(rank) == local[rank]
    firsts = [min(node.ranks) for node in topology.nodes]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        (placed("aabb", [0, 1, 2, 3]), "on b there are the ranks 2-3, and by the launcher rank 2 has local rank 2"),
        (placed("aab", [0, None, 0]), r"rank 1 has local rank \?"),
        # The trap of rank % devices: cyclic placement, and local ranks by arithmetic.
        (placed("abab", [0, 1, 0, 1]), "on a there are the ranks 0, 2"),
    ],
)
def test_a_contradiction_is_named(reports: list[Whereabouts], words: str) -> None:
    with pytest.raises(LauncherEnvironmentError, match=f"mpich contradicts what the ranks see: .*{words}"):
        arrange(reports)


def test_each_rank_in_a_container_of_its_own_is_told_how_to_say_so() -> None:
    reports = [
        Whereabouts(0, Host("h", "boot", "pid:[1]"), launcher="slurm", local_rank=0, local_world_size=2, node_rank=0),
        Whereabouts(1, Host("h", "boot", "pid:[2]"), launcher="slurm", local_rank=1, local_world_size=2, node_rank=0),
    ]
    with pytest.raises(LauncherEnvironmentError, match=r"is rank 0 alone, and by the launcher .* set PHALANX_HOST"):
        arrange(reports)


def test_two_agents_on_one_host_are_one_node_and_that_is_said() -> None:
    reports = [
        Whereabouts(rank, Host("h"), launcher="torchrun", local_rank=rank % 2, local_world_size=2, node_rank=rank // 2)
        for rank in range(4)
    ]
    topology = arrange(reports)
    assert [node.ranks for node in topology.nodes] == [(0, 1, 2, 3)]
    assert topology.notes == ("nodes 0-1 of torchrun are one host, h; its ranks get the local ranks 0-3",)


def test_a_host_is_its_name_its_boot_and_its_process_ids() -> None:
    here = this_host({})
    assert here == this_host({})
    assert here.name
    assert here.boot_id
    assert here.pid_namespace.startswith("pid:[")
    assert this_host({"PHALANX_HOST": "h3"}) == Host("h3")
