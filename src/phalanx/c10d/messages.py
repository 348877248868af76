"""The messages of one group that are under way, and the thread that moves those that no thread waits for.

A message moves whenever its rank calls into the group's messages. One that is neither done nor waited for after two
milliseconds is taken over by a thread, so that a rank that computes, or waits in a collective of another group, still
sends what it has begun to send.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time

import torch

from phalanx.c10d.work import MessageWork
from phalanx.errors import BackendError, ClosedError
from phalanx.system.threads import start
from phalanx.transports.contract import Communicator
from phalanx.words import tell

__all__ = ["Messages"]

PATIENCE_S = 0.002
LEAVING_S = 1.0  # how long a group that closes waits for threads that are in a call about a message


class Messages:
    """The messages of one group that were not done when they were called.

    | field | writer | readers | guard |
    |---|---|---|---|
    | ``_thread``, ``closed`` | script's threads | all | ``_starting`` to write |
    | ``_left`` | script's threads add | the thread | the queue's own |
    | ``_pending`` | the thread; ``close`` once it has ended | the same | |
    | ``_leaving`` | who ends the process | the thread | one assignment |

    In a forked child all of it counts as closed: the messages are the parent's, in memory that it shares with the other
    ranks. Where a signal handler raises while the thread is being started there may be none: then a message moves on
    only while it is waited for.
    """

    def __init__(self, name: str, communicator: Communicator) -> None:
        self._name = name
        self._communicator = communicator
        self._left: queue.SimpleQueue[MessageWork | None] = queue.SimpleQueue()
        self._pending: list[MessageWork] = []
        self._held: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._leaving = self.closed = self._inherited = self._has_warned = False

    def look_after(self, work: MessageWork) -> None:
        """Make sure that ``work`` gets done, and its tensors live until then, even if it is dropped."""
        self._left.put(work)
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.closed:
                    self._start_thread()

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor as long as the group: the transport may use it for a message that nobody looks after."""
        self._held.append(tensor)

    def _start_thread(self) -> None:
        # Set first: a signal handler may raise while it starts, and two threads would take each other's messages.
        self._thread = threading.Thread(target=self._serve, name=f"phalanx-mail-{self._name}", daemon=True)
        try:
            start(self._thread)
        except BackendError as error:
            self._thread = None
            # The message is under way already, so that to raise now would have it sent again if the call is repeated.
            if not self._has_warned:
                self._has_warned = True
                tell(f"warning: {error}. Until it can have one, a message moves on only while it is waited for")

    def refuse_if_closed(self) -> None:
        if self._inherited:
            raise ClosedError.of_parent(f"process group {self._name!r}", os.getpid())
        if self.closed:
            raise ClosedError(f"process group {self._name!r} was used after it had been destroyed")

    def close(self) -> None:
        """End the thread; messages that are not done are given up, and raise ClosedError."""
        with self._starting:
            self.closed = True
        self._communicator.end_messages()
        self._left.put(None)
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._take_new()
        # A thread that waits for a message comes back now, but may need a moment to explain what it found.
        patience = time.monotonic() + LEAVING_S
        for work in self._pending:
            while not work.attend() and time.monotonic() < patience:
                time.sleep(PATIENCE_S)
        self._pending = []

    def leave(self) -> list[threading.Thread]:
        """Ask the thread to end, whatever is still under way; the process exits."""
        self._leaving = True
        self._left.put(None)
        own = [self._thread] if self._thread is not None and self._thread.is_alive() else []
        return own if self._inherited else own + self._communicator.leave()

    def give_back(self) -> None:
        """Give back what would disturb the interpreter's end."""
        if not self._inherited:
            self._communicator.give_back()

    def inherit(self) -> None:
        """Leave the messages to the parent: this process was forked from the group's own."""
        self._inherited = self.closed = True
        self._left, self._pending, self._thread = queue.SimpleQueue(), [], None
        self._starting = threading.Lock()

    def _serve(self) -> None:
        while not (self.closed or self._leaving):
            if self._take_new(wait=not self._pending):
                # Most messages are waited for at once by their own thread; then this one only gets in the way.
                time.sleep(PATIENCE_S)
            self._pending = [work for work in self._pending if not work.attend()]
            if self._pending and not (self.closed or self._leaving):
                self._communicator.rest()

    def _take_new(self, *, wait: bool = False) -> bool:
        """Take what has come to be looked after, or wait until something has; whether anything had."""
        before = len(self._pending)
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._left.get(wait)
                wait = False
                if work is not None:  # a wake-up
                    self._pending.append(work)
        return len(self._pending) > before
