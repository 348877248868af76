"""Between the keepers' connections and the supervisor's pipes: messages and output, without ever waiting for one side.

Output that the supervisor does not take yet waits here. If too much of a rank's output waits, its keeper's connection
is left unread; then the output waits in the network and in the keeper, and finally the rank itself waits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.launch.relay.channel import MESSAGE, Lost
from phalanx.launch.relay.crew import Member, Pipe

__all__ = ["Exchange"]


class Exchange:
    """The connections of all keepers that have taken the seats of their ranks.

    Args:
        selector: where the relay waits. The data of a keeper's connection is its rank, for :meth:`serve`; that of a
            pipe is a function to call.
        on_message: takes a rank and a message of its keeper.
        on_lost: takes a rank whose keeper's connection has ended; it has been closed.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_message: Callable[[Member, dict[str, Any]], None],
        on_lost: Callable[[Member], None],
    ) -> None:
        self._selector = selector
        self._on_message = on_message
        self._on_lost = on_lost

    def say(self, rank: Member, **message: Any) -> None:
        """Send a message to the rank's keeper, if it is still there."""
        if rank.channel is not None:
            rank.channel.say(**message)
            self._await(rank)

    def send(self, rank: Member, kind: bytes, data: bytes) -> None:
        """Send bytes to the rank's keeper, if it is still there."""
        if rank.channel is not None:
            rank.channel.send(kind, data)
            self._await(rank)

    def serve(self, rank: Member, events: int) -> None:
        """The connection of a rank's keeper is ready: write the bytes that wait, and read those that have come."""
        channel = rank.channel
        if channel is None:
            return
        if events & selectors.EVENT_WRITE:
            channel.flush()
        frames: list[tuple[bytes, bytes]] = []
        if events & selectors.EVENT_READ:
            try:
                frames = channel.receive()
            except Lost:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(channel)
                channel.close()
                rank.channel = None
                self._on_lost(rank)
                return
        self.take(rank, frames)

    def take(self, rank: Member, frames: Sequence[tuple[bytes, bytes]]) -> None:
        """Act on frames that a rank's keeper has sent, and wait for more."""
        for kind, data in frames:
            if kind == MESSAGE:
                self._on_message(rank, json.loads(data))
            else:
                rank.pipes[kind].waiting += data
                self._feed(rank, rank.pipes[kind])
        self._await(rank)

    def _await(self, rank: Member) -> None:
        """Wait for the keeper's messages, unless too much output waits here; and for room, if bytes wait to be sent."""
        if rank.channel is None:
            return
        events = selectors.EVENT_WRITE if rank.channel.waiting else 0
        if not rank.congested:
            events |= selectors.EVENT_READ
        known = rank.channel.fileno() in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(rank.channel)
        elif known:
            self._selector.modify(rank.channel, events, rank)
        else:
            self._selector.register(rank.channel, events, rank)

    def _feed(self, rank: Member, pipe: Pipe) -> None:
        """Write what a rank has printed, as far as the supervisor takes it now."""
        pipe.flush()
        known = pipe.descriptor in self._selector.get_map()
        if pipe.waiting and not known:
            on_room = functools.partial(self._on_room, rank, pipe)
            self._selector.register(pipe.descriptor, selectors.EVENT_WRITE, on_room)
        elif not pipe.waiting and known:
            self._selector.unregister(pipe.descriptor)

    def _on_room(self, rank: Member, pipe: Pipe) -> None:
        self._feed(rank, pipe)
        self._await(rank)
