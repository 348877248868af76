"""Collectives of large tensors over several hosts, each byte of which crosses a link once.

Costs are for H hosts and S bytes, as bytes that leave, or arrive at, one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.breaking import Differs
from phalanx.transports.hosts.combining import combine
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.layout import Layout

__all__ = ["Bulk"]

# Of a tensor that is moved in pieces, so that wire and memory work at the same time.
CHUNK_BYTES = 4 << 20
_TAG = 1


class Bulk:
    """The large collectives of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
    """

    def __init__(self, layout: Layout, local: Communicator, engine: Engine) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine

    # -- reductions --------------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, op: int) -> None:
        """Each lane owns a slice of each chunk: combine it inside, then between the hosts, then spread it inside.

        2 (H-1)/H S bytes each way; S with two hosts, which exchange their slices whole.
        """
        pieces = flat.split(max(1, CHUNK_BYTES // flat.itemsize))
        work = [_Slices(self, piece, op) for piece in pieces]
        last = len(work) + 2
        for turn in range(last):  # three chunks are under way, each a step further than the next one
            if turn < len(work):
                work[turn].inside()
            if 0 <= turn - 1 < len(work):
                work[turn - 1].between()
            if 0 <= turn - 2 < len(work):
                work[turn - 2].spread()

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """Combine inside what each rank of each host is to get, then between the hosts. (H-1)/H of all inputs leave."""
        layout = self._layout
        partial = {rank: self._reduced_for(rank, inputs, op) for members in layout.hosts for rank in members}
        received: dict[int, torch.Tensor] = {}
        transfers: list[Transfer] = []
        for number, rank in self._others():
            members = layout.hosts[number]
            if rank == members[layout.local % len(members)]:
                received[number] = torch.empty_like(output)
                transfers.append(self._engine.recv(received[number], rank, _TAG))
            if (mine := partial[rank]) is not None:
                transfers.append(self._engine.send(mine, rank, _TAG))
        own = partial[layout.here[layout.local]]
        assert own is not None
        received[layout.host] = own
        for transfer in transfers:
            transfer.wait()
        combine(output, [received[number] for number in range(len(layout.hosts))], op)

    def _reduced_for(self, rank: int, inputs: Sequence[torch.Tensor], op: int) -> torch.Tensor | None:
        """This host's part of what a rank gets, on the rank of this host that brings it there."""
        layout = self._layout
        _, place = layout.place(rank)
        bringer = place % len(layout.here)
        partial = inputs[rank].clone()
        self._local.reduce(partial, bringer, op)
        if bringer != layout.local:
            return None
        return partial

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Along a chain of hosts, from the root's on, in chunks: S bytes arrive at each host, and leave it once."""
        layout = self._layout
        first, place = layout.place(root)
        count = len(layout.hosts)
        turn = (layout.host - first) % count
        before = layout.hosts[(layout.host - 1) % count]
        after = layout.hosts[(layout.host + 1) % count]
        mine = place if turn == 0 else min(place, len(layout.here) - 1)
        carries = layout.local == mine
        chunks = flat.split(max(1, CHUNK_BYTES // flat.itemsize))
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
        for transfer in sent:
            transfer.wait()

    def all_gather(self, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Each rank's tensor goes once to every other host, and is spread there."""
        layout = self._layout
        transfers: list[Transfer] = []
        for number, rank in self._others():
            if layout.place(rank)[1] % len(layout.here) == layout.local:
                transfers.append(self._engine.recv(outputs[rank], rank, _TAG))
            if rank == layout.hosts[number][layout.local % len(layout.hosts[number])]:
                transfers.append(self._engine.send(flat, rank, _TAG))
        self._local.all_gather([outputs[rank] for rank in layout.here], flat)
        for transfer in transfers:
            transfer.wait()
        for number, members in enumerate(layout.hosts):
            if number != layout.host:
                self._spread([outputs[rank] for rank in members])

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
        """Each host brings its tensors together, and sends them to the root in one piece."""
        layout = self._layout
        host, place = layout.place(root)
        speaker = place if layout.host == host else min(place, len(layout.here) - 1)
        if layout.host == host:
            transfers, parts = [], {}
            if outputs is not None:
                for number, members in enumerate(layout.hosts):
                    if number != host:
                        parts[number] = flat.new_empty((len(members), flat.numel()))
                        source = members[min(place, len(members) - 1)]
                        transfers.append(self._engine.recv(parts[number].view(-1), source, _TAG))
            self._local.gather(None if outputs is None else [outputs[rank] for rank in layout.here], flat, place)
            for transfer in transfers:
                transfer.wait()
            for number, part in parts.items():
                for rank, row in zip(layout.hosts[number], part, strict=True):
                    outputs[rank].copy_(row)  # type: ignore[index]
            return
        together = flat.new_empty((len(layout.here), flat.numel()))
        self._local.gather(list(together) if layout.local == speaker else None, flat, speaker)
        if layout.local == speaker:
            self._engine.send(together.view(-1), root, _TAG).wait()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        """The root sends each host its parts in one piece, and they are spread there."""
        layout = self._layout
        host, place = layout.place(root)
        if layout.host == host:
            transfers = []
            if inputs is not None:
                for number, members in enumerate(layout.hosts):
                    if number != host:
                        together = torch.cat([inputs[rank] for rank in members])
                        target = members[min(place, len(members) - 1)]
                        transfers.append(self._engine.send(together, target, _TAG))
            self._local.scatter(output, None if inputs is None else [inputs[rank] for rank in layout.here], place)
            for transfer in transfers:
                transfer.wait()
            return
        speaker = min(place, len(layout.here) - 1)
        parts = None
        if layout.local == speaker:
            together = output.new_empty((len(layout.here), output.numel()))
            self._engine.recv(together.view(-1), root, _TAG).wait()
            parts = list(together)
        self._local.scatter(output, parts, speaker)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Each rank sends each rank of other hosts its own part: only what belongs elsewhere leaves a host."""
        here = self._layout.here
        others = [rank for _, rank in self._others()]
        self._compare_sizes(others, outputs, inputs)
        transfers = []
        for rank in others:
            if outputs[rank].numel():
                transfers.append(self._engine.recv(outputs[rank], rank, _TAG))
            if inputs[rank].numel():
                transfers.append(self._engine.send(inputs[rank], rank, _TAG))
        self._local.all_to_all([outputs[rank] for rank in here], [inputs[rank] for rank in here])
        for transfer in transfers:
            transfer.wait()

    def _compare_sizes(
        self, others: Sequence[int], outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Tell each rank of another host how much it will get, which only it and this one know."""
        sizes = torch.tensor([tensor.nbytes for tensor in inputs])
        told = torch.empty_like(sizes)
        transfers = []
        for rank in others:
            transfers.append(self._engine.recv(told[rank : rank + 1], rank, _TAG))
            transfers.append(self._engine.send(sizes[rank : rank + 1], rank, _TAG))
        for transfer in transfers:
            transfer.wait()
        for rank in others:
            if told[rank] != outputs[rank].nbytes:
                raise Differs

    def _others(self) -> Iterator[tuple[int, int]]:
        """The ranks of other hosts, with the numbers of those, in an order that is the same for all ranks."""
        for number, members in enumerate(self._layout.hosts):
            if number != self._layout.host:
                for rank in members:
                    yield number, rank


class _Slices:
    """One chunk of an all-reduce on its way through the three steps."""

    def __init__(self, bulk: Bulk, chunk: torch.Tensor, op: int) -> None:
        self._layout, self._local, self._engine = bulk._layout, bulk._local, bulk._engine
        self._chunk, self._op = chunk, op
        lanes = self._layout.lanes
        each = -(-chunk.numel() // lanes)
        self._slices = [chunk[at * each : (at + 1) * each] for at in range(lanes)]
        self._equal = self._slices[-1].numel() == each and lanes == len(self._layout.here)
        self._coming: list[Transfer] = []
        self._sent: list[Transfer] = []
        self._parts: list[torch.Tensor] = []

    def inside(self) -> None:
        """Combine the slices inside this host, and start to exchange this lane's with the other hosts."""
        layout = self._layout
        mine = layout.local < layout.lanes
        own = self._slices[layout.local] if mine else None
        partial = torch.empty_like(own) if own is not None else None
        if self._equal and partial is not None:
            self._local.reduce_scatter(partial, self._slices, self._op)
        else:
            for place, piece in enumerate(self._slices):
                reduced = piece.clone()
                self._local.reduce(reduced, place, self._op)
                if place == layout.local:
                    partial = reduced
        if partial is None or not partial.numel():
            return
        hosts = len(layout.hosts)
        if hosts == 2:
            other = torch.empty_like(partial)
            peer = layout.lane[1 - layout.host]
            self._coming = [self._engine.recv(other, peer, _TAG)]
            self._sent = [self._engine.send(partial, peer, _TAG)]
            self._parts = [partial, other] if layout.host == 0 else [other, partial]
            return
        # Each host combines one part of the slice for all.
        each = -(-partial.numel() // hosts)
        parts = [partial[at * each : (at + 1) * each] for at in range(hosts)]
        for number, rank in enumerate(layout.lane):
            if number == layout.host:
                self._parts.append(parts[number])
                continue
            self._parts.append(torch.empty_like(parts[layout.host]))
            if self._parts[-1].numel():
                self._coming.append(self._engine.recv(self._parts[-1], rank, _TAG))
            if parts[number].numel():
                self._sent.append(self._engine.send(parts[number], rank, _TAG))

    def between(self) -> None:
        """Combine what has come; with more than two hosts, start to exchange the result."""
        layout = self._layout
        for transfer in (*self._coming, *self._sent):
            transfer.wait()
        self._coming, self._sent = [], []
        if not self._parts:
            return
        own = self._slices[layout.local]
        hosts = len(layout.hosts)
        if hosts == 2:
            combine(own, self._parts, self._op)
            return
        each = -(-own.numel() // hosts)
        parts = [own[at * each : (at + 1) * each] for at in range(hosts)]
        if parts[layout.host].numel():
            combine(parts[layout.host], self._parts, self._op)
        for number, rank in enumerate(layout.lane):
            if number != layout.host:
                if parts[number].numel():
                    self._coming.append(self._engine.recv(parts[number], rank, _TAG))
                if parts[layout.host].numel():
                    self._sent.append(self._engine.send(parts[layout.host], rank, _TAG))

    def spread(self) -> None:
        """Give all ranks of this host the slices."""
        for transfer in (*self._coming, *self._sent):
            transfer.wait()
        if self._equal:
            self._local.all_gather(self._slices, self._slices[self._layout.local])
        else:
            for place, piece in enumerate(self._slices):
                self._local.broadcast(piece, place)
