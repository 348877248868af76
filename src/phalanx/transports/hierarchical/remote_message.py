"""A message to or from a rank of another host, or from any rank: its state, and how threads ask about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from phalanx.diagnosis import recorder
from phalanx.diagnosis.call_site import capture, shown, text_of
from phalanx.errors import PhalanxError
from phalanx.transports.contract import Message
from phalanx.transports.hierarchical.gloo_engine import Transfer
from phalanx.transports.hierarchical.message_timeouts import Overdue
from phalanx.transports.hierarchical.message_way import Arrival, Way
from phalanx.transports.shm.mailbox import WithdrawableReceive

__all__ = ["RemoteMessage"]


class Mover(Protocol):
    """What moves the messages of a group (``messages.py``)."""

    overdue: Overdue

    def serve(self, message: RemoteMessage) -> None: ...

    def wait_for(self, message: RemoteMessage, timeout_s: float | None) -> None: ...

    def ask_inside(self, message: RemoteMessage, ask: Callable[[WithdrawableReceive], bool]) -> None: ...

    def explain(self, error: Exception, waiting: str) -> PhalanxError: ...


class RemoteMessage(Message):
    """A message to or from a rank of another host, or from any rank. Beside the fields of :class:`Message`:

    - ``outcome`` is how it ended, and its source. It is written once, under the group's lock, and read without it.
    - ``way``, ``body``, ``announced``, ``taken``, ``claimed`` and ``served`` are read and written under the group's
      lock.
    - ``inside`` is the receive from any rank of this host; it is set before any other thread knows the message.

    Attributes:
        way: the way that it travels; None for a receive from any rank, until it is known, and for one to this rank.
        body: the transfers of a large message.
        announced: whether the frame of a large message that is received has come.
        taken: whether it is a receive of a large message that another one receives aside, which ends this one too.
        claimed: whether a thread waits for the body.
        arrival: of a large message that is received to be set aside.
        served: the ways that are served because of it.
        waiters: a None for each thread that waits for it without a limit. (A list's append and pop are atomic.)
    """

    def __init__(self, mover: Mover, tensor: torch.Tensor, dtype: int, verb: str, peer: int | None, tag: int) -> None:
        super().__init__(tensor, verb, peer)
        self._mover = mover
        self._site = capture(2)
        self.tensor, self.dtype, self.nbytes, self.peer, self.tag = tensor, dtype, tensor.nbytes, peer, tag
        self.way: Way | None = None
        self.inside: WithdrawableReceive | None = None
        self.outcome: tuple[Exception | None, int] | None = None
        self.body: tuple[Transfer, Transfer] | None = None
        self.announced = self.taken = self.claimed = False
        self.number = 0
        self.arrival: Arrival | None = None
        self.served: list[Way] = []
        self.waiters: list[None] = []

    def _poll(self, watch: bool) -> None:
        if self.outcome is None:
            if not self.waiters:  # a thread that waits brings it, and another would only get in its way
                self._mover.serve(self)
            self._mover.ask_inside(self, lambda inside: inside.test(watch))
        self.conclude()

    def _await(self, timeout_s: float | None) -> None:
        self._mover.wait_for(self, timeout_s)
        with self._lock:
            self.conclude()

    def _expect(self) -> None:
        self._mover.overdue.begin(self)
        self._mover.serve(self)

    def conclude(self) -> None:
        """Settle it if it has ended. Called with the lock."""
        if self.outcome is not None and not self._settled:
            error, source = self.outcome
            if error is not None and not isinstance(error, PhalanxError):
                error = self._mover.explain(error, self.words())
            self._settle(error, source)
            del self.tensor

    @property
    def site(self) -> int:
        """The line of the program that called for it, by its number in this rank's recorder."""
        return recorder.number_of(self._site)

    @property
    def line(self) -> str:
        """The same as ``file:line``; empty if it is not known."""
        return text_of(self._site)

    def words(self) -> str:
        """What it is, in words, with the line that called for it. Called before it is settled."""
        line = shown(self.line)
        return f"{self._text()} at {line}" if line else self._text()
