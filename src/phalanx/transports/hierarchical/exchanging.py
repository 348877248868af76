"""all_to_all over several hosts: small parts go in the leaders' frames, larger ones by way of memory that the ranks of
a host share, and large ones straight to their receivers.

How much one rank sends to another is known to these two alone, and so both know how it goes. Each rank tells its leader
how much it sends to whom, and expects of whom, and puts its small and middle-sized parts where the leader finds them.
The leaders compare the sizes before anything large moves. Only what belongs elsewhere leaves a host.

A leader sends what the ranks of its host have for another one from where these have put it, one message for each rank,
to where the ranks there read it. That costs the processors less than a message for each pair of ranks does. It goes
out with the frames, so small and middle-sized parts take one way, and large ones two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.calls import Differs
from phalanx.transports.hierarchical.early_receives import EarlyReceives, wait_for
from phalanx.transports.hierarchical.exchange_memory import ExchangeMemory
from phalanx.transports.hierarchical.frames import Data, Frames
from phalanx.transports.hierarchical.lane import Engine, Transfer
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.hierarchical.parts import Parts
from phalanx.transports.hierarchical.sizes import Sizes
from phalanx.transports.hierarchical.streams import Streams, Waiting
from phalanx.transports.shm.communicator import SharedMemoryCommunicator

__all__ = ["Exchanging"]

_SIZE_BYTES = 8
_TAG = 1
_copy = ctypes.memmove

_Nbytes = Sequence[int]


class _Both(NamedTuple):
    """What a rank sends to, and expects of, each rank of the group."""

    inputs: Parts
    outputs: Parts


class Exchanging:
    """The exchanges of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hierarchical.communicator.HierarchicalCommunicator`.
        early: begins receives; the group's other collectives use it as well.
        frames: the leader's; None on other ranks.
        sizes: how much goes in a frame, and by way of shared memory.

    Attributes:
        memory: that of the host; made by the first exchange, because most groups have none.
    """

    def __init__(
        self,
        layout: Layout,
        local: Communicator,
        engine: Engine,
        early: EarlyReceives,
        frames: Frames | None,
        sizes: Sizes,
    ) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._early = early
        self._frames = frames
        self._hosts = [number for number in range(len(layout.hosts)) if number != layout.host]
        self._others = [rank for number in self._hosts for rank in layout.hosts[number]]
        self._rank = layout.here[layout.local]
        # Of one part: then a frame, or the shared memory, has room for those of all pairs of ranks. Where each host has
        # one rank, that has nobody to share memory with.
        most = max(map(len, layout.hosts))
        self._small_bytes = sizes.frame_bytes // most**2
        self._middle_bytes = max(self._small_bytes, sizes.shared_bytes // most**2 if most > 1 else 0)
        self._frame_bytes = sizes.frame_bytes + _SIZE_BYTES * len(layout.here) * len(self._others)
        self.memory: ExchangeMemory | None = None
        self._streams: Streams | None = None
        self._rooms: list[torch.Tensor] = []
        self._turn = 0
        self._shared = local if isinstance(local, SharedMemoryCommunicator) else None
        self._rests = None if layout.leader else self._shared
        self._tick = torch.zeros(1, dtype=torch.int64)
        self._ticks = torch.zeros(len(layout.here), dtype=torch.int64) if layout.leader else None
        self._verdict = torch.zeros(2, dtype=torch.int64)
        self._verdict_words = (ctypes.c_int64 * 2).from_address(self._verdict.data_ptr())

    def all_to_all(self, call: int, outputs: Parts, inputs: Parts) -> None:
        """Copy part r of ``inputs`` into part ``rank`` of the ``outputs`` of rank r.

        Args:
            call: a number that is equal for equal calls.
            outputs, inputs: where the parts lie.

        Raises:
            Differs: another rank makes another call, or sends another number of bytes than its peer expects.
        """
        both, largest = _Both(inputs, outputs), self._middle_bytes
        given, expected = inputs.nbytes, outputs.nbytes
        sources = [rank for rank in self._others if expected[rank] > largest]
        targets = [rank for rank in self._others if given[rank] > largest]

        def expect() -> list[Transfer]:
            return [self._engine.recv(outputs.tensor(rank), rank, _TAG) for rank in sources]

        def agree() -> None:
            self._exchange_smaller(call, both)

        transfers = self._early.begin([*sources, *targets], agree, expect)
        transfers += [self._engine.send(inputs.tensor(rank), rank, _TAG) for rank in targets]
        wait_for(transfers, lambda: self._exchange_large_inside(both))

    def let_go(self) -> None:
        """The engine has been closed: keep none of its transfers."""
        if self._streams is not None:
            self._streams.let_go()

    def _exchange_large_inside(self, both: _Both) -> None:
        """Exchange, inside this host, what is too large for the shared memory."""
        inputs, outputs = both
        here, largest = self._layout.here, self._middle_bytes
        if not self._verdict_words[1] or self._shared is None:
            if inputs.nbytes[self._rank] > largest:
                self._copy_own(both)
            return

        def large(parts: Parts) -> list[tuple[int, int]]:
            sizes = [nbytes if nbytes > largest else 0 for nbytes in parts.nbytes]
            return [(parts.addresses[rank], sizes[rank]) for rank in here]

        # The core copies what this rank sends itself while it waits for the others.
        self._shared.all_to_all_at(large(outputs), large(inputs), inputs.dtype)

    def _small(self, nbytes: _Nbytes) -> Iterator[int]:
        """The ranks of other hosts to or from which so many bytes go in frames, by rank."""
        return (rank for rank in self._others if 0 < nbytes[rank] <= self._small_bytes)

    def _goes_by_memory(self, nbytes: int) -> bool:
        """Whether so much goes to another host, or comes from there, by way of the shared memory."""
        return self._small_bytes < nbytes <= self._middle_bytes

    def _exchange_smaller(self, call: int, both: _Both) -> None:
        """Compare the calls and the sizes, and exchange what goes in frames or by way of the shared memory."""
        if self.memory is None:
            self.memory = ExchangeMemory(self._layout, self._local, self._small_bytes, self._middle_bytes)
            if self._layout.leader:
                self._streams = Streams(self._layout, self._engine, self.memory)
        self._turn = 1 - self._turn
        self._put(self.memory, both)
        self._local.gather_single(self._ticks, self._tick, 0)
        if self._frames is None or self._streams is None:
            self._end(call, self.memory, both)
        else:
            self._lead(self._frames, self._streams, call, self.memory, both)

    def _end(self, call: int, memory: ExchangeMemory, both: _Both) -> None:
        """Hear the verdict, which the leader has written, and take what has come."""
        # While the leader moves what lies in the shared memory, a rank that waits for it would take the processor away.
        if self._rests is not None and any(map(self._goes_by_memory, (*both.inputs.nbytes, *both.outputs.nbytes))):
            self._rests.set_rests(True)
            self._local.broadcast(self._verdict, 0)
            self._rests.set_rests(False)
        else:
            self._local.broadcast(self._verdict, 0)
        if self._verdict_words[0] != call:
            raise Differs
        self._take(memory, both)

    def _put(self, memory: ExchangeMemory, both: _Both) -> None:
        """Write down what this rank sends and expects, and put what it sends where others find it."""
        addresses, given = both.inputs.addresses, both.inputs.nbytes
        place, hosts = self._layout.local, self._layout.hosts
        memory.given[place][:] = given
        memory.expected[place][:] = both.outputs.nbytes
        at = memory.parts[place]
        for rank in self._small(given):
            _copy(at, addresses[rank], given[rank])
            at += given[rank]
        for number in self._hosts:
            at = memory.address + memory.outgoing[self._turn][number][place]
            for rank in hosts[number]:
                if self._goes_by_memory(given[rank]):
                    _copy(at, addresses[rank], given[rank])
                    at += given[rank]
        for rank, to in zip(self._layout.here, memory.inside[self._turn][place], strict=True):
            if rank != self._rank and 0 < given[rank] <= self._middle_bytes:
                _copy(to, addresses[rank], given[rank])

    def _take(self, memory: ExchangeMemory, both: _Both) -> None:
        """Copy what has come for this rank into its tensors, and its own part as well."""
        addresses, expected = both.outputs.addresses, both.outputs.nbytes
        place, here = self._layout.local, self._layout.here
        at, places = memory.news[place], memory.places[place]
        for rank in self._others:
            nbytes = expected[rank]
            if self._goes_by_memory(nbytes):
                _copy(addresses[rank], memory.address + places[rank], nbytes)
            elif 0 < nbytes <= self._small_bytes:
                _copy(addresses[rank], at, nbytes)
                at += nbytes
        for rank, inside in zip(here, memory.inside[self._turn], strict=True):
            if expected[rank] > self._middle_bytes:
                continue
            if rank == self._rank:
                self._copy_own(both)
            elif expected[rank]:
                _copy(addresses[rank], inside[place], expected[rank])

    def _copy_own(self, both: _Both) -> None:
        """Copy what this rank sends itself."""
        rank = self._rank
        _copy(both.outputs.addresses[rank], both.inputs.addresses[rank], both.inputs.nbytes[rank])

    # -- the leader's part -------------------------------------------------------------------------

    def _lead(self, frames: Frames, streams: Streams, call: int, memory: ExchangeMemory, both: _Both) -> None:
        """Exchange the frames, and what goes by way of the shared memory; then end the exchange on this host."""
        given, expected = [words[:] for words in memory.given], [words[:] for words in memory.expected]
        self._verdict_words[:] = [~call, self._is_large_inside(given)]
        if not self._fit_inside(given, expected):
            self._end(call, memory, both)
        sent: list[Transfer] = []
        for number in self._hosts:
            for place, sizes in enumerate(given):
                nbytes = sum(sizes[rank] for rank in self._layout.hosts[number] if self._goes_by_memory(sizes[rank]))
                if nbytes:
                    message = memory.part(memory.outgoing[self._turn][number][place], nbytes)
                    sent.append(streams.send(number, message, place))
        frames.begin(call, self._packed(memory, given))
        coming = self._begin_to_receive(streams, memory, expected)

        def hear() -> None:
            same, arrived = frames.end()
            if same and self._unpack(memory, arrived, expected):
                streams.finish(coming)
                self._verdict_words[0] = call
            self._end(call, memory, both)

        wait_for(sent, hear)

    def _fit_inside(self, given: Sequence[_Nbytes], expected: Sequence[_Nbytes]) -> bool:
        """Whether all ranks of this host send each other what these expect."""
        here = self._layout.here
        return all(
            sizes[to] == expected[n][rank] for rank, sizes in zip(here, given, strict=True) for n, to in enumerate(here)
        )

    def _begin_to_receive(self, streams: Streams, memory: ExchangeMemory, expected: Sequence[_Nbytes]) -> list[Waiting]:
        """Receive what comes by way of the shared memory, and tell the ranks of this host where it will lie."""
        coming = []
        for number in self._hosts:
            for place, rank in enumerate(self._layout.hosts[number]):
                takers = [n for n, sizes in enumerate(expected) if self._goes_by_memory(sizes[rank])]
                if not takers:
                    continue
                message = streams.receive(number, place)
                coming.append(message)
                at = message.at
                for taker in takers:
                    memory.places[taker][rank] = at
                    at += expected[taker][rank]
        return coming

    def _packed(self, memory: ExchangeMemory, given: Sequence[_Nbytes]) -> dict[int, Data]:
        """What the frames carry: how much each rank of this host sends each one of another, and the small parts."""
        parts = list[dict[int, int]]()
        for sizes, at in zip(given, memory.parts, strict=True):
            parts.append(_placed(self._small(sizes), sizes, at))
        data = dict[int, Data]()
        for turn, number in enumerate(self._hosts):
            begin = at = self._room(turn)
            there = self._layout.hosts[number]
            all_sizes = [sizes[rank] for sizes in given for rank in there]
            (ctypes.c_int64 * len(all_sizes)).from_address(at)[:] = all_sizes
            at += _SIZE_BYTES * len(all_sizes)
            for sizes, placed in zip(given, parts, strict=True):
                for rank in there:
                    if rank in placed:
                        _copy(at, placed[rank], sizes[rank])
                        at += sizes[rank]
            data[number] = begin, at - begin
        return data

    def _unpack(self, memory: ExchangeMemory, arrived: Mapping[int, int], expected: Sequence[_Nbytes]) -> bool:
        """Give each rank of this host the small parts that have come for it; whether all sizes are as expected."""
        came: list[dict[int, int]] = [{} for _ in expected]
        for number in self._hosts:
            there, at = self._layout.hosts[number], arrived[number]
            wanted = [sizes[rank] for rank in there for sizes in expected]
            if (ctypes.c_int64 * len(wanted)).from_address(at)[:] != wanted:
                return False
            at += _SIZE_BYTES * len(wanted)
            for rank in there:
                for sizes, mine in zip(expected, came, strict=True):
                    if 0 < sizes[rank] <= self._small_bytes:
                        mine[rank] = at
                        at += sizes[rank]
        for sizes, mine, at in zip(expected, came, memory.news, strict=True):
            for rank in self._small(sizes):
                _copy(at, mine[rank], sizes[rank])
                at += sizes[rank]
        return True

    def _is_large_inside(self, given: Sequence[_Nbytes]) -> bool:
        """Whether a rank of this host sends another one more than the shared memory has room for."""
        here, largest = self._layout.here, self._middle_bytes
        return any(sizes[to] > largest for rank, sizes in zip(here, given, strict=True) for to in here if to != rank)

    def _room(self, number: int) -> int:
        """The address of memory for what goes to another host in a frame."""
        if number == len(self._rooms):
            self._rooms.append(torch.empty(self._frame_bytes, dtype=torch.uint8))
        return self._rooms[number].data_ptr()


def _placed(ranks: Iterator[int], nbytes: _Nbytes, at: int) -> dict[int, int]:
    """Where the part of each rank lies, one behind the other from an address on."""
    found = {}
    for rank in ranks:
        found[rank] = at
        at += nbytes[rank]
    return found
