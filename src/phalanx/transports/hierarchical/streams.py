"""What the leaders send each other from the shared memory of one host into that of another, in an all_to_all.

Memory waits for a message before the call that brings it, so that a leader may send at once. As much waits as a message
can hold, so none is longer, whatever the calls of the two sides are.

A leader sends its frame after the messages of a call, so when the frame has come they have come as well, and nobody
waits for the half of a message, which might never end (``gloo_engine.py``). That is so if the other engine knew before
that memory waits for the message. It is told so in the call with the last message but one, and has to have heard of
that, and of all that was sent before, when it has the frame of the call with the last one. Only the first two messages
of a stream may come later than the frame.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phalanx.transports.hierarchical.early_receives import wait_for
from phalanx.transports.hierarchical.exchange_memory import AREAS, ExchangeMemory
from phalanx.transports.hierarchical.lane import Engine, Transfer
from phalanx.transports.hierarchical.layout import Layout

__all__ = ["Streams", "Waiting"]

_TAG = 1 << 12  # and the next ones, for each rank of a host


class Waiting(NamedTuple):
    """Memory that waits for a message: where it begins, and whether the message may come later than the frame."""

    at: int
    late: bool
    transfer: Transfer


class Streams:
    """One stream of messages for each rank of a host to each other host; used by the leader alone.

    Args:
        layout: where the ranks are.
        engine: carries them.
        memory: of this host.
    """

    def __init__(self, layout: Layout, engine: Engine, memory: ExchangeMemory) -> None:
        self._leaders = layout.leaders
        self._engine = engine
        self._memory = memory
        self._waiting: dict[tuple[int, int], list[Waiting]] = {}  # for the next messages of each stream, in their order
        self._begun: dict[tuple[int, int], int] = {}  # how many messages of each stream memory has waited for

    def receive(self, host: int, place: int) -> Waiting:
        """Begin to receive the next message of the rank at a place of another host.

        The memory of the message before waits for a later one from now on: nobody may read it any more. It is called
        when the frame of the call has been sent, since the other leader waits for that.
        """
        stream = host, place
        waiting = self._waiting.setdefault(stream, [])
        while len(waiting) < AREAS:
            begun = self._begun.get(stream, 0)
            at = self._memory.incoming_at(host, place, begun % AREAS)
            transfer = self._engine.recv_standing(self._memory.incoming(at), self._leaders[host], _TAG + place)
            waiting.append(Waiting(at, begun < AREAS - 1, transfer))
            self._begun[stream] = begun + 1
        return waiting.pop(0)

    @staticmethod
    def finish(messages: list[Waiting]) -> None:
        """Return when they have come, as the frames have that were sent after them."""
        for message in messages:
            if not message.late:
                message.transfer.finish()
        wait_for([message.transfer for message in messages if message.late])

    def let_go(self) -> None:
        """The engine has been closed: keep none of its transfers, each of which keeps its connections."""
        self._waiting.clear()

    def send(self, host: int, message: torch.Tensor, place: int) -> Transfer:
        """Send another host what the rank at a place of this host has for it."""
        return self._engine.send(message, self._leaders[host], _TAG + place)
