"""Reductions of large tensors over several hosts, in chunks, so that wire and memory work at the same time.

Inside a host each lane gets the host's sums of one slice of a chunk. Between hosts, some hosts combine a part of that
slice each, always in the order of the hosts, and send the result to those that need it. Costs are for H hosts and S
bytes, as bytes that leave, or arrive at, one host (``bounds.py`` says why they cannot be less).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.combining import combine
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.layout import Layout
from phalanx.transports.hosts.scratch import Scratch

__all__ = ["Reducing"]

_TAG = 1
_UNDER_WAY = 3  # chunks, each a step further than the next one


class Reducing:
    """The large reductions of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
        chunk_bytes: how much of a tensor is moved at once.
    """

    def __init__(self, layout: Layout, local: Communicator, engine: Engine, chunk_bytes: int) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._chunk_bytes = chunk_bytes
        self._scratch = Scratch()

    def all_reduce(self, flat: torch.Tensor, op: int) -> None:
        """2 (H-1)/H S each way; with two hosts, which exchange their slices whole, that is S."""
        self._slices(flat, op, None)

    def reduce(self, flat: torch.Tensor, root: int, op: int) -> None:
        """Two hosts: S to the root's. More: S each way, because the other hosts combine. Only the root's changes."""
        self._slices(flat, op, root)

    def _slices(self, flat: torch.Tensor, op: int, root: int | None) -> None:
        pieces = flat.split(max(1, self._chunk_bytes // flat.itemsize))
        work = [
            _Slices(self._layout, self._local, self._engine, self._scratch, piece, op, root, number % _UNDER_WAY)
            for number, piece in enumerate(pieces)
        ]
        for turn in range(len(work) + _UNDER_WAY - 1):
            if turn < len(work):
                work[turn].inside()
            if 0 <= turn - 1 < len(work):
                work[turn - 1].between()
            if 0 <= turn - 2 < len(work):
                work[turn - 2].spread()

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """Combine inside what each rank of each host is to get, then between the hosts.

        All inputs but those of a host's own ranks leave it, once.
        """
        each = max(1, self._chunk_bytes // len(self._layout.here) // output.itemsize)
        under_way: list[tuple[torch.Tensor, list[torch.Tensor], list[Transfer]]] = []
        for number, begin in enumerate(range(0, output.numel(), each)):
            chunks = [part[begin : begin + each] for part in inputs]
            parts, transfers = self._exchanged(chunks, op, number % 2)
            under_way.append((output[begin : begin + each], parts, transfers))
            if number:
                _finish(*under_way.pop(0), op)
        for chunk in under_way:
            _finish(*chunk, op)

    def _exchanged(
        self, chunks: Sequence[torch.Tensor], op: int, slot: int
    ) -> tuple[list[torch.Tensor], list[Transfer]]:
        """Start to exchange the hosts' parts of one chunk; the memory for those of this rank, in the hosts' order."""
        layout, like = self._layout, chunks[0]
        parts: list[torch.Tensor] = []
        transfers: list[Transfer] = []
        for number, members in enumerate(layout.hosts):
            partials = self._partials(number, members, chunks, op, slot)
            if number == layout.host:
                parts.append(partials[layout.here[layout.local]])
                continue
            parts.append(self._scratch.take(("from", slot, number), like))
            transfers.append(self._engine.recv(parts[-1], members[layout.local % len(members)], _TAG))
            for rank, partial in partials.items():
                transfers.append(self._engine.send(partial, rank, _TAG))
        return parts, transfers

    def _partials(
        self, number: int, members: Sequence[int], chunks: Sequence[torch.Tensor], op: int, slot: int
    ) -> dict[int, torch.Tensor]:
        """This host's sums of what some ranks of one host get: those to which this rank brings them."""
        layout = self._layout
        ranks = len(layout.here)
        if len(members) == ranks:
            rank = members[layout.local]
            partial = self._scratch.take(("of", slot, rank), chunks[rank])
            self._local.reduce_scatter(partial, [chunks[member] for member in members], op)
            return {rank: partial}
        found = {}
        for place, rank in enumerate(members):
            bringer = place % ranks
            chunk = chunks[rank]
            if bringer == layout.local:
                chunk = found[rank] = self._scratch.take(("of", slot, rank), chunk)
                chunk.copy_(chunks[rank])
            self._local.reduce(chunk, bringer, op)
        return found


def _finish(output: torch.Tensor, parts: Sequence[torch.Tensor], transfers: Sequence[Transfer], op: int) -> None:
    for transfer in transfers:
        transfer.wait()
    combine(output, parts, op)


class _Slices:
    """One chunk of an all_reduce or reduce on its way through the three steps.

    Args:
        layout, local, engine, scratch: the group's.
        chunk: of this rank's tensor. A reduce changes the root's alone.
        op: the number of the operation.
        root: the root of a reduce; None in an all_reduce.
        slot: a number that no other chunk under way has.
    """

    def __init__(
        self,
        layout: Layout,
        local: Communicator,
        engine: Engine,
        scratch: Scratch,
        chunk: torch.Tensor,
        op: int,
        root: int | None,
        slot: int,
    ) -> None:
        self._layout, self._local, self._engine = layout, local, engine
        self._scratch, self._op, self._slot = scratch, op, slot
        each = -(-chunk.numel() // layout.lanes)
        self._slices = [chunk[at * each : (at + 1) * each] for at in range(layout.lanes)]
        self._equal = self._slices[-1].numel() == each and layout.lanes == len(layout.here)
        self._root_host: int | None = None
        self._root_place = 0
        if root is not None:
            self._root_host, self._root_place = layout.place(root)
        self._coming: list[Transfer] = []
        self._sent: list[Transfer] = []
        self._own = self._slices[layout.local] if layout.local < layout.lanes else None
        # The ranks beside a reduce's root must not put the sums into their own tensors.
        self._sums = self._own if root is None or self._own is None else scratch.take(("sums", slot), self._own)
        self._parts: list[torch.Tensor] = []

    def inside(self) -> None:
        """Combine the slices inside this host, and start to send each part of this lane's to the host that adds it."""
        layout = self._layout
        partial = None if self._own is None else self._scratch.take(("partial", self._slot), self._own)
        if self._equal and partial is not None:
            self._local.reduce_scatter(partial, self._slices, self._op)
        else:
            for place, piece in enumerate(self._slices):
                if place == layout.local and partial is not None:
                    piece = partial.copy_(piece)
                self._local.reduce(piece, place, self._op)
        if partial is None:
            return
        shares = self._shares(partial)
        for number, rank in self._lane():
            if shares[layout.host].numel():
                part = self._scratch.take(("part", self._slot, number), shares[layout.host])
                self._coming.append(self._engine.recv(part, rank, _TAG))
            else:
                part = shares[layout.host]
            self._parts.append(part)
            if shares[number].numel():
                self._sent.append(self._engine.send(shares[number], rank, _TAG))
        self._parts.insert(layout.host, shares[layout.host])

    def between(self) -> None:
        """Combine what has come, and start to send the sums to the hosts that need them and have not added them."""
        self._await()
        if self._sums is None:
            return
        shares = self._shares(self._sums)
        own = shares[self._layout.host]
        if own.numel():
            combine(own, self._parts, self._op)
        if self._root_host is None and len(self._layout.hosts) == 2:
            return  # both have added everything
        for number, rank in self._lane():
            if shares[number].numel() and self._root_host in (None, self._layout.host):
                self._coming.append(self._engine.recv(shares[number], rank, _TAG))
            if own.numel() and self._root_host in (None, number):
                self._sent.append(self._engine.send(own, rank, _TAG))

    def spread(self) -> None:
        """Give the sums to all ranks of this host, or to the root if it is here."""
        self._await()
        layout = self._layout
        if self._root_host is not None:
            if self._root_host == layout.host:
                self._give_to_root()
        elif self._equal:
            self._local.all_gather(self._slices, self._slices[layout.local])
        else:
            for place, piece in enumerate(self._slices):
                self._local.broadcast(piece, place)

    def _give_to_root(self) -> None:
        here, place = self._layout.here, self._root_place
        root = self._layout.local == place
        if self._equal and self._sums is not None:
            self._local.gather(self._slices if root else None, self._sums, place)
            return
        none = self._slices[0][:0]
        outputs = [*self._slices, *[none] * (len(here) - len(self._slices))] if root else [none] * len(here)
        inputs = [none] * len(here)
        if self._sums is not None:
            inputs[place] = self._sums
        self._local.all_to_all(outputs, inputs)

    def _await(self) -> None:
        for transfer in (*self._coming, *self._sent):
            transfer.wait()
        self._coming, self._sent = [], []

    def _shares(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The part of this lane's slice that each host adds."""
        hosts, root = len(self._layout.hosts), self._root_host
        if hosts == 2:
            return [whole if root in (None, number) else whole[:0] for number in range(hosts)]
        adding = [number for number in range(hosts) if number != root]
        each = -(-whole.numel() // len(adding))
        shares = [whole[:0]] * hosts
        for turn, number in enumerate(adding):
            shares[number] = whole[turn * each : (turn + 1) * each]
        return shares

    def _lane(self) -> Iterator[tuple[int, int]]:
        """The other ranks of this lane, with their hosts' numbers."""
        for number, rank in enumerate(self._layout.lane):
            if number != self._layout.host:
                yield number, rank
