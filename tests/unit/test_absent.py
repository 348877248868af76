"""Where ranks that have not come should be: said only if the ranks that have come leave no other choice."""

from __future__ import annotations

import itertools

import pytest

from phalanx.topology.place import Came, Expected, expected_places, format_expected

World = list[tuple[str, int]]  # by rank its host and its local rank


def world(*hosts: str) -> World:
    """Ranks on these hosts, in their order."""
    return [(host, hosts[:rank].count(host)) for rank, host in enumerate(hosts)]


def came(ranks: World, which: set[int], *, nodes: bool) -> list[Came]:
    order = [*dict.fromkeys(host for host, _ in ranks)]
    sizes = {host: sum(other == host for other, _ in ranks) for host in order}
    return [
        Came(rank, host, order.index(host) if nodes else None, local, sizes[host])
        for rank, (host, local) in enumerate(ranks)
        if rank in which
    ]


def test_last_host_is_named_if_the_launcher_lists_the_hosts() -> None:
    there = came(world("h0", "h1", "h2"), {0, 1}, nodes=True)
    assert expected_places(there, 3, hosts=("h0", "h1", "h2"), num_nodes=3) == {2: Expected("h2", 0)}
    assert expected_places(there, 3, num_nodes=3) == {}


def test_nothing_is_said_if_the_ranks_say_too_little_or_contradict_it() -> None:
    for there in (
        [Came(0, "h0", None, None, None), Came(1, "h0", None, None, None)],
        [Came(0, "h0", None, 0, 2), Came(1, "h0", None, 0, 2)],
        [Came(0, "h0", None, 0, 9)],
        [Came(0, "h0", None, -1, 2)],
        [Came(0, "h0", None, 0, 2), Came(1, "h0", None, 1, 3)],
    ):
        assert expected_places(there, 3) == {}


def test_in_blocks_a_host_of_which_one_rank_has_come_is_known() -> None:
    ranks = world("h0", "h0", "h1", "h1", "h2")
    found = expected_places(came(ranks, {0, 3}, nodes=True), 5, in_blocks=True)
    assert found == {1: Expected("h0", 1), 2: Expected("h1", 0)}


@pytest.mark.parametrize(("nodes", "listed"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("size", [3, 4])
def test_places_hold_in_all_worlds_in_which_the_same_ranks_came(size: int, listed: bool, nodes: bool) -> None:
    """All ways to place ranks on up to three hosts; whatever is said must hold in each that looks the same."""
    seen: dict[tuple[object, ...], list[tuple[World, dict[int, Expected]]]] = {}
    for hosts in itertools.product(("h0", "h1", "h2"), repeat=size):
        order = tuple(dict.fromkeys(hosts))
        if order != ("h0", "h1", "h2")[: len(order)]:
            continue
        ranks = world(*hosts)
        for count in range(1, size):
            for which in itertools.combinations(range(size), count):
                there = came(ranks, set(which), nodes=nodes)
                known = (order, len(order)) if listed else ((), None)
                found = expected_places(there, size, hosts=known[0], num_nodes=known[1])
                assert not set(found) & set(which)
                seen.setdefault((tuple(there), known), []).append((ranks, found))
    assert any(found for alike in seen.values() for _, found in alike)
    for alike in seen.values():
        for (ranks, _), (_, found) in itertools.product(alike, repeat=2):
            assert all(ranks[rank] == (place.host, place.local_rank) for rank, place in found.items())


def test_places_are_told_briefly() -> None:
    assert format_expected([2], {2: Expected("h2", 0)}) == "h2, local rank 0"
    assert format_expected([2, 3], {2: Expected("h2", 0), 3: Expected("h2", 1)}) == "h2, local ranks 0-1"
    places = {2: Expected("h2", 0), 3: Expected("h3", 1), 4: Expected("h3", 2)}
    assert format_expected([2, 3, 4, 5], places) == "rank 2: h2, local rank 0; ranks 3-4: h3, local ranks 1-2"
    many = {rank: Expected(f"h{rank}", 0) for rank in range(1, 12)}
    assert format_expected(range(1, 12), many).endswith("rank 8: h8, local rank 0; and 3 more hosts")
