"""Where the ranks of a group are: which share memory, and who of each host talks to whom of another."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Layout"]


class Layout:
    """The hosts of a group, in the order of their lowest ranks. A host here is a set of ranks that share memory.

    Args:
        host_of: for each rank of the group, something that is equal for the ranks of one host.
        rank: this process's rank.
        names: what each rank's host is called; by default hosts are numbered.

    Attributes:
        hosts: the group ranks of each host, in order.
        host: the number of this rank's host.
        local: this rank's place on its host.
        here: the ranks of this host.
        lanes: how many ranks of every host talk to other hosts: as many as the smallest host has.
        even: whether all hosts have as many ranks.
        leader: whether this rank speaks for its host.
        lane: the ranks of this rank's lane, one of each host; empty if it has none.
        leaders: the first rank of each host.
    """

    def __init__(self, host_of: Sequence[object], rank: int, names: Sequence[str] = ()) -> None:
        ranks: dict[object, list[int]] = {}
        for each, host in enumerate(host_of):
            ranks.setdefault(host, []).append(each)
        self.hosts = list(ranks.values())
        self.host = next(number for number, members in enumerate(self.hosts) if rank in members)
        self.here = self.hosts[self.host]
        self.local = self.here.index(rank)
        self.lanes = min(map(len, self.hosts))
        self.even = len({len(members) for members in self.hosts}) == 1
        self.leader = self.local == 0
        self.lane = [members[self.local] for members in self.hosts] if self.local < self.lanes else []
        self.leaders = [members[0] for members in self.hosts]
        self._names = names
        self._places = {
            each: (number, place) for number, members in enumerate(self.hosts) for place, each in enumerate(members)
        }

    def place(self, rank: int) -> tuple[int, int]:
        """The host of a rank, and its place there."""
        return self._places[rank]

    def name(self, rank: int) -> str:
        """What the host of a rank is called."""
        return self._names[rank] if self._names else f"host {self.place(rank)[0]}"

    def ranks_beside(self, rank: int) -> list[int]:
        """The ranks of the host of a rank."""
        return self.hosts[self.place(rank)[0]]
