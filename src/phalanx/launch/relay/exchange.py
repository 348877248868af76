"""Between the connections of keepers or agents and the supervisor's pipes, without ever waiting for one side.

Output that the supervisor does not take yet waits here. If too much of a rank's output waits, its keeper's connection
is left unread; then the output waits in the network and in the keeper, and finally the rank itself waits.

The kernel ends a connection to a host that is out of reach. But it waits anew for an answer to whatever is sent there
meanwhile, such as a question why ranks wait, or the order to end. So that is looked at here as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from phalanx.launch.relay.channel import MESSAGE, Channel, Lost
from phalanx.launch.relay.crew import Pipe
from phalanx.wire.acknowledged import LOOK_S

__all__ = ["Exchange", "Party"]

# A host is out of reach if nothing has been heard of it for so long, though its kernel is probed every second; and if
# what has been sent to it is on its way for a moment, because an answer may be coming when this machine was suspended.
_SILENT_S, _UNDER_WAY_S = 3.5, 1.0


class Party(Protocol):
    """The process at the other end of a connection: a rank's keeper, or a host's agent.

    Attributes:
        channel: the connection; None before it has come and after it has gone.
    """

    channel: Channel | None

    @property
    def congested(self) -> bool:
        """Whether so much output of it waits here that it should wait too."""

    def pipe(self, kind: bytes, data: bytes) -> tuple[Pipe, bytes]:
        """The pipe to the supervisor for a frame of output, and what is to be written to it."""


P = TypeVar("P", bound=Party)


class Exchange(Generic[P]):
    """The connections of all parties that have come.

    Args:
        selector: where the relay waits. The data of a connection is its party, for :meth:`serve`; that of a pipe is a
            function to call.
        on_first: takes a new connection and its first message; returns the party, whose connection this now is.
        on_message: takes a party and a message of its.
        on_lost: takes a party whose connection has ended, and whether its host does not answer any more; the
            connection has been closed.

    Attributes:
        due_at: when to :meth:`look` next.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_first: Callable[[Channel, dict[str, Any]], P],
        on_message: Callable[[P, dict[str, Any]], None],
        on_lost: Callable[[P, bool], None],
    ) -> None:
        self._selector = selector
        self._on_first = on_first
        self._on_message = on_message
        self._on_lost = on_lost
        self._sent: dict[P, float] = {}  # since when something may be on its way to a party
        self.due_at = math.inf

    def welcome(self, channel: Channel) -> None:
        """Wait for the first message of a process that has proven the key, which says what party it is."""
        self._selector.register(channel, selectors.EVENT_READ, functools.partial(self._seat, channel))
        self._seat(channel)

    def _seat(self, channel: Channel) -> None:
        try:
            frames = channel.receive()
        except Lost:
            self._selector.unregister(channel)
            channel.close()
            return
        if frames:
            (_, first), *more = frames
            self.take(self._on_first(channel, json.loads(first)), more)

    def continue_when_called(self, parties: Iterable[P]) -> None:
        """Have the kernel continue this process, if somebody has stopped it, when one of these parties says anything.

        The supervisor cannot see the ranks, so it would not learn of their ends. Before there are ranks a stopped relay
        is left alone, because its limits on time would go on in a job that is suspended as a whole.
        """
        for party in parties:
            if party.channel is not None:
                party.channel.continue_when_called()

    def say(self, party: P, **message: Any) -> None:
        """Send a message to a party, if it is still there."""
        if party.channel is not None:
            party.channel.say(**message)
            self._note(party)
            self._await(party)

    def send(self, party: P, kind: bytes, data: bytes) -> None:
        """Send bytes to a party, if it is still there."""
        if party.channel is not None:
            party.channel.send(kind, data)
            self._note(party)
            self._await(party)

    def serve(self, party: P, events: int) -> None:
        """A party's connection is ready: write the bytes that wait, and read those that have come."""
        channel = party.channel
        if channel is None:
            return
        if events & selectors.EVENT_WRITE:
            channel.flush()
        frames: list[tuple[bytes, bytes]] = []
        if events & selectors.EVENT_READ:
            try:
                frames = channel.receive()
            except Lost as lost:
                self.drop(party)
                self._on_lost(party, lost.silent)
                return
        self.take(party, frames)

    def _note(self, party: P) -> None:
        """Something is on its way to a party."""
        now = time.monotonic()
        self._sent.setdefault(party, now)
        self.due_at = min(self.due_at, now + LOOK_S)

    def look(self, now: float) -> None:
        """Look whether what has been sent to the parties arrives; those whose hosts are out of reach are lost."""
        if now < self.due_at:
            return
        for party, since in list(self._sent.items()):
            silent_s = party.channel.unanswered_s() if party.channel is not None else 0.0
            lost = silent_s >= _SILENT_S and now - since >= _UNDER_WAY_S
            if lost or not silent_s:
                del self._sent[party]
            if lost:
                self.drop(party)
                self._on_lost(party, True)
        self.due_at = now + LOOK_S if self._sent else math.inf

    def drop(self, party: P) -> None:
        """Close a party's connection, if it is still there."""
        if party.channel is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(party.channel)
            party.channel.close()
            party.channel = None

    def take(self, party: P, frames: Sequence[tuple[bytes, bytes]]) -> None:
        """Act on frames that a party has sent, and wait for more."""
        for kind, data in frames:
            if kind == MESSAGE:
                self._on_message(party, json.loads(data))
            else:
                pipe, output = party.pipe(kind, data)
                pipe.waiting += output
                self._feed(party, pipe)
        self._await(party)

    def _await(self, party: P) -> None:
        """Wait for the party's messages, unless too much output waits here; and for room, if bytes wait to be sent."""
        if party.channel is None:
            return
        events = selectors.EVENT_WRITE if party.channel.waiting else 0
        if not party.congested:
            events |= selectors.EVENT_READ
        known = party.channel.fileno() in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(party.channel)
        elif known:
            self._selector.modify(party.channel, events, party)
        else:
            self._selector.register(party.channel, events, party)

    def _feed(self, party: P, pipe: Pipe) -> None:
        """Write what a rank has printed, as far as the supervisor takes it now."""
        pipe.flush()
        known = pipe.descriptor in self._selector.get_map()
        if pipe.waiting and not known:
            on_room = functools.partial(self._on_room, party, pipe)
            self._selector.register(pipe.descriptor, selectors.EVENT_WRITE, on_room)
        elif not pipe.waiting and known:
            self._selector.unregister(pipe.descriptor)

    def _on_room(self, party: P, pipe: Pipe) -> None:
        self._feed(party, pipe)
        self._await(party)
