"""The links between the hosts of a world: how quick one is, what crosses each of them in a call, and what has to.

The rate is that of one plain TCP connection between the first two hosts, in bytes of data, so the headers of packets
are taken off already. What crosses is read from the kernel's counters of the interface by which a host is reached,
before and after a call. They count headers too, and everything else that uses the interface meanwhile. What the kernel
sends again, because an acknowledgement was late or a packet was lost, is not the call's: a call during which that
happened is counted once more.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.buffers import Buffers
from phalanx.bench.operations import ROOT, Operation, SizeOf
from phalanx.errors import BackendError
from phalanx.system.interfaces import interface_addresses, outward_address
from phalanx.topology.topology import Node
from phalanx.transports.hosts.bounds import LinkBytes, link_bytes

__all__ = ["Links", "outward_interface", "stated_bytes"]

RATE_S = 1.0  # how long the rate is measured
_PIECE = 1 << 20
_SKIPPED_BYTES = 4 * _PIECE  # until the connection has found its speed
_PATIENCE_S = 30.0
_TOKEN_S = 1.0  # the other rank sends its token as soon as it is connected
_TOKEN_BYTES = 16
_COUNTERS = Path("/proc/net/dev")  # of this process's network; /sys may be that of another one
_TCP_COUNTERS = Path("/proc/net/snmp")
_MOST_COUNTS = 5  # where the kernel sends something again in each, the one counts in which it did so least


def outward_interface(towards: Sequence[str] = ()) -> str:
    """The interface by which other hosts reach this one; see :func:`~phalanx.system.interfaces.outward_address`."""
    address = outward_address(towards)
    return next(name for name, addresses in interface_addresses().items() if address in addresses)


def stated_bytes(operation: Operation, buffers: Buffers, hosts: Sequence[Sequence[int]]) -> list[LinkBytes] | None:
    """What one call must move on the link of each host; None where that is not known.

    Args:
        operation: what is called; rank 0 is its root.
        buffers: its buffers, on any rank.
        hosts: the ranks of each host.
    """
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

    Attributes:
        hosts: the ranks of each host.
        interface: the one by which other hosts reach this one.
    """

    def __init__(self, rank: int, nodes: Sequence[Node]) -> None:
        self.hosts = [node.ranks for node in nodes]
        self._rank = rank
        self._host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        self._address = outward_address([node.host for node in nodes])
        self.interface = outward_interface([node.host for node in nodes])

    def measure_rate(self) -> float:
        """How many bytes a second one TCP connection moves from the second host to the first, while it is alone."""
        first, second = self.hosts[0][0], self.hosts[1][0]
        rate = torch.zeros(1, dtype=torch.float64)
        if self._rank == first:
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            with socket.create_server((self._address, 0), family=family) as server:
                server.settimeout(_PATIENCE_S)
                token = secrets.token_bytes(_TOKEN_BYTES)
                dist.broadcast_object_list([(server.getsockname()[:2], token)], src=first)
                rate[0] = _receive(server, token)
        else:
            given: list[Any] = [None]
            dist.broadcast_object_list(given, src=first)
            if self._rank == second:
                _send(*given[0])
        dist.broadcast(rate, src=first)
        return float(rate.item())

    def count(self, call: Callable[[], object]) -> list[list[int]]:
        """What one call moves on the link of each host, as ``[sent, received]``, without what it takes to count."""
        idle, busy = self._counted(lambda: None), self._counted(call)
        return [[max(0, b - i) for b, i in zip(*pair, strict=True)] for pair in zip(busy, idle, strict=True)]

    def _counted(self, call: Callable[[], object]) -> list[list[int]]:
        counts: list[list[int]] = []
        fewest = None
        for _ in range(_MOST_COUNTS):
            seen = self._counted_once(call)
            resent = sum(segments for _, _, segments in seen)
            if fewest is None or resent < fewest:
                counts, fewest = [[sent, received] for sent, received, _ in seen], resent
            if not fewest:
                break
        return counts

    def _counted_once(self, call: Callable[[], object]) -> list[list[int]]:
        """For each host, the bytes sent and received in one call, and the segments that its kernel sent again."""
        counts = torch.zeros(len(self.hosts), 3, dtype=torch.int64)
        dist.barrier()
        before = self._read()
        dist.barrier()
        call()
        dist.barrier()
        after = self._read()
        dist.barrier()
        if self._rank == self.hosts[self._host][0]:
            counts[self._host] = torch.tensor([a - b for a, b in zip(after, before, strict=True)])
        dist.all_reduce(counts)
        result: list[list[int]] = counts.tolist()
        return result

    def _read(self) -> tuple[int, int, int]:
        for line in _COUNTERS.read_text().splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == self.interface:
                words = figures.split()
                return int(words[8]), int(words[0]), _segments_sent_again()
        raise BackendError(f"{_COUNTERS} no longer has the interface {self.interface}: was it taken down?")


def _segments_sent_again() -> int:
    names, values = (line.split() for line in _TCP_COUNTERS.read_text().splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def _receive(server: socket.socket, token: bytes) -> float:
    while True:
        connection, _ = server.accept()
        with connection:
            if not _brings(connection, token):
                continue
            connection.settimeout(_PATIENCE_S)
            memory = bytearray(_PIECE)
            received, counted, since = 0, 0, 0.0
            while got := connection.recv_into(memory):
                received += got
                if since:
                    counted += got
                elif received >= _SKIPPED_BYTES:
                    since = time.perf_counter()
            return counted / (time.perf_counter() - since)


def _brings(connection: socket.socket, token: bytes) -> bool:
    """Whether it is the other rank's; somebody else may have found the port, and say anything, or nothing."""
    until = time.monotonic() + _TOKEN_S
    brought = b""
    try:
        while len(brought) < len(token):
            connection.settimeout(max(1e-3, until - time.monotonic()))
            more = connection.recv(len(token) - len(brought))
            if not more:
                return False
            brought += more
    except OSError:  # it was reset, or the time is over
        return False
    return secrets.compare_digest(brought, token)


def _send(address: tuple[str, int], token: bytes) -> None:
    with socket.create_connection(address, _PATIENCE_S) as connection:
        connection.sendall(token)
        piece, began, sent = bytes(_PIECE), time.perf_counter(), 0
        while time.perf_counter() - began < RATE_S or sent < 2 * _SKIPPED_BYTES:
            connection.sendall(piece)
            sent += _PIECE
