"""The links between the hosts of a world: how quick one is, what crosses each of them in a call, and what has to.

The rate is that of one plain TCP connection between the first two hosts, in bytes of data, so the headers of packets
are taken off already. What crosses is read from the kernel's counters of the interface by which a host is reached,
before and after a call. They count headers too, and everything else that uses the interface meanwhile. What the kernel
sends again, because an acknowledgement was late or a packet was lost, is not the call's: such a call is counted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.operations import ROOT, Buffers, Operation, SizeOf
from phalanx.doctor.probe import Listener, probe
from phalanx.errors import BackendError
from phalanx.system.interfaces import interface_addresses, outward_address
from phalanx.topology.topology import Node
from phalanx.transports.hosts.bounds import LinkBytes, link_bytes

__all__ = ["Links", "outward_interface", "stated_bytes"]

_COUNTERS = Path("/proc/net/dev")  # of this process's network; /sys may be that of another one
_TCP_COUNTERS = Path("/proc/net/snmp")
_MOST_COUNTS = 5


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
    """The links of a world that spans hosts. Every rank makes it, and calls its methods together with the others.

    Args:
        rank: this process's rank in the world, whose process group is torch's default one.
        nodes: the hosts.
    """

    def __init__(self, rank: int, nodes: Sequence[Node]) -> None:
        self.hosts = [node.ranks for node in nodes]
        self._rank = rank
        self._host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        towards = [node.host for node in nodes]
        self._address, self._interface = outward_address(towards), outward_interface(towards)

    def measure_rate(self) -> float:
        """Return how many bytes a second one TCP connection moves from the second host to the first, while alone."""
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
        idle, busy = self._counted(lambda: None), self._counted(call)
        return [[max(0, b - i) for b, i in zip(*pair, strict=True)] for pair in zip(busy, idle, strict=True)]

    def _counted(self, call: Callable[[], object]) -> list[list[int]]:
        counts: list[list[int]] = []
        for _ in range(_MOST_COUNTS):
            counts = self._counted_once(call)
            if not any(resent for _, _, resent in counts):
                break
        return [[sent, received] for sent, received, _ in counts]

    def _counted_once(self, call: Callable[[], object]) -> list[list[int]]:
        """Return, for each host, the bytes sent and received in one call, and the segments sent again."""
        counts = torch.zeros(len(self.hosts), 3, dtype=torch.int64)
        dist.barrier()
        before = self._read()
        dist.barrier()
        call()
        dist.barrier()
        after = self._read()
        dist.barrier()
        if self._rank == self.hosts[self._host][0]:
            counts[self._host] = after - before
        dist.all_reduce(counts)
        result: list[list[int]] = counts.tolist()
        return result

    def _read(self) -> torch.Tensor:
        lines = (line.partition(":") for line in _COUNTERS.read_text().splitlines())
        figures = next(figures.split() for name, _, figures in lines if name.strip() == self._interface)
        names, values = (line.split() for line in _TCP_COUNTERS.read_text().splitlines() if line.startswith("Tcp:"))
        return torch.tensor([int(figures[8]), int(figures[0]), int(values[names.index("RetransSegs")])])
