"""A ``World`` on forked ranks: what ``phalanx.init()`` returns, without a launcher."""

from __future__ import annotations

from datetime import timedelta

import torch

import phalanx
from phalanx.group import Session
from phalanx.place.place import Place
from phalanx.topology.topology import Node, Topology
from tests.support.ranks import Member

__all__ = ["join_world"]


def join_world(member: Member, backend: str = "phalanx", hosts: int = 1) -> phalanx.World:
    """Join the ranks of a test; they count as ``hosts`` hosts, with equally many ranks in a row on each."""
    member.join(backend)
    local = member.size // hosts
    place = Place("phalanx", member.rank, member.size, member.rank % local, local)
    nodes = tuple(Node(node, f"h{node}", tuple(range(node * local, (node + 1) * local))) for node in range(hosts))
    session = Session(frozenset({"cpu"}), timedelta(seconds=60))
    return phalanx.World(place, Topology(nodes), torch.device("cpu"), session)
