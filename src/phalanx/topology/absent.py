"""On which host a rank that has not come should be, and with which local rank, as far as those that have come prove it.

A launcher tells each rank only its own place. But the places of several leave others no choice: the ranks of a node are
numbered in the order of their ranks, and each knows how many there are. Nothing is guessed: a rank for which there are
two possibilities is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.topology.place import Place
from phalanx.words import format_named

__all__ = ["Came", "Expected", "expected_places", "format_expected", "format_missing"]

_MOST = 8  # hosts that are named


@dataclass(frozen=True)
class Came:
    """A rank that has come, as it describes itself; None for what its launcher does not say."""

    rank: int
    host: str
    node_rank: int | None
    local_rank: int | None
    local_world_size: int | None


@dataclass(frozen=True)
class Expected:
    """Where a rank should be."""

    host: str
    local_rank: int


@dataclass
class _Node:
    host: str
    size: int
    by_rank: dict[int, int] = field(default_factory=dict)  # the local ranks of those that have come

    @property
    def is_in_order(self) -> bool:
        """Whether what its ranks say can all be true, and they are numbered in order."""
        local = [self.by_rank[rank] for rank in sorted(self.by_rank)]
        return local == sorted(set(local)) and all(0 <= number < self.size for number in local)


def expected_places(
    came: Iterable[Came],
    world_size: int,
    *,
    hosts: Sequence[str] = (),
    num_nodes: int | None = None,
    in_blocks: bool = False,
) -> dict[int, Expected]:
    """The places of ranks that have not come, by rank; of those for which they are certain.

    Args:
        came: the ranks that have come.
        world_size: how many ranks there are.
        hosts: all hosts by node rank, if they are known.
        num_nodes: how many nodes there are, if that is known.
        in_blocks: whether the launcher gives the ranks of a node numbers that follow each other.
    """
    came = list(came)
    nodes: dict[Hashable, _Node] = {}
    for one in came:
        if one.local_rank is None or one.local_world_size is None:
            return {}
        key = one.host if one.node_rank is None else one.node_rank
        node = nodes.setdefault(key, _Node(one.host, one.local_world_size))
        if node.size != one.local_world_size:
            return {}
        node.by_rank[one.rank] = one.local_rank
    elsewhere = world_size - sum(node.size for node in nodes.values())
    if elsewhere < 0 or not all(node.is_in_order for node in nodes.values()):
        return {}  # what the ranks say cannot all be true, whatever the reason
    if num_nodes is not None and len(hosts) == num_nodes and elsewhere:
        unseen = [node for node in range(num_nodes) if node not in nodes]
        if len(unseen) == 1:
            nodes[unseen[0]] = _Node(hosts[unseen[0]], elsewhere)
            elsewhere = 0
    return _placed(nodes.values(), {one.rank for one in came}, world_size, in_blocks=in_blocks, all_seen=not elsewhere)


def _placed(
    nodes: Iterable[_Node], came: set[int], world_size: int, *, in_blocks: bool, all_seen: bool
) -> dict[int, Expected]:
    found: dict[int, Expected] = {}
    for node in nodes:
        # Between two ranks of a node there are as many local ranks as ranks: then all of these are on the node.
        ends = [(-1, -1), *sorted(node.by_rank.items()), (world_size, node.size)]
        if in_blocks and node.by_rank:
            rank, local = next(iter(node.by_rank.items()))
            ends = [(rank - local - 1, -1), (rank - local + node.size, node.size)]
        for (low, first), (high, last) in itertools.pairwise(ends):
            if high - low == last - first:
                found |= {low + step: Expected(node.host, first + step) for step in range(1, high - low)}
    found = {rank: place for rank, place in found.items() if rank not in came and 0 <= rank < world_size}
    # Those of one node alone may be left.
    missing = [rank for rank in range(world_size) if rank not in came]
    unfilled = [node for node in nodes if len(node.by_rank) < node.size]
    if all_seen and len(unfilled) == 1:
        taken = set(unfilled[0].by_rank.values())
        free = [local for local in range(unfilled[0].size) if local not in taken]
        if len(free) == len(missing):
            found = {rank: Expected(unfilled[0].host, local) for rank, local in zip(missing, free, strict=True)}
    return dict(sorted(found.items()))


def format_expected(missing: Sequence[int], places: Mapping[int, Expected]) -> str:
    """``h2, local rank 0`` if all that are missing are there, else ``rank 2: h1, local rank 1; rank 5: h2, …``."""
    hosts: dict[str, list[int]] = {}
    for rank in missing:
        if rank in places:
            hosts.setdefault(places[rank].host, []).append(rank)
    texts = []
    for host, ranks in hosts.items():
        where = f"{host}, {format_named('local rank', [places[rank].local_rank for rank in ranks])}"
        texts.append(where if len(ranks) == len(missing) else f"{format_named('rank', ranks)}: {where}")
    more = f"; and {len(texts) - _MOST} more hosts" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more


def format_missing(missing: Sequence[int], came: Iterable[Came], place: Place) -> str:
    """``rank 2 of 3 (h2, local rank 0)``: the missing ranks, and where they should be as far as that is certain.

    Args:
        missing: the ranks that have not come.
        came: those that have.
        place: what the launcher said of this process.
    """
    traits = place.traits
    places = expected_places(
        came, place.world_size, hosts=place.hosts, num_nodes=place.num_nodes, in_blocks=traits.in_blocks
    )
    where = f" ({format_expected(missing, places)})" if places else ""
    return f"{format_named('rank', missing)} of {place.world_size}{where}"
