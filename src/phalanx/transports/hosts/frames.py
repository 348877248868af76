"""What the leaders of the hosts tell each other in each collective: which call it is, and a little of its data.

A frame is a number that is equal for equal calls, followed by data for the other host if that is small. A leader tells
the engine where the next frame of another leader goes before it sends its own, which that one needs before it can go
on; so a frame takes one way and no answer. Nothing else of a call moves before its frames have been compared: an engine
may end the process, as Gloo does, when what is sent is longer than the memory that waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from phalanx.transports.hosts.lane import Engine, Transfer

__all__ = ["Frames"]

_HEAD = struct.Struct("<Qq")  # the number of the frame, and that of the call
_HEAD_BYTES = 64  # so that the data is aligned
_TAG = 0


class Frames:
    """The frames of one group, on the leader of a host.

    Args:
        engine: carries them.
        hosts: the group ranks of each host, of which the first is the leader.
        host: this leader's host.
        nbytes: the most data that one host sends another in a frame.
    """

    def __init__(self, engine: Engine, hosts: Sequence[Sequence[int]], host: int, nbytes: int) -> None:
        self._engine = engine
        self._host = host
        self._peers = {number: members[0] for number, members in enumerate(hosts) if number != host}
        # Before the data of an all_to_all there are the sizes of all its parts.
        sizes = {number: _HEAD_BYTES + nbytes + 8 * len(hosts[host]) * len(hosts[number]) for number in self._peers}
        self._outgoing: list[bytearray] = []
        self._largest = max(sizes.values(), default=0)
        self._incoming = [{number: bytearray(size) for number, size in sizes.items()} for _ in range(2)]
        self._coming: list[dict[int, Transfer]] = []  # of the frames to come, in their order
        self._count = 0

    def exchange(
        self, call: int, data: Mapping[int, torch.Tensor] | None = None
    ) -> tuple[dict[int, int], dict[int, torch.Tensor]]:
        """Tell the other leaders the call, and hear theirs.

        Args:
            call: a number that is equal for equal calls.
            data: for other hosts, by their numbers: flat tensors, of at most ``nbytes`` each. The same tensor may
                be for several.

        Returns:
            The calls of the hosts; and of each other host memory that begins with the data that it sent. It is valid
            until the next exchange, and what follows after the data is undefined.
        """
        frames: dict[int | None, torch.Tensor] = {}
        for tensor in (None, *(data or {}).values()):
            if (key := None if tensor is None else id(tensor)) not in frames:
                frames[key] = self._packed(len(frames), call, tensor)
        while len(self._coming) < 2:
            self._listen()
        sent = []
        for number, rank in self._peers.items():
            given = (data or {}).get(number)
            sent.append(self._engine.send(frames[None if given is None else id(given)], rank, _TAG))
        for transfer in (*self._coming.pop(0).values(), *sent):
            transfer.wait()
        calls, parts = {self._host: call}, {}
        for number, memory in self._incoming[self._count % 2].items():
            count, calls[number] = _HEAD.unpack_from(memory)
            if count != self._count:
                calls[number] = ~call  # out of step, which only a mistake of this file could bring about
            parts[number] = torch.frombuffer(memory, dtype=torch.uint8)[_HEAD_BYTES:]
        self._count += 1
        return calls, parts

    def _packed(self, number: int, call: int, data: torch.Tensor | None) -> torch.Tensor:
        """A frame, in the memory of this number."""
        if number == len(self._outgoing):
            self._outgoing.append(bytearray(self._largest))
        memory = self._outgoing[number]
        _HEAD.pack_into(memory, 0, self._count, call)
        nbytes = 0 if data is None else data.nbytes
        frame = torch.frombuffer(memory, dtype=torch.uint8)
        if data is not None and nbytes:
            frame[_HEAD_BYTES : _HEAD_BYTES + nbytes] = data.view(torch.uint8)
        return frame[: _HEAD_BYTES + nbytes]

    def _listen(self) -> None:
        incoming = self._incoming[(self._count + len(self._coming)) % 2]
        self._coming.append({})
        for number, rank in self._peers.items():
            memory = torch.frombuffer(incoming[number], dtype=torch.uint8)
            self._coming[-1][number] = self._engine.recv(memory, rank, _TAG)
