"""Reductions of large tensors over several hosts, in chunks, so that wire and memory work at the same time.

Inside a host each lane gets the host's sums of one slice of a chunk. Between hosts, some hosts combine a part of that
slice each, always in the order of the hosts, and send the result to those that need it. Costs are for H hosts and S
bytes, as bytes that leave, or arrive at, one host (``bounds.py`` says why they cannot be less).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from phalanx.native.core import library
from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.combining import combine
from phalanx.transports.hierarchical.early_receives import EarlyReceives, wait_for
from phalanx.transports.hierarchical.lane import Engine, Transfer
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.scratch import Scratch
from phalanx.transports.hierarchical.sizes import in_chunks

__all__ = ["Reducing"]

Agree = Callable[[], None]
_TAG, _SUMS_TAG = 1, 2
# So many chunks are on the wire at once: then it has something to do also while a rank waits for its processor.
_SENT_AHEAD = 2
_SLOTS = 2 * _SENT_AHEAD + 2  # chunks under way, from the first that is expected to the last that is spread


class Reducing:
    """The large reductions of one group; every rank of it calls the same method.

    Every method calls ``agree``, which compares the calls, before it sends anything.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hierarchical.communicator.HierarchicalCommunicator`.
        early: begins receives; the group's copies use it as well.
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
        self._scratch = Scratch()

    def all_reduce(self, flat: torch.Tensor, op: int, agree: Agree) -> None:
        """2 (H-1)/H S each way; with two hosts, which exchange their slices whole, that is S."""
        self._slices(flat, op, None, agree)

    def reduce(self, flat: torch.Tensor, root: int, op: int, agree: Agree) -> None:
        """Two hosts: S to the root's. More: S each way, because the other hosts combine. Only the root's changes."""
        self._slices(flat, op, root, agree)

    def _slices(self, flat: torch.Tensor, op: int, root: int | None, agree: Agree) -> None:
        work = [
            _Slices(self._layout, self._local, self._engine, self._scratch, chunk, op, root, number % _SLOTS)
            for number, chunk in enumerate(in_chunks(flat, self._chunk_bytes))
        ]

        def expect() -> None:
            for chunk in work[:_SENT_AHEAD]:
                chunk.expect()

        others = [rank for number, rank in enumerate(self._layout.lane) if number != self._layout.host]
        self._early.begin(others, agree, expect)
        turns = len(work) + 2 * _SENT_AHEAD
        for turn in range(turns + 1):
            library().phx_record_piece(turn, turns)
            if _SENT_AHEAD <= turn + 1 < len(work):
                work[turn + 1].expect()
            if turn < len(work):
                work[turn].inside()
            if 0 <= turn - _SENT_AHEAD < len(work):
                work[turn - _SENT_AHEAD].between()
            if 0 <= turn - 2 * _SENT_AHEAD < len(work):
                work[turn - 2 * _SENT_AHEAD].spread()

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int, agree: Agree) -> None:
        """Combine inside what each rank of each host is to get, then between the hosts.

        All inputs but those of a host's own ranks leave it, once.
        """
        layout = self._layout
        each = max(1, self._chunk_bytes // max(map(len, layout.hosts)) // output.itemsize)  # the same everywhere
        begins = range(0, output.numel(), each)
        others = [number for number in range(len(layout.hosts)) if number != layout.host]
        # From each host one of its ranks brings this rank the host's part.
        sources = {number: layout.hosts[number][layout.local % len(layout.hosts[number])] for number in others}
        targets = [
            rank
            for number in others
            for place, rank in enumerate(layout.hosts[number])
            if place % len(layout.here) == layout.local
        ]

        def expect(turn: int) -> dict[int, tuple[torch.Tensor, Transfer]]:
            like = output[begins[turn] : begins[turn] + each]
            found = {}
            for number, source in sources.items():
                part = self._scratch.take(("from", turn % 3, number), like)
                found[number] = part, self._engine.recv(part, source, _TAG)
            return found

        coming = [self._early.begin([*sources.values(), *targets], agree, lambda: expect(0))]
        own: list[torch.Tensor] = []
        sent: list[list[Transfer]] = []
        for turn in range(len(begins) + 1):
            if turn + 1 < len(begins):
                coming.append(expect(turn + 1))
            if turn < len(begins):
                chunks = [part[begins[turn] : begins[turn] + each] for part in inputs]
                partials = self._partials(chunks, op, turn % 2)
                own.append(partials.pop(layout.here[layout.local]))
                sent.append([self._engine.send(part, rank, _TAG) for rank, part in partials.items()])
            if turn:
                wait_for(sent[turn - 1])
                parts = []
                for number in range(len(layout.hosts)):
                    if number in sources:
                        part, transfer = coming[turn - 1][number]
                        transfer.wait()
                        parts.append(part)
                    else:
                        parts.append(own[turn - 1])
                combine(output[begins[turn - 1] : begins[turn - 1] + each], parts, op)

    def _partials(self, chunks: Sequence[torch.Tensor], op: int, slot: int) -> dict[int, torch.Tensor]:
        """This host's sums of what each rank of the group gets, for those to which this rank brings them."""
        ranks = len(self._layout.here)
        found = {}
        for members in self._layout.hosts:
            if len(members) == ranks:
                rank = members[self._layout.local]
                found[rank] = self._scratch.take(("of", slot, rank), chunks[rank])
                self._local.reduce_scatter(found[rank], [chunks[member] for member in members], op)
                continue
            for place, rank in enumerate(members):
                chunk = chunks[rank]
                if place % ranks == self._layout.local:
                    chunk = found[rank] = self._scratch.take(("of", slot, rank), chunk)
                    chunk.copy_(chunks[rank])
                self._local.reduce(chunk, place % ranks, op)
        return found


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
        self._own = self._slices[layout.local] if layout.local < layout.lanes else None
        # The ranks beside a reduce's root must not put the sums into their own tensors.
        self._sums = self._own if root is None or self._own is None else scratch.take(("sums", slot), self._own)
        self._parts: dict[int, torch.Tensor] = {}
        self._parts_coming: list[Transfer] = []
        self._sums_coming: list[Transfer] = []
        self._sent: list[Transfer] = []

    def expect(self) -> None:
        """Start to receive what this rank adds, and the sums of others.

        The sums may come into this rank's tensor, since they come only after its own part has been sent.
        """
        layout = self._layout
        if self._sums is None:
            return
        shares = self._shares(self._sums)
        own = shares[layout.host]
        for number, rank in self._lane():
            if own.numel():
                part = self._parts[number] = self._scratch.take(("part", self._slot, number), own)
                self._parts_coming.append(self._engine.recv(part, rank, _TAG))
            if shares[number].numel() and self._exchanges_sums and self._root_host in (None, layout.host):
                self._sums_coming.append(self._engine.recv(shares[number], rank, _SUMS_TAG))

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
        self._parts[layout.host] = shares[layout.host]
        for number, rank in self._lane():
            if shares[number].numel():
                self._sent.append(self._engine.send(shares[number], rank, _TAG))

    def between(self) -> None:
        """Combine what has come, and start to send the sums to the hosts that need them and have not added them."""
        wait_for(self._parts_coming)
        if self._sums is None:
            return
        own = self._shares(self._sums)[self._layout.host]
        if own.numel():
            combine(own, [self._parts[number] for number in range(len(self._layout.hosts))], self._op)
            for number, rank in self._lane() if self._exchanges_sums else ():
                if self._root_host in (None, number):
                    self._sent.append(self._engine.send(own, rank, _SUMS_TAG))

    def spread(self) -> None:
        """Give the sums to all ranks of this host, or to the root if it is here."""
        wait_for(self._sums_coming)
        wait_for(self._sent)
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

    @property
    def _exchanges_sums(self) -> bool:
        """Whether hosts need sums that others have added: of two hosts, each adds all that it needs."""
        return len(self._layout.hosts) > 2

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
