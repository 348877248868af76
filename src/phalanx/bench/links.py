"""The links between the hosts of a world: how quick one is, what crosses each of them in a call, and what has to.

What crosses is read from the kernel's counters of the interface by which a host is reached, before and after a call.
They count headers too, and everything else that uses the interface meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.operations import ROOT, Buffers, Operation, SizeOf
from phalanx.doctor.probe import Listener, probe
from phalanx.errors import BackendError
from phalanx.system.interfaces import interface_addresses, outward_address
from phalanx.topology.topology import Node

_COUNTERS = Path("/proc/net/dev")  # of this process's network; /sys may be that of another one


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of tensors on one host's link; packets have headers besides.

    Attributes:
        sent: to other hosts.
        received: from other hosts.
    """

    sent: int
    received: int


def link_bytes(operation: str, nbytes: int, ranks: Sequence[int], root: int = 0) -> list[LinkBytes]:
    """Return the bytes that one call must move on the link of each host, by what the operation means.

    What a host has to learn or to tell cannot be less than this. Where hosts could share the work differently at the
    same cost, as in a broadcast to three hosts, of which one must pass the tensor on, one such way is stated.

    Args:
        operation: a name as in ``torch.distributed``; forms with one tensor for all ranks count as those with lists.
        nbytes: the size of the whole tensor of a rank in ``all_reduce``, ``reduce`` and ``broadcast``. Elsewhere it is
            that of one block: what one rank gives in ``all_gather`` and ``gather``, what it gets in ``scatter`` and
            ``reduce_scatter``, and what it gives to one other rank in ``all_to_all``.
        ranks: how many ranks each host has, in the order of the hosts.
        root: the number of the root's host.

    Returns:
        One entry for each host.

    Raises:
        ValueError: there is no such collective.
    """
    hosts, world = len(ranks), sum(ranks)
    everything = nbytes * world
    if hosts < 2:
        return [LinkBytes(0, 0)] * hosts
    name = operation.removesuffix("_single")
    if name == "barrier":
        return [LinkBytes(0, 0)] * hosts
    if name == "all_reduce":
        # Each host has an H-th of the sums: it learns the others' parts of it, and tells them the result.
        each = 2 * (hosts - 1) * nbytes // hosts
        return [LinkBytes(each, each)] * hosts
    if name == "reduce":
        if hosts == 2:
            return [LinkBytes(0, nbytes) if host == root else LinkBytes(nbytes, 0) for host in range(hosts)]
        # Sums are added in the order of the hosts, so the parts of all hosts have to come together somewhere. On the
        # root's host these would be H-1 times the tensor; so the other hosts add, and the root's host sends its part.
        return [LinkBytes(nbytes, nbytes)] * hosts
    if name == "broadcast":
        # Every host but the root's learns the tensor. The last one of the chain need not pass it on.
        last = (root - 1) % hosts
        return [LinkBytes(nbytes * (host != last), nbytes * (host != root)) for host in range(hosts)]
    if name == "all_gather":
        # A host learns all that it has not, and passes on, around a circle, all that the next host has not.
        after = [ranks[(host + 1) % hosts] for host in range(hosts)]
        return [
            LinkBytes(everything - nbytes * beyond, everything - nbytes * own)
            for own, beyond in zip(ranks, after, strict=True)
        ]
    if name == "reduce_scatter":
        # Each host's part of what a rank gets goes there by itself, since they are added in the order of the hosts.
        return [LinkBytes(everything - nbytes * own, (hosts - 1) * nbytes * own) for own in ranks]
    if name in ("gather", "scatter"):
        inner, outer = everything - nbytes * ranks[root], [nbytes * own for own in ranks]
        if name == "gather":
            return [LinkBytes(0, inner) if host == root else LinkBytes(outer[host], 0) for host in range(hosts)]
        return [LinkBytes(inner, 0) if host == root else LinkBytes(0, outer[host]) for host in range(hosts)]
    if name == "all_to_all":
        return [LinkBytes(*[nbytes * own * (world - own)] * 2) for own in ranks]
    raise ValueError(f"{operation!r} is not a collective whose bytes between hosts are known")


def busiest(links: Sequence[LinkBytes]) -> int:
    """Return the most that one link carries in one direction: no call takes less time than that at the link's rate."""
    return max((max(link.sent, link.received) for link in links), default=0)


def outward_interface(towards: Sequence[str] = ()) -> str:
    """Return the interface by which other hosts reach this one."""
    address = outward_address(towards)
    return next(name for name, addresses in interface_addresses().items() if address in addresses)


def stated_bytes(operation: Operation, buffers: Buffers, hosts: Sequence[Sequence[int]]) -> list[LinkBytes] | None:
    """Return what one call must move on the link of each host, which has these ranks; None where that is not known."""
    nbytes = {SizeOf.TENSOR: buffers.count, SizeOf.BLOCKS: buffers.block, SizeOf.NOTHING: 0}[operation.size_of]
    root = next(number for number, ranks in enumerate(hosts) if ROOT in ranks)
    try:
        return link_bytes(operation.name, nbytes * buffers.dtype.itemsize, [len(ranks) for ranks in hosts], root)
    except ValueError:  # messages between single ranks
        return None


class Links:
    """The links of a world that spans hosts, whose process group is torch's default one.

    Every rank makes it, and calls its methods together with the others.
    """

    def __init__(self, rank: int, nodes: Sequence[Node]) -> None:
        self.hosts = [node.ranks for node in nodes]
        self._rank = rank
        towards = [node.host for node in nodes]
        self._address, self._interface = outward_address(towards), outward_interface(towards)

    def measure_rate(self) -> float:
        """Return how many bytes of data a second one TCP connection moves from the second host to the first."""
        first, second = self.hosts[0][0], self.hosts[1][0]
        listener = Listener() if self._rank == first else None
        place: list[Any] = [(self._address, listener.port, listener.token) if listener else None]
        dist.broadcast_object_list(place, src=first)
        rate = torch.zeros(1, dtype=torch.float64)
        if self._rank == second:
            reach = probe(*place[0])
            if not reach.bytes_per_s:
                raise BackendError(f"the rate of the link cannot be measured: {reach.error}; give it with --link-rate")
            rate[0] = reach.bytes_per_s
        dist.broadcast(rate, src=second)
        if listener:
            listener.close()
        return float(rate.item())

    def count(self, call: Callable[[], object]) -> list[list[int]]:
        """Return what one call moves on each host's link, as ``[sent, received]``, without what it takes to count."""
        # What is sent again, or by others, only adds to a count: the least of several is the call's.
        idle, busy = (torch.stack([self._counted(each) for _ in range(3)]).amin(0) for each in (lambda: None, call))
        counts: list[list[int]] = (busy - idle).clamp(min=0).tolist()
        return counts

    def _counted(self, call: Callable[[], object]) -> torch.Tensor:
        """Return the bytes sent and received by each host during one call."""
        counts = torch.zeros(len(self.hosts), 2, dtype=torch.int64)
        dist.barrier()
        before = self._read()
        dist.barrier()
        call()
        dist.barrier()
        after = self._read()
        dist.barrier()
        for number, ranks in enumerate(self.hosts):
            if self._rank == ranks[0]:
                counts[number] = after - before
        dist.all_reduce(counts)
        return counts

    def _read(self) -> torch.Tensor:
        lines = (line.partition(":") for line in _COUNTERS.read_text().splitlines())
        figures = next(figures.split() for name, _, figures in lines if name.strip() == self._interface)
        return torch.tensor([int(figures[8]), int(figures[0])])
