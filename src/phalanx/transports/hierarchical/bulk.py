"""Copies of large tensors over several hosts, each byte of which crosses a link as seldom as it can.

Costs are for H hosts and S bytes, as bytes that leave, or arrive at, one host (``bounds.py`` says why they cannot be
less).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.early_receives import EarlyReceives, wait_for
from phalanx.transports.hierarchical.lane import Engine, Transfer
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.sizes import in_chunks

__all__ = ["Bulk"]

Agree = Callable[[], None]
_TAG = 1


class Bulk:
    """The large copies of one group; every rank of it calls the same method.

    Every method calls ``agree``, which compares the calls, before it sends anything.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hierarchical.communicator.HierarchicalCommunicator`.
        early: begins receives; the group's reductions use it as well.
        chunk_bytes: how much of a tensor is moved at once.
    """

    def __init__(
        self, layout: Layout, local: Communicator, engine: Engine, early: EarlyReceives, chunk_bytes: int
    ) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._early = early
        self._chunk_bytes = chunk_bytes

    def broadcast(self, flat: torch.Tensor, root: int, agree: Agree) -> None:
        """Along a chain of hosts, from the root's on: S arrive at each, and leave it once, but for the last."""
        layout = self._layout
        first, place = layout.place(root)
        count = len(layout.hosts)
        turn = (layout.host - first) % count
        before = layout.hosts[(layout.host - 1) % count]
        after = layout.hosts[(layout.host + 1) % count]
        mine = place if turn == 0 else min(place, len(layout.here) - 1)
        carries = layout.local == mine
        source = before[place if turn == 1 else min(place, len(before) - 1)] if carries and turn else None
        target = after[min(place, len(after) - 1)] if carries and turn + 1 < count else None
        chunks = self._chunks(flat)

        def expect() -> list[Transfer]:
            return [] if source is None else [self._engine.recv(chunk, source, _TAG) for chunk in chunks]

        coming = self._early.begin([peer for peer in (source, target) if peer is not None], agree, expect)
        sent: list[Transfer] = []
        for number, chunk in enumerate(chunks):
            if coming:
                coming[number].wait()
            if target is not None:
                sent.append(self._engine.send(chunk, target, _TAG))
            self._local.broadcast(chunk, mine)
        wait_for(sent)

    def all_gather(self, outputs: Sequence[torch.Tensor], flat: torch.Tensor, agree: Agree) -> None:
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

        def expect() -> dict[tuple[int, int], Transfer]:
            return {
                (rank, turn): self._engine.recv(chunks[rank][turn], source[place % len(source)], _TAG)
                for number in coming
                for turn in range(len(chunks[0]))
                for place, rank in carried[number]
            }

        peers = {source[place % len(source)] for blocks in carried.values() for place, _ in blocks}
        peers |= {target[place % len(target)] for number in coming[:-1] for place, _ in carried[number]}
        peers.add(target[layout.local % len(target)])
        arriving = self._early.begin(peers, agree, expect)
        sent = [self._engine.send(chunk, target[layout.local % len(target)], _TAG) for chunk in self._chunks(flat)]
        self._local.all_gather([outputs[rank] for rank in layout.here], flat)
        for number in coming:
            for turn in range(len(chunks[0])):
                for place, rank in carried[number]:
                    arriving[rank, turn].wait()
                    if number != after:
                        sent.append(self._engine.send(chunks[rank][turn], target[place % len(target)], _TAG))
                self._spread([chunks[rank][turn] for rank in layout.hosts[number]])
        wait_for(sent)

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

    def gather(self, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int, agree: Agree) -> None:
        """The ranks of other hosts send to the root: no byte is copied on its way."""
        layout = self._layout
        host, place = layout.place(root)
        if layout.host != host:
            self._early.begin([root], agree, list)
            self._engine.send(flat, root, _TAG).wait()
            return

        def expect() -> list[Transfer]:
            return [self._engine.recv(outputs[rank], rank, _TAG) for rank in self._others()] if outputs else []

        def gather_here() -> None:
            self._local.gather([outputs[rank] for rank in layout.here] if outputs else None, flat, place)

        wait_for(self._early.begin(self._others() if outputs else (), agree, expect), gather_here)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, agree: Agree) -> None:
        """The root sends to each rank of other hosts: no byte is copied on its way."""
        layout = self._layout
        host, place = layout.place(root)
        if layout.host != host:
            self._early.begin([root], agree, lambda: self._engine.recv(output, root, _TAG)).wait()
            return

        def scatter_here() -> None:
            self._local.scatter(output, [inputs[rank] for rank in layout.here] if inputs else None, place)

        self._early.begin(self._others() if inputs else (), agree, list)
        transfers = [self._engine.send(inputs[rank], rank, _TAG) for rank in self._others()] if inputs else []
        wait_for(transfers, scatter_here)

    def _others(self) -> list[int]:
        """The ranks of other hosts."""
        layout = self._layout
        return [rank for number, ranks in enumerate(layout.hosts) if number != layout.host for rank in ranks]

    def _chunks(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return in_chunks(flat, self._chunk_bytes)
