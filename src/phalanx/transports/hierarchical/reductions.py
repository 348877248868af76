"""Reductions over several hosts: inside each host, then between the hosts, then inside again.

A small tensor is reduced on the leader, and travels in the frames. Of a larger one, in chunks so that wire and memory
work at the same time, each *lane*, the ranks at the same place of their hosts, gets one slice. Some hosts add a part of
that slice each, and send the sums to those that need them. Sums are added in the order of the hosts, so the bits are
the same on every rank and in every run.

Costs are for H hosts and S bytes, as bytes that leave, or arrive at, one host.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from phalanx.errors import BackendError
from phalanx.native.core import library
from phalanx.transports.hierarchical.engine import Transfer
from phalanx.transports.hierarchical.frames import NOTHING, Schedules
from phalanx.transports.hierarchical.layout import in_chunks
from phalanx.transports.operands import AVG, DTYPES, OP_NUMBERS, SUM, reducible

__all__ = ["Reductions"]

_TAG, _SUMS_TAG = 1, 2
# So many chunks are on the wire at once: then it has something to do also while a rank waits for its processor.
_AHEAD = 2
_SLOTS = 2 * _AHEAD + 2  # chunks under way, from the first that is expected to the last that is spread


class Reductions(Schedules):
    """The reductions of a group over several hosts. An average is a sum, which each rank that gets it divides."""

    def can_reduce(self, dtype: torch.dtype, op: int) -> bool:
        return reducible(dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: int) -> None:
        """Reduce for all ranks. 2 (H-1)/H S each way; with two hosts, which exchange their slices whole, that is S."""
        with self.call.named("all_reduce", tensor, op) as call:
            self._all_reduce(call, tensor.view(-1), op)

    def _all_reduce(self, call: int, flat: torch.Tensor, op: int) -> None:
        if flat.nbytes > self.sizes.frame_bytes:
            self._reduce_slices(call, flat, op, None)
        else:
            nbytes, data = flat.nbytes, (flat.data_ptr(), flat.nbytes)
            self.local.reduce(flat, 0, _summed(op))
            found = self.frames.meet(call, data, partial(_add_into, flat, _summed(op)), nbytes)
            ctypes.memmove(flat.data_ptr(), found, nbytes)
        self._divide(flat, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: int) -> None:
        """Reduce for the root, whose tensor alone changes. S to its host; with more than two hosts S each way."""
        with self.call.named("reduce", tensor, op, root) as call:
            flat = tensor.view(-1)
            if flat.nbytes > self.sizes.frame_bytes:
                self._reduce_slices(call, flat, op, root)
            else:
                self._reduce_in_frames(call, flat, root, op)
            if self.rank == root:
                self._divide(flat, op)

    def _reduce_in_frames(self, call: int, flat: torch.Tensor, root: int, op: int) -> None:
        host = self.layout.place(root)[0]
        sums = flat.clone() if self.layout.leader else flat
        self.local.reduce(sums, 0, _summed(op))
        own = sums.data_ptr(), flat.nbytes

        def add(parts: Sequence[int], to: int) -> bool:
            return _add_into(
                flat, _summed(op), [own[0] if number == host else at for number, at in enumerate(parts)], to
            )

        if host != self.layout.host:
            self.frames.meet(call, own)
            return
        found = self.frames.meet(call, NOTHING, add, flat.nbytes)
        if self.rank == root:
            ctypes.memmove(flat.data_ptr(), found, flat.nbytes)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """Reduce each input for one rank. All but those of a host's own ranks leave it, once, as the host's sums."""
        with self.call.named("reduce_scatter", output, op) as call:
            flat, parts, count = output.view(-1), [part.view(-1) for part in inputs], output.numel()
            if output.nbytes * len(inputs) <= self.sizes.frame_bytes:
                whole = torch.cat(parts)
                self._all_reduce(call, whole, op)
                flat.copy_(whole[self.rank * count : (self.rank + 1) * count])
                return
            chunk_bytes = self.sizes.chunk_bytes // max(map(len, self.layout.hosts))  # the same everywhere
            chunks = zip(*(in_chunks(each, chunk_bytes) for each in (flat, *parts)), strict=True)
            self._run(
                call, [_Blocks(self, out, each, op, number % _SLOTS) for number, (out, *each) in enumerate(chunks)]
            )
            self._divide(flat, op)

    def _divide(self, flat: torch.Tensor, op: int) -> None:
        if op == AVG:
            flat.div_(self.size)

    def _reduce_slices(self, call: int, flat: torch.Tensor, op: int, root: int | None) -> None:
        chunks = in_chunks(flat, self.sizes.chunk_bytes)
        self._run(call, [_Slices(self, chunk, op, root, number % _SLOTS) for number, chunk in enumerate(chunks)])

    def _run(self, call: int, work: Sequence[_Chunk]) -> None:
        """Take chunks through their steps, one after the other, with some of them under way at once."""
        self.frames.meet(call)
        for chunk in work[:_AHEAD]:
            chunk.expect()
        turns = len(work) + 2 * _AHEAD
        for turn in range(turns + 1):
            library().phx_record_piece(turn, turns)
            if _AHEAD <= turn + 1 < len(work):
                work[turn + 1].expect()
            if turn < len(work):
                work[turn].reduce_inside()
            if 0 <= turn - _AHEAD < len(work):
                work[turn - _AHEAD].add_between()
            if 0 <= turn - 2 * _AHEAD < len(work):
                work[turn - 2 * _AHEAD].spread()


class _Chunk(ABC):
    """One chunk of a reduction on its way through the steps.

    Args:
        group, op: the group's reductions, and the operation's number.
        slot: a number that no other chunk under way has.
        sum: where what this rank adds goes; None if it adds nothing.
        sources: by other hosts, the rank there that brings the host's part of it.
    """

    def __init__(
        self, group: Reductions, op: int, slot: int, sum: torch.Tensor | None, sources: dict[int, int]
    ) -> None:
        self.layout, self.local, self.remote, self.scratch = group.layout, group.local, group.remote, group.scratch
        self._op, self._slot, self._sum, self._sources = _summed(op), slot, sum, sources
        self._parts: dict[int, torch.Tensor] = {}
        self._coming: list[Transfer] = []
        self._sent: list[Transfer] = []

    def expect(self) -> None:
        """Begin to receive what this rank adds."""
        if self._sum is not None:
            for host, rank in self._sources.items():
                self._parts[host] = self.scratch.take(("part", self._slot, host), self._sum)
                self._coming.append(self.remote.recv(self._parts[host], rank, _TAG))

    @abstractmethod
    def reduce_inside(self) -> None:
        """Add the tensors of this host's ranks, and begin to send parts to the ranks that add them."""

    def add_between(self) -> None:
        """Add the parts of the hosts."""
        self.remote.wait(self._coming)
        if self._sum is not None:
            parts = [self._parts[host].data_ptr() for host in range(len(self.layout.hosts))]
            _add_into(self._sum, self._op, parts, self._sum.data_ptr())

    def spread(self) -> None:
        """Bring the sums to the ranks that need them."""
        self.remote.wait(self._sent)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int = _TAG) -> None:
        if tensor.numel():
            self._sent.append(self.remote.send(tensor, rank, tag))

    def _reduce_to_places(self, tensors: Sequence[torch.Tensor], name: object) -> list[tuple[int, torch.Tensor]]:
        """Add up each of some tensors inside this host: the i-th on the rank at place i modulo all ranks.

        Returns:
            The numbers of those that this rank has, and their sums.
        """
        ranks, own = len(self.layout.here), self.layout.local
        if len(tensors) == ranks and len({tensor.numel() for tensor in tensors}) == 1:
            sums = self.scratch.take((name, self._slot, own), tensors[own])
            self.local.reduce_scatter(sums, tensors, self._op)
            return [(own, sums)]
        found = []
        for number, tensor in enumerate(tensors):
            if number % ranks == own:
                tensor = self.scratch.take((name, self._slot, number), tensor).copy_(tensor)
                found.append((number, tensor))
            self.local.reduce(tensor, number % ranks, self._op)
        return found


class _Blocks(_Chunk):
    """A chunk of a reduce_scatter: each rank adds what it gets, and hosts send it their sums of that."""

    def __init__(
        self, group: Reductions, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int, slot: int
    ) -> None:
        layout = group.layout
        others = [(host, ranks) for host, ranks in enumerate(layout.hosts) if host != layout.host]
        sources = {host: ranks[layout.local % len(ranks)] for host, ranks in others}
        super().__init__(group, op, slot, output, sources)
        self._inputs = inputs

    def reduce_inside(self) -> None:
        for host, ranks in enumerate(self.layout.hosts):
            for place, sums in self._reduce_to_places([self._inputs[rank] for rank in ranks], host):
                if host == self.layout.host:
                    self._parts[host] = sums
                else:
                    self._send(sums, ranks[place])


class _Slices(_Chunk):
    """A chunk of an all_reduce or a reduce: each lane adds a slice of it.

    Of two hosts each adds all that it needs. Of more each adds a share and sends it to the others; in a reduce the
    root's host adds nothing, and all send to it.
    """

    def __init__(self, group: Reductions, chunk: torch.Tensor, op: int, root: int | None, slot: int) -> None:
        layout = group.layout
        self._root_host: int | None = None
        self._root_place = 0
        if root is not None:
            self._root_host, self._root_place = layout.place(root)
        each = -(-chunk.numel() // layout.lanes)
        self._slices = [chunk[at * each : (at + 1) * each] for at in range(layout.lanes)]
        self._even = self._slices[-1].numel() == each and layout.lanes == len(layout.here)
        self._lane = {host: rank for host, rank in enumerate(layout.lane) if host != layout.host}
        self._hosts = len(layout.hosts)
        self._sums: torch.Tensor | None = None
        share = None
        if layout.lane:
            own = self._slices[layout.local]
            # The ranks beside a reduce's root must not put the sums into their own tensors.
            self._sums = own if root is None else group.scratch.take(("sums", slot), own)
            share = self._shares(self._sums)[layout.host]
        adds = share is not None and share.numel() > 0
        super().__init__(group, op, slot, share if adds else None, self._lane)
        self._sums_coming: list[Transfer] = []

    def expect(self) -> None:
        super().expect()
        # Sums may come into this rank's own tensor, since they come only after its part of it has been sent.
        if self._sums is not None and self._hosts > 2 and self._root_host in (None, self.layout.host):
            shares = self._shares(self._sums)
            for host, rank in self._lane.items():
                if shares[host].numel():
                    self._sums_coming.append(self.remote.recv(shares[host], rank, _SUMS_TAG))

    def reduce_inside(self) -> None:
        for _, sums in self._reduce_to_places(self._slices, "partial"):
            shares = self._shares(sums)
            self._parts[self.layout.host] = shares[self.layout.host]
            for host, rank in self._lane.items():
                self._send(shares[host], rank)

    def add_between(self) -> None:
        super().add_between()
        if self._sum is not None and self._hosts > 2:
            for host, rank in self._lane.items():
                if self._root_host in (None, host):
                    self._send(self._sum, rank, _SUMS_TAG)

    def spread(self) -> None:
        self.remote.wait(self._sums_coming)
        super().spread()
        if self._root_host is not None:
            if self._root_host == self.layout.host:
                self._give_to_root()
        elif self._even:
            self.local.all_gather(self._slices, self._slices[self.layout.local])
        else:
            for place, piece in enumerate(self._slices):
                self.local.broadcast(piece, place)

    def _give_to_root(self) -> None:
        ranks, place = len(self.layout.here), self._root_place
        is_root = self.layout.local == place
        if self._even and self._sums is not None:
            self.local.gather(self._slices if is_root else None, self._sums, place)
            return
        none = self._slices[0][:0]
        outputs, inputs = [none] * ranks, [none] * ranks
        if is_root:
            outputs[: len(self._slices)] = self._slices
        if self._sums is not None:
            inputs[place] = self._sums
        self.local.all_to_all(outputs, inputs)

    def _shares(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The part of this lane's slice that each host adds."""
        adding = [host for host in range(self._hosts) if host != self._root_host]
        if self._hosts == 2:
            return [whole if self._root_host in (None, host) else whole[:0] for host in range(2)]
        shares = _cut(whole, len(adding))
        return [next(shares) if host in adding else whole[:0] for host in range(self._hosts)]


def _summed(op: int) -> int:
    return SUM if op == AVG else op


def _cut(whole: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    each = -(-whole.numel() // count)
    return (whole[at * each : (at + 1) * each] for at in range(count))


def _add_into(like: torch.Tensor, op: int, parts: Sequence[int], to: int) -> bool:
    """Combine parts at these addresses, element by element, in their order; 16-bit floats in 32 bits, rounded once.

    ``like`` is as long as each part, and of its dtype. The result goes to the address ``to`` and overlaps none of them.
    """
    pointers = (ctypes.c_void_p * len(parts))(*parts)
    status = library().phx_combine(pointers, len(parts), to, like.numel(), DTYPES[like.dtype], OP_NUMBERS[op])
    if status:
        raise BackendError(f"the core cannot combine {like.dtype} by operation {op} (status {status})")
    return True
