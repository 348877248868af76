"""What the leaders of the hosts tell each other in each collective: the call, its line, and a little of its data.

A frame is a number that is equal for equal calls, followed by data for the other host if that is small. A leader tells
the engine where the next frame of another leader goes before it sends its own, which that one needs before it can go
on; so a frame takes one way and no answer. What else a call moves is sent when its frames have been compared: an engine
may end the process, as Gloo does, when what is sent is longer than the memory that waits for it. Only into memory that
waits for the most that can be sent may it go before (``streams.py``).

Frames are the larger part of what a small collective costs, so they are memory of the leader's that is kept, and data
is copied by addresses: making a tensor of a part of another takes longer than to copy what is in it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence

import torch

from phalanx.transports.hierarchical.crossing import Lines
from phalanx.transports.hierarchical.lane import SHORT_BYTES, Engine, Transfer

__all__ = ["Data", "Frames"]

# The number of the frame, that of the call, the bytes of data, and the line of the program that makes the call.
_HEAD = struct.Struct("<QqQH")
_HEAD_BYTES = 64  # so that the data is aligned
_TAG = 0
_TAIL_TAG = 4  # and the next ones, for each further piece of a long frame

Data = tuple[int, int]  # where it lies, and how many bytes it has
_NOTHING = (0, 0)


class _Memory:
    """Memory for a frame, and the first piece of it, which is all of most frames."""

    __slots__ = ("address", "head", "piece", "whole")

    def __init__(self, nbytes: int, piece_nbytes: int) -> None:
        self.whole = torch.empty(nbytes, dtype=torch.uint8)
        self.piece = self.whole[:piece_nbytes]
        self.head = memoryview(self.whole.numpy())  # type: ignore[arg-type]
        self.address = self.whole.data_ptr()


class Frames:
    """The frames of one group, on the leader of a host.

    A frame that is longer than an engine can wait for directly travels in pieces. The first of them waits in the memory
    of the frame, the others where they wait for the next long frame, whichever that is.

    Args:
        engine: carries them.
        hosts: the group ranks of each host, of which the first is the leader.
        host: this leader's host.
        nbytes: the most data that one host sends another in a frame.
        lines: compares the lines of calls.
    """

    def __init__(self, engine: Engine, hosts: Sequence[Sequence[int]], host: int, nbytes: int, lines: Lines) -> None:
        self._engine = engine
        self._peers = {number: members[0] for number, members in enumerate(hosts) if number != host}
        # Before the data of an all_to_all there are the sizes of all its parts. All hosts cut frames into equal pieces.
        self._largest = _HEAD_BYTES + nbytes + 8 * max(map(len, hosts)) ** 2
        self._piece = -(-self._largest // -(-self._largest // SHORT_BYTES))
        # Of this frame and of the one before, which may be on its way until the others' next frames have come.
        self._outgoing: list[list[_Memory]] = [[], []]
        self._sent: list[list[Transfer]] = [[], []]
        # A frame may be read until the one after it is exchanged, and the next one waits in the other's place.
        self._incoming = [{number: self._memory() for number in self._peers} for _ in range(2)]
        self._coming: list[list[Transfer]] = []  # of the frames to come, in their order
        self._tails: dict[tuple[int, int], tuple[torch.Tensor, Transfer]] = {}  # by host, and where they belong
        self._lines = lines
        self._count = self._call = self._line = 0

    def exchange(self, call: int, data: Mapping[int, Data]) -> tuple[bool, dict[int, int]]:
        """:meth:`begin`, and what :meth:`end` returns."""
        self.begin(call, data)
        return self.end()

    def begin(self, call: int, data: Mapping[int, Data]) -> None:
        """Tell the other leaders the call.

        Args:
            call: a number that is equal for equal calls.
            data: for other hosts, by their numbers, at most ``nbytes`` each. The same may be for several.
        """
        self._line = self._lines.own()
        frames: dict[Data, tuple[_Memory, int]] = {}
        sent = self._sent[self._count % 2]
        while len(self._coming) < 2:
            self._listen()
        for number, rank in self._peers.items():
            part = data.get(number, _NOTHING)
            if part not in frames:
                frames[part] = self._packed(len(frames), call, part)
            self._send(*frames[part], rank, sent)
        self._call = call

    def end(self) -> tuple[bool, dict[int, int]]:
        """Hear the others' calls.

        Returns:
            Whether all have made the same call; and of each other host the address of what it sent. That is valid
            until the next exchange, and what follows after the data is undefined.

        Raises:
            Crossed: the calls are the same, and their lines show that they do not belong together.
        """
        for transfer in self._coming.pop(0):
            transfer.wait()
        # The others have sent theirs, so they have read those before: these are done, and no wait for them can last.
        before = self._sent[1 - self._count % 2]
        for transfer in before:
            transfer.wait()
        before.clear()
        same, parts, lines = True, {}, {}
        for number, memory in self._incoming[self._count % 2].items():
            count, call, nbytes, lines[number] = _HEAD.unpack_from(memory.head)
            if count != self._count or call != self._call:
                same = False  # a count out of step only a mistake of this file could bring about
            self._join(number, memory, _HEAD_BYTES + nbytes)
            parts[number] = memory.address + _HEAD_BYTES
        self._count += 1
        if same:
            self._lines.meet(self._line, lines)
        return same, parts

    def release(self) -> None:
        """No frame follows; the last ones need not have been sent."""
        for sent in self._sent:
            self._engine.outlive(sent)
            sent.clear()

    def let_go(self) -> None:
        """The engine has been closed: keep none of its transfers, each of which keeps its connections."""
        self._coming.clear()
        self._tails.clear()

    def _memory(self) -> _Memory:
        return _Memory(self._largest, self._piece)

    def _packed(self, number: int, call: int, data: Data) -> tuple[_Memory, int]:
        """A frame, in the memory of this number, and its bytes."""
        outgoing = self._outgoing[self._count % 2]
        if number == len(outgoing):
            outgoing.append(self._memory())
        memory = outgoing[number]
        address, nbytes = data
        _HEAD.pack_into(memory.head, 0, self._count, call, nbytes, self._line)
        if nbytes:
            ctypes.memmove(memory.address + _HEAD_BYTES, address, nbytes)
        return memory, _HEAD_BYTES + nbytes

    def _send(self, memory: _Memory, nbytes: int, rank: int, sent: list[Transfer]) -> None:
        sent.append(self._engine.send_kept(memory.whole[: min(nbytes, self._piece)], rank, _TAG))
        for turn, begin in enumerate(range(self._piece, nbytes, self._piece)):
            tail = memory.whole[begin : min(nbytes, begin + self._piece)]
            sent.append(self._engine.send_kept(tail, rank, _TAIL_TAG + turn))

    def _listen(self) -> None:
        incoming = self._incoming[(self._count + len(self._coming)) % 2]
        peers = self._peers.items()
        self._coming.append([self._engine.recv(incoming[number].piece, rank, _TAG) for number, rank in peers])
        for number in self._peers:
            for begin in range(self._piece, self._largest, self._piece):
                if (number, begin) not in self._tails:
                    self._await_tail(number, begin)

    def _await_tail(self, number: int, begin: int, memory: torch.Tensor | None = None) -> None:
        """Give the engine memory for the piece that begins there in a frame of another host."""
        if memory is None:
            memory = torch.empty(self._piece, dtype=torch.uint8)
        tag = _TAIL_TAG + begin // self._piece - 1
        self._tails[number, begin] = memory, self._engine.recv(memory, self._peers[number], tag)

    def _join(self, number: int, memory: _Memory, nbytes: int) -> None:
        """Bring the further pieces of a long frame behind its first one."""
        for begin in range(self._piece, nbytes, self._piece):
            tail, transfer = self._tails[number, begin]
            transfer.wait()
            ctypes.memmove(memory.address + begin, tail.data_ptr(), min(nbytes - begin, self._piece))
            self._await_tail(number, begin, tail)
