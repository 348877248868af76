"""all_to_all over several hosts: small parts go with the leaders' frames, large ones straight to their receivers.

How much one rank sends to another is known to these two alone, and so both know how it goes. Each rank gives its leader
its small parts, and tells it how much it sends to whom, and expects of whom. The leaders compare this before anything
large moves. Only what belongs elsewhere leaves a host; small parts take one way, and large ones two.

What a rank gives its leader, and gets from it, is as long in every call, though it may hold little: two collectives
inside the host are then enough, and no tensor has to be made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hosts.breaking import Differs
from phalanx.transports.hosts.early_receives import EarlyReceives, wait_for
from phalanx.transports.hosts.frames import Data, Frames
from phalanx.transports.hosts.lane import Engine, Transfer
from phalanx.transports.hosts.layout import Layout

__all__ = ["Exchanging"]

_CALL_BYTES = 8
_SIZE_BYTES = 8
_TAG = 1
_copy = ctypes.memmove

_Sizes = Sequence[int]


class Exchanging:
    """The exchanges of one group; every rank of it calls the same method.

    Args:
        layout, local, engine: see :class:`~phalanx.transports.hosts.communicator.HostsCommunicator`.
        early: begins receives; the group's other collectives use it as well.
        frames: the leader's; None on other ranks.
        frame_bytes: the most data that one host sends another in a frame.
    """

    def __init__(
        self,
        layout: Layout,
        local: Communicator,
        engine: Engine,
        early: EarlyReceives,
        frames: Frames | None,
        frame_bytes: int,
    ) -> None:
        self._layout = layout
        self._local = local
        self._engine = engine
        self._early = early
        self._frames = frames
        self._hosts = [number for number in range(len(layout.hosts)) if number != layout.host]
        self._others = [rank for number in self._hosts for rank in layout.hosts[number]]
        # Of one part: then a frame has room for those of all pairs of ranks.
        self._small_bytes = frame_bytes // max(map(len, layout.hosts)) ** 2
        self._size = sum(map(len, layout.hosts))
        self._parts_bytes = self._small_bytes * len(self._others)
        self._frame_bytes = frame_bytes + _SIZE_BYTES * len(layout.here) * len(self._others)
        self._memory: _Memory | None = None  # made by the first exchange: most groups have none

    def all_to_all(self, call: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs[r]`` into ``outputs[rank]`` of rank r.

        Args:
            call: a number that is equal for equal calls.
            outputs, inputs: flat tensors, one for each rank.

        Raises:
            Differs: another rank makes another call, or sends another number of bytes than its peer expects.
        """
        given, expected = [part.nbytes for part in inputs], [part.nbytes for part in outputs]
        sources = [rank for rank in self._others if expected[rank] > self._small_bytes]
        targets = [rank for rank in self._others if given[rank] > self._small_bytes]

        def expect() -> list[Transfer]:
            return [self._engine.recv(outputs[rank], rank, _TAG) for rank in sources]

        def agree() -> None:
            self._exchange_small(call, inputs, given, outputs, expected)

        def exchange_here() -> None:
            here = self._layout.here
            self._local.all_to_all([outputs[rank] for rank in here], [inputs[rank] for rank in here])

        transfers = self._early.begin([*sources, *targets], agree, expect)
        transfers += [self._engine.send(inputs[rank], rank, _TAG) for rank in targets]
        wait_for(transfers, exchange_here)

    def _small(self, nbytes: _Sizes) -> Iterator[int]:
        """The ranks of other hosts to or from which so many bytes go in frames, by rank."""
        return (rank for rank in self._others if 0 < nbytes[rank] <= self._small_bytes)

    def _exchange_small(
        self,
        call: int,
        inputs: Sequence[torch.Tensor],
        given: _Sizes,
        outputs: Sequence[torch.Tensor],
        expected: _Sizes,
    ) -> None:
        """Exchange what goes in frames, by way of the leaders."""
        if self._memory is None:
            tables = 2 * _SIZE_BYTES * self._size
            self._memory = _Memory(self._layout, tables + self._parts_bytes, _CALL_BYTES + self._parts_bytes)
        memory = self._memory
        table = (ctypes.c_int64 * (2 * self._size)).from_address(memory.told.data_ptr())
        table[:] = [*given, *expected]
        at = memory.told.data_ptr() + ctypes.sizeof(table)
        for rank in self._small(given):
            _copy(at, inputs[rank].data_ptr(), given[rank])
            at += given[rank]
        self._local.gather(memory.all_told or None, memory.told, 0)
        if self._frames is not None:
            self._answer(self._frames, call, memory)
        self._local.scatter(memory.news, memory.all_news or None, 0)
        at = memory.news.data_ptr()
        if ctypes.c_int64.from_address(at).value != call:
            raise Differs
        at += _CALL_BYTES
        for rank in self._small(expected):
            _copy(outputs[rank].data_ptr(), at, expected[rank])
            at += expected[rank]

    def _answer(self, frames: Frames, call: int, memory: _Memory) -> None:
        """On the leader, exchange the frames, and write the news of each rank of this host."""
        size, small = self._size, self._small
        tables, parts = list[tuple[_Sizes, _Sizes]](), list[dict[int, int]]()
        for told in memory.all_told:
            at = told.data_ptr()
            both = (ctypes.c_int64 * (2 * size)).from_address(at)[:]
            tables.append((both[:size], both[size:]))
            parts.append(_placed(small(both[:size]), both, at + 2 * _SIZE_BYTES * size))
        data: dict[int, Data] = {}
        for turn, number in enumerate(self._hosts):
            begin = at = memory.room(turn, self._frame_bytes)
            there = self._layout.hosts[number]
            sizes = [given[rank] for given, _ in tables for rank in there]
            (ctypes.c_int64 * len(sizes)).from_address(at)[:] = sizes
            at += _SIZE_BYTES * len(sizes)
            for (given, _), placed in zip(tables, parts, strict=True):
                for rank in there:
                    if rank in placed:
                        _copy(at, placed[rank], given[rank])
                        at += given[rank]
            data[number] = begin, at - begin
        same, arrived = frames.exchange(call, data)
        came: list[dict[int, int]] = [{} for _ in tables]
        for number in self._hosts if same else ():
            there, at = self._layout.hosts[number], arrived[number]
            wanted = [expected[rank] for rank in there for _, expected in tables]
            if (ctypes.c_int64 * len(wanted)).from_address(at)[:] != wanted:
                same = False
                break
            at += _SIZE_BYTES * len(wanted)
            for rank in there:
                for (_, expected), mine in zip(tables, came, strict=True):
                    if 0 < expected[rank] <= self._small_bytes:
                        mine[rank] = at
                        at += expected[rank]
        for (_, expected), mine, news in zip(tables, came, memory.all_news, strict=True):
            at = news.data_ptr()
            ctypes.c_int64.from_address(at).value = call if same else ~call
            at += _CALL_BYTES
            for rank in small(expected) if same else ():
                _copy(at, mine[rank], expected[rank])
                at += expected[rank]


def _placed(ranks: Iterator[int], nbytes: _Sizes, at: int) -> dict[int, int]:
    """Where the part of each rank lies, one behind the other from an address on."""
    found = {}
    for rank in ranks:
        found[rank] = at
        at += nbytes[rank]
    return found


class _Memory:
    """What the ranks of a host tell their leader, and get from it, in one exchange after the other.

    Attributes:
        told, news: of this rank.
        all_told, all_news: of all ranks of this host, on the leader.
    """

    def __init__(self, layout: Layout, told_bytes: int, news_bytes: int) -> None:
        self.told = torch.zeros(told_bytes, dtype=torch.uint8)
        self.news = torch.zeros(news_bytes, dtype=torch.uint8)
        count = len(layout.here) if layout.leader else 0
        self.all_told = [torch.zeros_like(self.told) for _ in range(count)]
        self.all_news = [torch.zeros_like(self.news) for _ in range(count)]
        self._rooms: list[torch.Tensor] = []

    def room(self, number: int, nbytes: int) -> int:
        """The address of memory for what goes to another host."""
        if number == len(self._rooms):
            self._rooms.append(torch.empty(nbytes, dtype=torch.uint8))
        return self._rooms[number].data_ptr()
