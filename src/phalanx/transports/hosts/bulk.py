"""Copies of large tensors over several hosts, each byte of which crosses a link as seldom as it can.

Costs are for H hosts and S bytes, as bytes that leave, or arrive at, one host (``bounds.py`` says why they cannot be
less).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.layout import Layout

__all__ = ["Bulk"]

_TAG, _FIRST_TAG = 1, 2


class Bulk:
    """The large copies of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
        chunk_bytes: how much of a tensor is moved at once.
    """

    def __init__(self, layout: Layout, local: Communicator, engine: Engine, chunk_bytes: int) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._chunk_bytes = chunk_bytes
        self._connected: set[int] = set()

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Along a chain of hosts, from the root's on: S arrive at each, and leave it once, but for the last."""
        layout = self._layout
        first, place = layout.place(root)
        count = len(layout.hosts)
        turn = (layout.host - first) % count
        before = layout.hosts[(layout.host - 1) % count]
        after = layout.hosts[(layout.host + 1) % count]
        mine = place if turn == 0 else min(place, len(layout.here) - 1)
        carries = layout.local == mine
        chunks = self._chunks(flat)
        coming: list[Transfer] = []
        sent: list[Transfer] = []
        if carries and turn:
            source = before[place] if turn == 1 else before[min(place, len(before) - 1)]
            coming = [self._engine.recv(chunk, source, _TAG) for chunk in chunks]
        for number, chunk in enumerate(chunks):
            if coming:
                coming[number].wait()
            if carries and turn + 1 < count:
                sent.append(self._engine.send(chunk, after[min(place, len(after) - 1)], _TAG))
            self._local.broadcast(chunk, mine)
        _wait(sent)

    def all_gather(self, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Around a circle of hosts: each passes on what the next one has not, and spreads what has come, in chunks.

        A block is carried, on each host, by one of its ranks, so all of them work. With unequal hosts this is less than
        if each host sent to all others: no link carries more than all blocks but those of the smallest host.
        """
        layout = self._layout
        count = len(layout.hosts)
        after, before = ((layout.host + step) % count for step in (1, -1))
        target, source = layout.hosts[after], layout.hosts[before]
        # In the order in which they come: the host before sends its own first, then those that it was sent.
        coming = [(layout.host - turn) % count for turn in range(1, count)]
        chunks = [self._chunks(output) for output in outputs]
        carried = {
            number: [(place, rank) for place, rank in enumerate(layout.hosts[number]) if self._carries(place)]
            for number in coming
        }
        self._connect(
            {source[place % len(source)] for blocks in carried.values() for place, _ in blocks}
            | {target[layout.local % len(target)]}
            | {target[place % len(target)] for number in coming[:-1] for place, _ in carried[number]}
        )
        arriving = {
            (rank, turn): self._engine.recv(chunks[rank][turn], source[place % len(source)], _TAG)
            for number in coming
            for turn in range(len(chunks[0]))
            for place, rank in carried[number]
        }
        sent = [self._engine.send(chunk, target[layout.local % len(target)], _TAG) for chunk in self._chunks(flat)]
        self._local.all_gather([outputs[rank] for rank in layout.here], flat)
        for number in coming:
            for turn in range(len(chunks[0])):
                for place, rank in carried[number]:
                    arriving[rank, turn].wait()
                    if number != after:
                        sent.append(self._engine.send(chunks[rank][turn], target[place % len(target)], _TAG))
                self._spread([chunks[rank][turn] for rank in layout.hosts[number]])
        _wait(sent)

    def _carries(self, place: int) -> bool:
        """Whether this rank carries the blocks of the ranks at a place of other hosts."""
        return place % len(self._layout.here) == self._layout.local

    def _spread(self, parts: Sequence[torch.Tensor]) -> None:
        """Give all ranks of this host parts of which rank ``i % ranks`` has part i."""
        ranks = len(self._layout.here)
        for begin in range(0, len(parts), ranks):
            some = parts[begin : begin + ranks]
            if len(some) == ranks:
                self._local.all_gather(some, some[self._layout.local])
            else:
                for place, part in enumerate(some):
                    self._local.broadcast(part, place)

    def gather(self, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int) -> None:
        """The ranks of other hosts send to the root: no byte is copied on its way."""
        layout = self._layout
        host, place = layout.place(root)
        if layout.host != host:
            self._engine.send(flat, root, _TAG).wait()
            return
        transfers = []
        if outputs is not None:
            transfers = [self._engine.recv(outputs[rank], rank, _TAG) for _, rank in self._others()]
        self._local.gather(None if outputs is None else [outputs[rank] for rank in layout.here], flat, place)
        _wait(transfers)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """The root sends to each rank of other hosts: no byte is copied on its way."""
        layout = self._layout
        host, place = layout.place(root)
        if layout.host != host:
            self._engine.recv(output, root, _TAG).wait()
            return
        transfers = []
        if inputs is not None:
            transfers = [self._engine.send(inputs[rank], rank, _TAG) for _, rank in self._others()]
        self._local.scatter(output, None if inputs is None else [inputs[rank] for rank in layout.here], place)
        _wait(transfers)

    def _others(self) -> Iterator[tuple[int, int]]:
        """The ranks of other hosts, with the numbers of those, in an order that is the same for all ranks."""
        for number, members in enumerate(self._layout.hosts):
            if number != self._layout.host:
                for rank in members:
                    yield number, rank

    def _chunks(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        chunks: Sequence[torch.Tensor] = flat.split(max(1, self._chunk_bytes // flat.itemsize))
        return chunks

    def _connect(self, peers: set[int]) -> None:
        """Connect to ranks that connect to this one, in the order of their ranks, so that no circle of them waits."""
        byte = torch.zeros(1, dtype=torch.uint8)
        transfers = []
        for peer in sorted(peers - self._connected):
            transfers.append(self._engine.recv(torch.empty_like(byte), peer, _FIRST_TAG))
            transfers.append(self._engine.send(byte, peer, _FIRST_TAG))
        _wait(transfers)
        self._connected |= peers


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
