"""What the leaders of the hosts tell each other in each collective: which call it is, and a little of its data.

A frame is a number that is equal for equal calls, followed by the host's data if that is small. A leader tells the
engine where the next frame of another leader goes before it sends its own, which that one needs before it can go on; so
a frame takes one way and no answer. Nothing else of a call moves before its frames have been compared: an engine may
end the process, as Gloo does, when what is sent is longer than the memory that waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from phalanx.transports.hosts.lane import Engine, Transfer

__all__ = ["SMALL_BYTES", "Frames"]

# The most data that a host's frame can carry.
SMALL_BYTES = 16 * 1024
_HEAD = struct.Struct("<Qq")  # the number of the frame, and that of the call
_HEAD_BYTES = 64  # so that the data is aligned
_TAG = 0


class Frames:
    """The frames of one group, on the leader of a host.

    Args:
        engine: carries them.
        leaders: the group ranks of the leaders, one of each host.
        host: this leader's host.
    """

    def __init__(self, engine: Engine, leaders: Sequence[int], host: int) -> None:
        self._engine = engine
        self._host = host
        self._peers = {number: rank for number, rank in enumerate(leaders) if number != host}
        self._outgoing = bytearray(_HEAD_BYTES + SMALL_BYTES)
        self._incoming = [{number: bytearray(_HEAD_BYTES + SMALL_BYTES) for number in self._peers} for _ in range(2)]
        self._coming: list[dict[int, Transfer]] = []  # of the frames to come, in their order
        self._count = 0

    def exchange(self, call: int, data: torch.Tensor | None = None) -> tuple[dict[int, int], list[torch.Tensor]]:
        """Tell the other leaders the call, and hear theirs.

        Args:
            call: a number that is equal for equal calls.
            data: bytes of this host, at most ``SMALL_BYTES``; a flat tensor.

        Returns:
            The calls of the hosts, and memory with the data of each; it is valid until the next exchange, and what
            follows after the data is undefined.
        """
        outgoing = self._outgoing
        _HEAD.pack_into(outgoing, 0, self._count, call)
        nbytes = 0 if data is None else data.nbytes
        frame = torch.frombuffer(outgoing, dtype=torch.uint8)
        if data is not None and nbytes:
            frame[_HEAD_BYTES : _HEAD_BYTES + nbytes] = data.view(torch.uint8)
        frame = frame[: _HEAD_BYTES + nbytes]
        while len(self._coming) < 2:
            self._listen()
        sent = [self._engine.send(frame, rank, _TAG) for rank in self._peers.values()]
        for transfer in (*self._coming.pop(0).values(), *sent):
            transfer.wait()
        calls, parts = {self._host: call}, []
        for number in range(len(self._peers) + 1):
            memory = outgoing
            if number != self._host:
                memory = self._incoming[self._count % 2][number]
                count, calls[number] = _HEAD.unpack_from(memory)
                if count != self._count:
                    calls[number] = ~call  # out of step, which only a mistake of this file could bring about
            parts.append(torch.frombuffer(memory, dtype=torch.uint8)[_HEAD_BYTES:])
        self._count += 1
        return calls, parts

    def _listen(self) -> None:
        incoming = self._incoming[(self._count + len(self._coming)) % 2]
        self._coming.append({})
        for number, rank in self._peers.items():
            memory = torch.frombuffer(incoming[number], dtype=torch.uint8)
            self._coming[-1][number] = self._engine.recv(memory, rank, _TAG)
