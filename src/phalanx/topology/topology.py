"""Places of all ranks: gathered from the ranks themselves, and compared with what the launcher said.

Nodes are hosts, numbered in the order of their lowest ranks. A node's index is never computed from a rank, so it makes
no difference whether ranks are placed in blocks, in turn or unequally, nor how a launcher numbers its nodes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from phalanx import settings
from phalanx.errors import InitializationError, LauncherEnvironmentError
from phalanx.system.host import Host
from phalanx.topology.place import Place
from phalanx.words import format_named, format_spans

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class RankInfo:
    """The place of one rank, as it reports itself; None for the numbers that its launcher does not give."""

    rank: int
    host: Host
    pid: int = 0
    launcher: str = "none"
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


@dataclass(frozen=True)
class Node:
    """One host of the world, and the world ranks that run there, in the order of their local ranks."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """All hosts and their ranks, by node rank; ``notes`` is what the user should know, one line each."""

    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()

    def node_of(self, rank: int) -> Node:
        return next(node for node in self.nodes if rank in node.ranks)


def gather(store: Store, place: Place, host: Host, timeout_s: float) -> Topology:
    """Report to the other ranks where this rank is, and learn where they are. Every rank calls it, with a new store.

    Each rank makes three requests to the store; rank 0 makes one for each rank.

    Raises:
        InitializationError: two processes are the same rank, or ranks did not come in time; the message names them.
        LauncherEnvironmentError: the launcher's local ranks do not fit the hosts that the ranks report.
    """
    report = RankInfo(
        place.rank, host, os.getpid(), place.launcher, place.local_rank, place.local_world_size, place.node_rank
    )
    if place.world_size == 1:
        return arrange([report])
    own = json.dumps(asdict(report))
    # The first process of a rank writes its entry. A second one reads that entry in place of its own.
    entered = store.compare_set(f"report/{place.rank}", "", own).decode()
    if entered != own:
        other = _parse(entered)
        earlier, this = (f"pid {each.pid} on {each.host.name}" for each in (other, report))
        raise InitializationError.rank_twice(place.rank, earlier, this, other.pid, other.host.name)
    if place.rank == 0:
        _await(store, _keys(place), place, timeout_s)
        store.set("reports", json.dumps([store.get(key).decode() for key in _keys(place)]))
    else:
        _await(store, ["reports"], place, timeout_s)
    return arrange([_parse(entry) for entry in json.loads(store.get("reports"))])


def _await(store: Store, keys: list[str], place: Place, timeout_s: float) -> None:
    """Wait for these keys; if they do not come in time, say which ranks have not come."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError as error:  # the error's class depends on the store, and all are of this kind
        try:
            missing = [rank for rank, key in enumerate(_keys(place)) if not store.check([key])]
        except RuntimeError:
            raise InitializationError(f"the store in which the ranks were meeting has gone: {error}") from error
        # If all have come by now, rank 0 was about to say so.
        ranks = f"{format_named('rank', missing or [0])} of {place.world_size}"
        before = f"rank {place.rank} had joined, but" if place.rank else ""
        raise InitializationError.ranks_missing(ranks, timeout_s, before=before) from None


def _keys(place: Place) -> list[str]:
    return [f"report/{rank}" for rank in range(place.world_size)]


def _parse(entry: str) -> RankInfo:
    fields = json.loads(entry)
    return RankInfo(**{**fields, "host": Host(**fields["host"])})


def arrange(reports: Sequence[RankInfo]) -> Topology:
    """Number the hosts, and the ranks on each host, by the reports of all ranks in rank order."""
    hosts: dict[Host, list[RankInfo]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    nodes, notes = [], []
    for node_rank, (host, members) in enumerate(hosts.items()):
        ordered, note = _by_local_rank(host, members)
        nodes.append(Node(node_rank, host.name, tuple(member.rank for member in ordered)))
        notes += [note] if note else []
    return Topology(tuple(nodes), tuple(notes))


def _by_local_rank(host: Host, members: list[RankInfo]) -> tuple[list[RankInfo], str]:
    """Order the ranks of one host; with a note if the launcher numbers them otherwise for a known reason."""
    if all(member.local_rank is None for member in members):
        return members, ""
    if _agree(members):
        return sorted(members, key=lambda member: member.local_rank or 0), ""
    # With several agents on one host (torchrun twice, to try two nodes on one machine), each numbers its own ranks.
    agents: dict[int | None, list[RankInfo]] = {}
    for member in members:
        agents.setdefault(member.node_rank, []).append(member)
    if len(agents) > 1 and all(_agree(own) for own in agents.values()):
        return members, (
            f"nodes {format_spans([node for node in agents if node is not None])} of {members[0].launcher} are one "
            f"host, {host.name}; its ranks get the local ranks 0-{len(members) - 1}"
        )
    said = ", ".join(
        f"rank {member.rank} has local rank {'?' if member.local_rank is None else member.local_rank}"
        + ("" if member.local_world_size is None else f" of {member.local_world_size}")
        for member in members[:8]
    )
    more = ", …" if len(members) > 8 else ""
    ranks = format_spans([member.rank for member in members])
    are = f"is rank {ranks} alone" if len(members) == 1 else f"are the ranks {ranks}"
    raise LauncherEnvironmentError(
        f"{members[0].launcher} contradicts what the ranks see: on {host.name} there {are}, and by the "
        f"launcher {said}{more}. If each rank runs in a container of its own, set {settings.HOST} to the same name for "
        f"all ranks of a host; otherwise check whether a variable was left by another job"
    )


def _agree(members: Sequence[RankInfo]) -> bool:
    """Return whether the launcher's local ranks are 0 to n - 1 for a host's n ranks, and its local world size is n."""
    local = sorted(-1 if member.local_rank is None else member.local_rank for member in members)
    sizes = {member.local_world_size for member in members}
    return local == list(range(len(members))) and sizes <= {None, len(members)}
