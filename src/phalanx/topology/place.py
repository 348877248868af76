"""The place of a process in its world, as far as its launcher says, and that of ranks that have not come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.words import format_named

_MOST_HOSTS = 8  # that a message names


@dataclass(frozen=True)
class Traits:
    """Differences between launchers that matter when ranks meet; part of a launcher's row in ``launchers.py``.

    Attributes:
        starts_mpi: whether the processes it starts are ranks of MPI, so rank 0 can send the others a text by MPI.
        late_names: whether MASTER_ADDR on rank 0 may resolve to loopback or to a load balancer, and a host's name may
            resolve only once its machine is up.
        shared_job: whether several of its jobs may run at the same time under one ``job``, the id of an allocation.
        in_blocks: whether the ranks of each node follow one another.
        pass_on: how its command hands MASTER_ADDR and MASTER_PORT to all ranks; empty where it has no option for it.
    """

    starts_mpi: bool = False
    late_names: bool = False
    shared_job: bool = False
    in_blocks: bool = False
    pass_on: str = ""


@dataclass(frozen=True)
class Place:
    """The place of a process in its world.

    A fact that a launcher does not give is None, never guessed: the ranks find it out together once they have met
    (``topology.py``).

    Attributes:
        launcher: the name of the row that was recognised; ``none`` for a process started plainly.
        rank, world_size: place in the default group.
        local_rank, local_world_size: place among the ranks of the same host.
        node_rank, num_nodes: the host's index in the world.
        master_addr: where the ranks can meet.
        master_port: the port there, where it is fixed.
        job: a text that no other job has, from which the ranks can derive a port.
        attempt: how often the launcher has started the job anew.
        hosts: the hosts by node rank, where the launcher lists exactly those of this world.
        first_of_allocation: whether ``master_addr`` is the first host of an allocation, of which this job may use
            others.
        keeps_store: whether the launcher keeps a store of torch's at ``master_addr`` and ``master_port``.
        traits: the launcher's differences from others that matter when ranks meet.
        sources: for each fact where it was read, for people: ``RANK=3``.
        notes: what the user should know, one line each.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    num_nodes: int | None = 1
    master_addr: str | None = None
    master_port: int | None = None
    job: str | None = None
    attempt: int = 0
    hosts: tuple[str, ...] = field(default=(), compare=False)
    first_of_allocation: bool = field(default=False, compare=False)
    keeps_store: bool = field(default=False, compare=False)
    traits: Traits = field(default=Traits(), compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def on_one_host(self) -> bool:
        """Tell whether the launcher says that all ranks are on this host."""
        return self.local_world_size == self.world_size


# -- ranks that have not come --------------------------------------------------------------------------


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
    """A rank's place, as the launcher planned it."""

    host: str
    local_rank: int


@dataclass
class _Node:
    host: str
    size: int
    came: dict[int, int] = field(default_factory=dict)  # local ranks by rank


def expected_places(
    came: Sequence[Came],
    world_size: int,
    *,
    hosts: Sequence[str] = (),
    num_nodes: int | None = None,
    in_blocks: bool = False,
) -> dict[int, Expected]:
    """Deduce where ranks that have not come should be, by rank.

    A launcher tells each rank only its own place, with how many ranks its node has. That leaves others no choice if all
    that are missing are on one node, whose ranks are numbered in their order, or if ranks are placed in blocks. Nothing
    is guessed: a rank for which there are two possibilities is left out.

    Args:
        came: the ranks that have come.
        world_size: how many ranks there are.
        hosts: all hosts by node rank, if they are known.
        num_nodes: how many nodes there are, if that is known.
        in_blocks: whether the launcher gives the ranks of a node numbers that follow each other.
    """
    nodes: dict[Hashable, _Node] = {}
    for one in came:
        if one.local_rank is None or one.local_world_size is None:
            return {}
        key = one.host if one.node_rank is None else one.node_rank
        node = nodes.setdefault(key, _Node(one.host, one.local_world_size))
        node.came[one.rank] = one.local_rank
        local = [node.came[rank] for rank in sorted(node.came)]
        if node.size != one.local_world_size or local != sorted({*local} & {*range(node.size)}):
            return {}  # what the ranks say cannot all be true, or they are not numbered in order
    elsewhere = world_size - sum(node.size for node in nodes.values())
    unseen = [node for node in range(num_nodes or 0) if node not in nodes]
    if elsewhere > 0 and len(hosts) == num_nodes and len(unseen) == 1:
        nodes[unseen[0]] = _Node(hosts[unseen[0]], elsewhere)
        elsewhere = 0
    missing = sorted({*range(world_size)} - {one.rank for one in came})
    unfilled = [node for node in nodes.values() if len(node.came) < node.size]
    found: dict[int, Expected] = {}
    if elsewhere == 0 and len(unfilled) == 1:  # all that are missing are on this node
        free = sorted({*range(unfilled[0].size)} - {*unfilled[0].came.values()})
        found = {rank: Expected(unfilled[0].host, local) for rank, local in zip(missing, free, strict=False)}
    elif in_blocks and elsewhere >= 0:
        for one in came:
            first = one.rank - (one.local_rank or 0)
            found |= {first + local: Expected(one.host, local) for local in range(one.local_world_size or 0)}
    return {rank: found[rank] for rank in missing if rank in found}


def format_expected(missing: Sequence[int], places: Mapping[int, Expected]) -> str:
    """Say ``h2, local rank 0`` if all that are missing are there, else ``rank 2: h1, local rank 1; rank 5: …``."""
    hosts: dict[str, list[int]] = {}
    for rank in missing:
        if rank in places:
            hosts.setdefault(places[rank].host, []).append(rank)
    texts = []
    for host, ranks in hosts.items():
        where = f"{host}, {format_named('local rank', [places[rank].local_rank for rank in ranks])}"
        texts.append(where if len(ranks) == len(missing) else f"{format_named('rank', ranks)}: {where}")
    more = f"; and {len(texts) - _MOST_HOSTS} more hosts" if len(texts) > _MOST_HOSTS else ""
    return "; ".join(texts[:_MOST_HOSTS]) + more


def format_missing(missing: Sequence[int], came: Iterable[Came], place: Place) -> str:
    """Say ``rank 2 of 3 (h2, local rank 0)``: which ranks are missing, and where they should be if that is certain.

    Args:
        missing: the ranks that have not come.
        came: those that have.
        place: what the launcher said of this process.
    """
    places = expected_places(
        [*came],
        place.world_size,
        hosts=place.hosts,
        num_nodes=place.num_nodes,
        in_blocks=place.traits.in_blocks,
    )
    where = f" ({format_expected(missing, places)})" if places else ""
    return f"{format_named('rank', missing)} of {place.world_size}{where}"
