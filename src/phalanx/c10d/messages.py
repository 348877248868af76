"""The messages of one group: their handles, and the thread that moves those that no thread waits for.

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
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.c10d.progress import LateFuture
from phalanx.c10d.torch_versions import uncompiled
from phalanx.c10d.work import DoneWork, Handle, seconds_of, still_under_way
from phalanx.diagnosis import call_site
from phalanx.errors import BackendError, ClosedError, PhalanxError
from phalanx.system.threads import start
from phalanx.transports.contract import Communicator, Message, message_text
from phalanx.words import tell

__all__ = ["Messages"]

PATIENCE_S = 0.002
LEAVING_S = 1.0  # how long a group that closes waits for threads that are in a call about a message


@uncompiled
class MessageWork(LateFuture, Handle):
    """The handle of one send or receive, for the script's threads and the thread of :class:`Messages`.

    ``_write_back`` is written under ``_lock``, once.
    """

    def __init__(self, message: Message, tensors: list[torch.Tensor], write_back: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._lock = threading.Lock()
        self._message = message
        self._write_back = write_back
        # The thread of Messages may be the first to find that the message failed, and its own stack does not show the
        # call. This costs half a microsecond, while the message is under way.
        self._site = call_site.capture(2)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is done, as :meth:`PhalanxWork.wait`."""
        limit_s = seconds_of(timeout)
        try:
            done = self._message.wait(limit_s)
        except PhalanxError:
            self._settle(False)
            raise
        if not done:
            raise still_under_way("message", limit_s or 0.0)
        self._settle(True)
        return True

    def is_completed(self) -> bool:
        return self._ask()[0]

    def exception(self) -> BaseException | None:
        return self._ask()[1]

    def source_rank(self) -> int:
        return self._message.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors. A caller that has one waits, so the group's timeout counts from here."""
        outcome = self.future_of(self._outcome)
        if not self.is_completed():
            self._message.expect()
        return outcome

    def attend(self) -> bool:
        """Do what can be done now; whether nothing is left to do. Called by the thread of :class:`Messages`."""
        call_site.running.site = self._site
        try:
            return self._ask(watch=self._future is not None)[0]
        except RuntimeError:  # torch cannot write to the tensor: who waits for the message tries again, and is told
            return True
        finally:
            call_site.running.site = None

    def _ask(self, watch: bool = True) -> tuple[bool, PhalanxError | None]:
        """Return whether it is done, and with what error."""
        try:
            done = self._message.test(watch)
        except PhalanxError as error:
            self._settle(False)
            return True, error
        if done:
            self._settle(True)
        return done, None

    def _settle(self, success: bool) -> None:
        """Copy the data of a message that is done into the user's tensor, and complete the future."""
        if self._completed:
            return
        if self._write_back:
            with self._lock:
                if self._write_back and success:
                    tensor, stand_in = self._write_back
                    tensor.detach().copy_(stand_in)
                self._write_back = []
        if (future := self.settle()) is not None:
            future.set_result(None)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors


class Messages:
    """The messages of one group that were not done when they were called.

    | field | writer | readers | guard |
    |---|---|---|---|
    | ``_thread``, ``closed`` | script's threads | all | ``_starting`` to write |
    | ``_left`` | script's threads add | the thread | the queue's own |
    | ``_pending`` | the thread; ``close`` once it has ended | the same | |
    | ``_leaving`` | who ends the process | the thread | one assignment |

    Where no thread could be started a message moves on only while it is waited for.
    """

    def __init__(self, name: str, communicator: Communicator) -> None:
        self._name = name
        self._communicator = communicator
        self._left: queue.SimpleQueue[MessageWork | None] = queue.SimpleQueue()
        self._pending: list[MessageWork] = []
        self._held: list[torch.Tensor] = []  # in use by messages that nobody looks after
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._leaving = self.closed = self._inherited = self._has_warned = False

    def begin(
        self,
        start: Callable[[torch.Tensor, int | None, int], Message],
        verb: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        tensors: list[torch.Tensor],
        write_back: list[torch.Tensor],
    ) -> dist.Work:
        """Start a message, and make sure that it gets done and its tensors live until then, if its handle is dropped.

        Args:
            start: the communicator's method, of ``tensor``, ``peer`` and ``tag``.
            verb: for errors.
            tensors: the user's, for the handle.
            write_back: the user's tensor and the one in its place, if the data is to be copied when it is there.
        """
        try:
            message = start(tensor, peer, tag)
            if message.done:
                return DoneWork(tensors)
            work = MessageWork(message, tensors, write_back)
            self._left.put(work)
            if self._thread is None:
                with self._starting:
                    if self._thread is None and not self.closed:
                        self._start_thread()
            return work
        except PhalanxError:  # it was refused, and not begun
            raise
        except BaseException:
            # A signal's handler may have raised between the transport, which has the message, and the queue. Nobody
            # knows of that message, and it would take the place of the next one.
            self._held.append(tensor)
            site = call_site.call_site()
            words = message_text(verb, str(peer) if peer is not None else "", tensor)
            self._communicator.give_up(tensor, f"{words} at {site}" if site else words)
            raise

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
