"""The layout of a group over hosts: which ranks share memory, who talks to whom, and the sizes that follow from it.

A host here is a set of ranks that share memory. That is found by trying, since neither names nor kernels say. Ranks of
one machine that cannot share memory, as in containers, are hosts of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import HashStore, Store

from phalanx.errors import InitializationError
from phalanx.membership.rendezvous_store import part_of
from phalanx.system.host import this_host
from phalanx.transports.shm.communicator import SharedMemoryCommunicator
from phalanx.transports.shm.segment import NotOneHost
from phalanx.words import format_limit, format_named

__all__ = ["Layout", "Scratch", "Sizes", "find_hosts", "in_chunks", "said_by_all"]

# docs/algorithms.md says how these were chosen.
_FRAMES_BYTES, _LEAST_FRAME_BYTES = 64 * 1024, 4 * 1024  # to one leader, of all others and of one
_CHUNK_BYTES = 4 << 20


class Layout:
    """The hosts of a group, in the order of their lowest ranks.

    Args:
        host_of: for each rank of the group, something that is equal for the ranks of one host.
        rank: this process's rank.
        names: what each rank's host is called; by default hosts are numbered.

    Attributes:
        hosts, leaders: the group ranks of each host, in order, and the first of each.
        host, local, here: the number of this rank's host, its place there, and the ranks there.
        leader: whether this rank speaks for its host.
        lanes: how many ranks of every host talk to other hosts: as many as the smallest host has.
        lane: the ranks of this rank's lane, one of each host; empty if it has none.
    """

    def __init__(self, host_of: Sequence[object], rank: int, names: Sequence[str] = ()) -> None:
        ranks: dict[object, list[int]] = {}
        for each, host in enumerate(host_of):
            ranks.setdefault(host, []).append(each)
        self.hosts = list(ranks.values())
        self._places = {
            each: (number, place) for number, members in enumerate(self.hosts) for place, each in enumerate(members)
        }
        self.host, self.local = self._places[rank]
        self.here = self.hosts[self.host]
        self.lanes = min(map(len, self.hosts))
        self.leader = self.local == 0
        self.lane = [members[self.local] for members in self.hosts] if self.local < self.lanes else []
        self.leaders = [members[0] for members in self.hosts]
        self._names = names

    def place(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and its place there."""
        return self._places[rank]

    def name(self, rank: int) -> str:
        """Return the name of the host of a rank."""
        return self._names[rank] if self._names else f"host {self.place(rank)[0]}"

    def ranks_beside(self, rank: int) -> list[int]:
        """Return the ranks of the host of a rank."""
        return self.hosts[self.place(rank)[0]]


def find_hosts(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[Layout, SharedMemoryCommunicator, bool]:
    """Find the ranks that share memory with this one. Every rank of the group calls it, with a store of its own.

    Returns:
        Where all ranks are; a communicator of those on this host; and whether ranks of one machine share no memory.

    Raises:
        InitializationError: a rank did not come within the timeout.
    """
    believed = said_by_all(store, "host", rank, size, timeout, json.dumps(asdict(this_host()), sort_keys=True))
    here = [other for other in range(size) if believed[other] == believed[rank]]
    own = part_of(store, f"memory/{here[0]}")
    try:
        local = SharedMemoryCommunicator(own, here.index(rank), len(here), timeout, names=here)
        found = f"domain {here[0]}"
    except NotOneHost:
        local = SharedMemoryCommunicator(HashStore(), 0, 1, timeout, names=[rank])
        found = f"rank {rank}"
    try:
        domains = said_by_all(store, "domain", rank, size, timeout, found)
    except BaseException:
        local.close()
        raise
    hosts = [json.loads(host) for host in believed]
    layout = Layout(domains, rank, [host["name"] for host in hosts])
    machines = [{hosts[member]["boot_id"] for member in members} - {""} for members in layout.hosts]
    return layout, local, len(frozenset().union(*machines)) < sum(map(len, machines))


def said_by_all(store: Store, name: str, rank: int, size: int, timeout: timedelta, value: str) -> list[str]:
    """Write something into the store, and return what all ranks write, in their order."""
    store.set(f"{name}/{rank}", value)
    keys = [f"{name}/{other}" for other in range(size)]
    try:
        store.wait(keys, timeout)
    except InitializationError:
        raise  # a rank has gone
    except RuntimeError as error:
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise InitializationError(
            f"while this group over several hosts was made, {format_named('rank', absent)} said nothing for "
            f"{format_limit(timeout.total_seconds())} (in the step {name!r}); look at the output of each such rank"
        ) from error
    return [value.decode() for value in store.multi_get(keys)]


# -- sizes and memory of a group -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes of one group, equal on all its ranks.

    Attributes:
        frame_bytes: the most data of a host's frame.
        chunk_bytes: about how much of a larger tensor is moved at once (:func:`in_chunks`).
    """

    frame_bytes: int
    chunk_bytes: int = _CHUNK_BYTES

    @staticmethod
    def among(hosts: int) -> Sizes:
        """Return those of a group over so many hosts."""
        return Sizes(max(_LEAST_FRAME_BYTES, _FRAMES_BYTES // max(1, hosts - 1)))


def in_chunks(flat: torch.Tensor, chunk_bytes: int) -> list[torch.Tensor]:
    """The parts of a flat tensor that are moved one after the other; equal tensors have equal ones.

    The first and the last have half of ``chunk_bytes``, since the wire stands still while the first one is combined and
    the last one is spread. Those between have up to twice as much.
    """
    if flat.nbytes <= chunk_bytes:
        return [flat]
    if flat.nbytes <= 2 * max(chunk_bytes, flat.itemsize):
        return list(flat.split(-(-flat.numel() // 2)))
    edge = max(1, chunk_bytes // 2 // flat.itemsize)
    middle = flat.numel() - 2 * edge
    each = -(-middle // -(-middle // (4 * edge)))
    if edge >= 64:
        each = -(-each // 64) * 64  # they begin at cache lines
    return [flat[:edge], *flat[edge : edge + middle].split(each), flat[edge + middle :]]


class Scratch:
    """Tensors by name, whose memory is used again by the next one of that name.

    New memory costs more, when it is first written, than all that is done with it later. One thread uses it.
    """

    def __init__(self) -> None:
        self._memory: dict[object, torch.Tensor] = {}

    def take(self, name: object, like: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor of the same dtype and number of elements as another; what it holds is undefined."""
        return self.take_bytes(name, like.nbytes).view(like.dtype)

    def take_bytes(self, name: object, nbytes: int) -> torch.Tensor:
        """Return so many bytes."""
        memory = self._memory.get(name)
        if memory is None or memory.nbytes < nbytes:
            memory = self._memory[name] = torch.empty(max(1, nbytes), dtype=torch.uint8)
        return memory[:nbytes]
