"""The memory in which the ranks of a host put what they send in an all_to_all between hosts, and find what has come.

Between who writes an area and who reads it stands a collective inside the host, which also makes visible what was
written. Each exchange has two: the *gather*, after which the leader reads what all ranks of the host have written, and
then the *verdict*, with which the leader lets all ranks read. If a rank dies before one of them, the others raise in it
and read nothing; if it dies later, what it has written is whole.

========  =========================================  ==========================================
area      written                                    read
========  =========================================  ==========================================
given,    by their rank, before the gather           by the leader, between the two
expected
parts     by their rank, before the gather           by the leader, between the two
outgoing  by the sending rank, before the gather     by the engine, until the leader returns
inside    by the sending rank, before the gather     by the receiving rank, after the verdict
incoming  by the engine, until the leader has been   by the receiving rank, after the verdict
          told so, before the verdict
places,   by the leader, between the two             by their rank, after the verdict
news
========  =========================================  ==========================================

A rank may begin the next exchange while another one still reads after the verdict of this one, or the engine does. So
what is read then is there twice, by turns: the leader gives no verdict of the next exchange before all have come to it,
and it has itself. The engine gets memory for what comes only after a gather, when nobody reads any more.
"""

from __future__ import annotations

import ctypes

import torch

from phalanx.transports.contract import Communicator
from phalanx.transports.hierarchical.layout import Layout
from phalanx.transports.shm.segment import share_memory

__all__ = ["AREAS", "ExchangeMemory"]

AREAS = 3  # for what comes of a rank of another host: they take turns, and the engine has all but one
_LINE_BYTES = 64  # areas begin at cache lines


class ExchangeMemory:
    """The memory of one host for the exchanges of one group; every rank of the host makes it at the same time.

    Args:
        layout: where the ranks of the group are.
        local: a communicator of the ranks of this host.
        small_bytes: the largest part that goes in a frame.
        middle_bytes: the largest part that goes by way of this memory.

    Attributes:
        address, nbytes: where it begins, and how much it is.
        given, expected: of each rank of this host: how many bytes it sends to, and expects of, each rank.
        parts: of each rank of this host: the address of what it sends in frames.
        news: of each rank of this host: the address of what has come for it in frames.
        places: of each rank of this host: where, from ``address`` on, what has come from each rank begins.
        inside: by turn, sender and receiver, by their places on this host: the address of what one sends the other.
        outgoing: by turn, host, and place on this host: where, from ``address`` on, what a rank sends there begins.
    """

    def __init__(self, layout: Layout, local: Communicator, small_bytes: int, middle_bytes: int) -> None:
        here, size = len(layout.here), sum(map(len, layout.hosts))
        most = max(map(len, layout.hosts))
        others = [number for number in range(len(layout.hosts)) if number != layout.host]
        self._end = 0
        # The most that one rank sends to another host, which is as much as a rank there sends to this one.
        self._stream_bytes = most * middle_bytes
        words_bytes = size * ctypes.sizeof(ctypes.c_int64)
        given, expected, places = [self._areas(here, words_bytes) for _ in range(3)]
        parts, news = [self._areas(here, small_bytes * (size - here)) for _ in range(2)]
        inside = [[self._areas(here, middle_bytes) for _ in range(here)] for _ in range(2)]
        self.outgoing = [{number: self._areas(here, self._stream_bytes) for number in others} for _ in range(2)]
        self._incoming = {
            (number, place): self._areas(AREAS, self._stream_bytes)
            for number in others
            for place in range(len(layout.hosts[number]))
        }
        self._whole = share_memory(local, self._end)
        self.address, self.nbytes = self._whole.data_ptr(), self._whole.nbytes
        self.given, self.expected, self.places = (
            [(ctypes.c_int64 * size).from_address(self.address + at) for at in areas]
            for areas in (given, expected, places)
        )
        self.parts, self.news = ([self.address + at for at in areas] for areas in (parts, news))
        self.inside = [[[self.address + at for at in areas] for areas in turn] for turn in inside]

    def _areas(self, count: int, nbytes: int) -> list[int]:
        """So many areas of so many bytes, by where they begin."""
        each = -(-nbytes // _LINE_BYTES) * _LINE_BYTES
        begin, self._end = self._end, self._end + count * each
        return list(range(begin, self._end, each)) if each else [begin] * count

    def part(self, at: int, nbytes: int) -> torch.Tensor:
        """So many bytes of it."""
        return self._whole[at : at + nbytes]

    def incoming_at(self, host: int, place: int, number: int) -> int:
        """Where one of the areas begins for what comes of a rank of another host."""
        return self._incoming[host, place][number]

    def incoming(self, at: int) -> torch.Tensor:
        """The area that begins there."""
        return self.part(at, self._stream_bytes)
