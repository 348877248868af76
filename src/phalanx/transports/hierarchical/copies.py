"""Copies over several hosts. Small ones travel in the leaders' frames, or straight from rank to rank; of a larger one
each byte crosses a link as seldom as it can.

Costs are for H hosts and S bytes, as bytes that leave, or arrive at, one host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from phalanx.transports.hierarchical.engine import Transfer
from phalanx.transports.hierarchical.frames import NOTHING, Schedules
from phalanx.transports.hierarchical.layout import in_chunks

__all__ = ["Copies"]

_TAG = 1
_copy = ctypes.memmove


class Copies(Schedules):
    """The copies of a group over several hosts."""

    # -- broadcast ---------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        with self.call.named("broadcast", tensor, root=root) as call:
            flat = tensor.view(-1)
            if flat.nbytes > self.sizes.frame_bytes:
                self._broadcast_along_chain(call, flat, root)
            else:
                self._broadcast_in_frames(call, flat, root)

    def _broadcast_in_frames(self, call: int, flat: torch.Tensor, root: int) -> None:
        host, place = self.layout.place(root)
        nbytes = flat.nbytes
        if host == self.layout.host:
            self.local.broadcast(flat, place)
            self.frames.meet(call, (flat.data_ptr(), nbytes))
        else:
            found = self.frames.meet(call, NOTHING, lambda parts, to: bool(_copy(to, parts[host], nbytes)), nbytes)
            _copy(flat.data_ptr(), found, nbytes)

    def _broadcast_along_chain(self, call: int, flat: torch.Tensor, root: int) -> None:
        """Pass chunks on from the root's host: S arrive at each host, and leave it once, but for the last."""
        layout = self.layout
        first, place = layout.place(root)
        count = len(layout.hosts)
        turn = (layout.host - first) % count
        before = layout.hosts[(layout.host - 1) % count]
        after = layout.hosts[(layout.host + 1) % count]
        mine = place if turn == 0 else min(place, len(layout.here) - 1)
        carries = layout.local == mine
        sources = [before[place if turn == 1 else min(place, len(before) - 1)]] if carries and turn else []
        targets = [after[min(place, len(after) - 1)]] if carries and turn + 1 < count else []
        chunks = in_chunks(flat, self.sizes.chunk_bytes)
        self.frames.meet(call)
        coming = [self.remote.recv(chunk, rank, _TAG) for rank in sources for chunk in chunks]
        sent: list[Transfer] = []
        for number, chunk in enumerate(chunks):
            if coming:
                coming[number].wait()
            sent += [self.remote.send(chunk, rank, _TAG) for rank in targets]
            self.local.broadcast(chunk, mine)
        self.remote.wait(sent)

    # -- all_gather --------------------------------------------------------------------------------

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        with self.call.named("all_gather", tensor) as call:
            flat, places = tensor.view(-1), [output.view(-1) for output in outputs]
            if flat.nbytes * max(map(len, self.layout.hosts)) <= self.sizes.frame_bytes:
                self._all_gather_in_frames(call, places, flat)
            else:
                self._all_gather_around_ring(call, places, flat)

    def _all_gather_in_frames(self, call: int, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        layout, nbytes = self.layout, flat.nbytes
        together, own = None, 0
        if layout.leader:
            together = self.scratch.take_bytes("together", len(layout.here) * nbytes).view(flat.dtype)
            own = together.data_ptr()
        self.local.gather_single(together, flat, 0)

        def join(parts: Sequence[int], to: int) -> bool:
            for part, ranks in zip(parts, layout.hosts, strict=True):
                _copy(to, own if ranks is layout.here else part, len(ranks) * nbytes)
                to += len(ranks) * nbytes
            return True

        found = self.frames.meet(call, (own, len(layout.here) * nbytes), join, self.size * nbytes)
        for number, rank in enumerate(rank for ranks in layout.hosts for rank in ranks):
            _copy(outputs[rank].data_ptr(), found + number * nbytes, nbytes)

    def _all_gather_around_ring(self, call: int, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Pass on to the next host what it has not, and spread what has come, in chunks.

        A block is carried, on each host, by one of its ranks, so all of them work. With unequal hosts this is less than
        if each host sent to all others: no link carries more than all blocks but those of the smallest host.
        """
        layout = self.layout
        count, own = len(layout.hosts), layout.local
        after, before = ((layout.host + step) % count for step in (1, -1))
        target, source = layout.hosts[after], layout.hosts[before]
        # In the order in which they come: the host before sends its own first, then those that it was sent.
        coming = [(layout.host - turn) % count for turn in range(1, count)]
        chunks = [in_chunks(output, self.sizes.chunk_bytes) for output in outputs]
        carried = {
            host: [(place, rank) for place, rank in enumerate(layout.hosts[host]) if place % len(layout.here) == own]
            for host in coming
        }

        self.frames.meet(call)
        arriving = {
            (rank, turn): self.remote.recv(chunks[rank][turn], source[place % len(source)], _TAG)
            for host in coming
            for turn in range(len(chunks[0]))
            for place, rank in carried[host]
        }
        own_chunks = in_chunks(flat, self.sizes.chunk_bytes)
        sent = [self.remote.send(chunk, target[own % len(target)], _TAG) for chunk in own_chunks]
        self.local.all_gather([outputs[rank] for rank in layout.here], flat)
        for host in coming:
            for turn in range(len(chunks[0])):
                for place, rank in carried[host]:
                    arriving[rank, turn].wait()
                    if host != after:
                        sent.append(self.remote.send(chunks[rank][turn], target[place % len(target)], _TAG))
                self._spread([chunks[rank][turn] for rank in layout.hosts[host]])
        self.remote.wait(sent)

    def _spread(self, parts: Sequence[torch.Tensor]) -> None:
        """Give all ranks of this host parts of which rank ``i % ranks`` has part i."""
        ranks = len(self.layout.here)
        for begin in range(0, len(parts), ranks):
            some = parts[begin : begin + ranks]
            if len(some) == ranks:
                self.local.all_gather(some, some[self.layout.local])
            else:
                for place, part in enumerate(some):
                    self.local.broadcast(part, place)

    # -- from rank to rank -------------------------------------------------------------------------

    def gather(self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> None:
        with self.call.named("gather", tensor, root=root) as call:
            here = [outputs[rank] for rank in self.layout.here] if outputs else None
            host, place = self.layout.place(root)

            def inside() -> None:
                if host == self.layout.host:
                    self.local.gather(here, tensor, place)

            self._exchange(call, dict(enumerate(outputs or ())), {root: tensor}, inside)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        with self.call.named("scatter", output, root=root) as call:
            here = [inputs[rank] for rank in self.layout.here] if inputs else None
            host, place = self.layout.place(root)

            def inside() -> None:
                if host == self.layout.host:
                    self.local.scatter(output, here, place)

            self._exchange(call, {root: output}, dict(enumerate(inputs or ())), inside)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Send each part to its receiver, which compares its size with what it expects: the two alone know it."""
        given, expected = ([tensor.nbytes for tensor in tensors] for tensors in (inputs, outputs))
        with self.call.exchanging(inputs[0].dtype, given, expected) as call:
            to, parts = ([tensors[rank] for rank in self.layout.here] for tensors in (outputs, inputs))
            inside = partial(self.local.all_to_all, to, parts)
            self._exchange(call, dict(enumerate(outputs)), dict(enumerate(inputs)), inside)

    def _exchange(
        self,
        call: int,
        coming: Mapping[int, torch.Tensor],
        going: Mapping[int, torch.Tensor],
        inside: Callable[[], None],
    ) -> None:
        """Receive from, and send to, those of these ranks that are on other hosts, and do what is done inside this one.

        What is small leaves before the calls are compared. If nobody expects it, it stays in its connection. What is
        large would hold up the frames there.
        """
        transfers = [self.remote.recv(coming[rank], rank, _TAG) for rank in self.others if rank in coming]
        parts = [(going[rank], rank) for rank in self.others if rank in going]
        small = self.sizes.frame_bytes
        transfers += [self.remote.send(part, rank, _TAG) for part, rank in parts if part.nbytes <= small]
        inside()
        self.frames.meet(call)
        transfers += [self.remote.send(part, rank, _TAG) for part, rank in parts if part.nbytes > small]
        self.remote.wait(transfers)
