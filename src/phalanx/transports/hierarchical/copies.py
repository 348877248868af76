"""Copies over several hosts. A small one travels in the leaders' frames; of a larger one each byte crosses a link as
seldom as it can.

Costs are for H hosts and S bytes, as bytes that leave, or arrive at, one host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from phalanx.transports.hierarchical.engine import Transfer
from phalanx.transports.hierarchical.frames import NOTHING, Frames
from phalanx.transports.hierarchical.layout import Scratch, in_chunks

__all__ = ["Copies"]

_TAG = 1
_copy = ctypes.memmove


class Copies:
    """The copies of one group; every rank of it calls the same method, with flat tensors.

    In every method ``call`` is a number that is equal for equal calls.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames, self._sizes = frames, frames.sizes
        self._layout, self._local, self._engine = frames.layout, frames.local, frames.engine
        self._scratch = Scratch()
        self._others = [rank for ranks in self._layout.hosts if ranks is not self._layout.here for rank in ranks]

    # -- broadcast ---------------------------------------------------------------------------------

    def broadcast(self, call: int, flat: torch.Tensor, root: int) -> None:
        if flat.nbytes > self._sizes.frame_bytes:
            self._broadcast_along_chain(call, flat, root)
            return
        host, place = self._layout.place(root)
        nbytes = flat.nbytes
        if host == self._layout.host:
            self._local.broadcast(flat, place)
            self._frames.meet(call, (flat.data_ptr(), nbytes))
        else:
            found = self._frames.meet(call, NOTHING, lambda parts, to: bool(_copy(to, parts[host], nbytes)), nbytes)
            _copy(flat.data_ptr(), found, nbytes)

    def _broadcast_along_chain(self, call: int, flat: torch.Tensor, root: int) -> None:
        """Pass chunks on from the root's host: S arrive at each host, and leave it once, but for the last."""
        layout = self._layout
        first, place = layout.place(root)
        count = len(layout.hosts)
        turn = (layout.host - first) % count
        before = layout.hosts[(layout.host - 1) % count]
        after = layout.hosts[(layout.host + 1) % count]
        mine = place if turn == 0 else min(place, len(layout.here) - 1)
        carries = layout.local == mine
        sources = [before[place if turn == 1 else min(place, len(before) - 1)]] if carries and turn else []
        targets = [after[min(place, len(after) - 1)]] if carries and turn + 1 < count else []
        chunks = in_chunks(flat, self._sizes.chunk_bytes)
        self._frames.meet(call)
        coming = [self._engine.recv(chunk, rank, _TAG) for rank in sources for chunk in chunks]
        sent: list[Transfer] = []
        for number, chunk in enumerate(chunks):
            if coming:
                coming[number].wait()
            sent += [self._engine.send(chunk, rank, _TAG) for rank in targets]
            self._local.broadcast(chunk, mine)
        self._engine.wait(sent)

    # -- all_gather and gather ---------------------------------------------------------------------

    def all_gather(self, call: int, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        if self._fits_frames(flat):
            self._gather_in_frames(call, outputs, flat, None)
        else:
            self._all_gather_around_ring(call, outputs, flat)

    def gather(self, call: int, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int) -> None:
        if self._fits_frames(flat):
            self._gather_in_frames(call, outputs, flat, root)
        else:
            self._gather_straight(call, outputs, flat, root)

    def _fits_frames(self, flat: torch.Tensor) -> bool:
        """Return whether a frame has room for so much of every rank of a host."""
        return flat.nbytes * max(map(len, self._layout.hosts)) <= self._sizes.frame_bytes

    def _gather_in_frames(
        self, call: int, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int | None
    ) -> None:
        """Give all ranks the tensors of all, or the ranks of the root's host, of which the root alone has outputs."""
        layout, nbytes = self._layout, flat.nbytes
        to_here = root is None or layout.place(root)[0] == layout.host
        together, own = None, 0
        if layout.leader:
            together = self._scratch.take_bytes("together", len(layout.here) * nbytes).view(flat.dtype)
            own = together.data_ptr()
        self._local.gather_single(together, flat, 0)

        def join(parts: Sequence[int], to: int) -> bool:
            for part, ranks in zip(parts, layout.hosts, strict=True):
                _copy(to, own if ranks is layout.here else part, len(ranks) * nbytes)
                to += len(ranks) * nbytes
            return True

        data = NOTHING if to_here and root is not None else (own, len(layout.here) * nbytes)
        everything = sum(map(len, layout.hosts)) * nbytes
        found = self._frames.meet(call, data, join, everything) if to_here else self._frames.meet(call, data)
        if outputs is not None:
            for number, rank in enumerate(rank for ranks in layout.hosts for rank in ranks):
                _copy(outputs[rank].data_ptr(), found + number * nbytes, nbytes)

    def _all_gather_around_ring(self, call: int, outputs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Pass on to the next host what it has not, and spread what has come, in chunks.

        A block is carried, on each host, by one of its ranks, so all of them work. With unequal hosts this is less than
        if each host sent to all others: no link carries more than all blocks but those of the smallest host.
        """
        layout = self._layout
        count, own = len(layout.hosts), layout.local
        after, before = ((layout.host + step) % count for step in (1, -1))
        target, source = layout.hosts[after], layout.hosts[before]
        # In the order in which they come: the host before sends its own first, then those that it was sent.
        coming = [(layout.host - turn) % count for turn in range(1, count)]
        chunks = [in_chunks(output, self._sizes.chunk_bytes) for output in outputs]
        carried = {
            host: [(place, rank) for place, rank in enumerate(layout.hosts[host]) if place % len(layout.here) == own]
            for host in coming
        }

        self._frames.meet(call)
        arriving = {
            (rank, turn): self._engine.recv(chunks[rank][turn], source[place % len(source)], _TAG)
            for host in coming
            for turn in range(len(chunks[0]))
            for place, rank in carried[host]
        }
        own_chunks = in_chunks(flat, self._sizes.chunk_bytes)
        sent = [self._engine.send(chunk, target[own % len(target)], _TAG) for chunk in own_chunks]
        self._local.all_gather([outputs[rank] for rank in layout.here], flat)
        for host in coming:
            for turn in range(len(chunks[0])):
                for place, rank in carried[host]:
                    arriving[rank, turn].wait()
                    if host != after:
                        sent.append(self._engine.send(chunks[rank][turn], target[place % len(target)], _TAG))
                self._spread([chunks[rank][turn] for rank in layout.hosts[host]])
        self._engine.wait(sent)

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

    def _gather_straight(
        self, call: int, outputs: Sequence[torch.Tensor] | None, flat: torch.Tensor, root: int
    ) -> None:
        """Send from the ranks of other hosts to the root: no byte is copied on its way."""
        layout = self._layout
        host, place = layout.place(root)
        self._frames.meet(call)
        if layout.host != host:
            self._engine.send(flat, root, _TAG).wait()
            return
        coming = [self._engine.recv(outputs[rank], rank, _TAG) for rank in self._others] if outputs else []
        self._local.gather([outputs[rank] for rank in layout.here] if outputs else None, flat, place)
        self._engine.wait(coming)

    # -- scatter -----------------------------------------------------------------------------------

    def scatter(self, call: int, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int) -> None:
        size, count = sum(map(len, self._layout.hosts)), output.numel()
        if output.nbytes * size > self._sizes.frame_bytes:
            self._scatter_straight(call, output, inputs, root)
            return
        # All parts are small together, so all ranks get all of them.
        whole = output.new_empty(size * count) if inputs is None else torch.cat([*inputs])
        rank = self._layout.here[self._layout.local]
        self.broadcast(call, whole, root)
        output.copy_(whole[rank * count : (rank + 1) * count])

    def _scatter_straight(
        self, call: int, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
    ) -> None:
        """Send from the root to each rank of other hosts: no byte is copied on its way."""
        layout = self._layout
        host, place = layout.place(root)
        self._frames.meet(call)
        if layout.host != host:
            self._engine.recv(output, root, _TAG).wait()
            return
        sent = [self._engine.send(inputs[rank], rank, _TAG) for rank in self._others] if inputs else []
        self._local.scatter(output, [inputs[rank] for rank in layout.here] if inputs else None, place)
        self._engine.wait(sent)
