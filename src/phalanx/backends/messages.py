"""Point-to-point messages of one group as torch's ``Work``, and the thread that moves those nobody waits for.

A message moves whenever its rank calls into the group's messages. One that is neither done nor waited for after two
milliseconds is taken over by a thread, so that a rank that computes, or waits in a collective of another group, still
sends what it has promised.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.backends.communicator import Message
from phalanx.errors import CollectiveTimeout, PhalanxError

__all__ = ["DoneWork", "MessageWork", "Messages"]

PATIENCE_S = 0.002
SLICE_S = 0.01


class DoneWork(dist.Work):
    """The handle of a send that was done when it was called, as most small ones are."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        pass

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class MessageWork(dist.Work):
    """The handle of one send or receive."""

    def __init__(
        self,
        message: Message,
        tensors: list[torch.Tensor],
        write_back: list[torch.Tensor],
        messages: Messages,
    ) -> None:
        super().__init__()
        self._messages = messages
        self._message = message
        self._tensors = tensors
        self._write_back = write_back
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is done; True.

        Raises:
            CollectiveTimeout: it is still under way after ``timeout``. It goes on; wait again.
            PhalanxError: the message failed; this is its error.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._messages.wait(self._message, seconds if seconds > 0 else None):
            raise CollectiveTimeout(
                f"the message is still under way after {seconds:.3f} s; it goes on, and can be waited for again",
                elapsed_s=seconds,
            )
        self.settle()
        return True

    def settle(self) -> None:
        """Once the message is done: bring its data to where the user wants it, and complete the future."""
        if not self._write_back and self._future is None:
            return
        with self._lock:
            if self._write_back:
                tensor, stand_in = self._write_back
                tensor.detach().copy_(stand_in)
                self._write_back = []
            future, self._future = self._future, None
        if future is not None:
            future.set_result(None)

    def is_completed(self) -> bool:
        try:
            done = self._message.test()
        except PhalanxError:
            return True
        if done:
            self.settle()
        return done

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._message.test()
        except PhalanxError as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        return self._message.source

    def _source_rank(self) -> int:
        return self._message.source

    def get_future(self) -> torch.futures.Future[Any]:
        base: torch.futures.Future[Any] = torch.futures.Future()
        outcome = base.then(self._outcome)
        with self._lock:
            self._future = base
        self.is_completed()
        return outcome

    def _outcome(self, _: object) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors


class Messages:
    """The messages of one group that were not done when they were called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left: queue.SimpleQueue[MessageWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._waiting: list[None] = []  # one entry for each thread that waits; append and pop are atomic

    def wait(self, message: Message, timeout_s: float | None) -> bool:
        """Wait for a message, on the thread of its user; see :meth:`Message.wait`."""
        self._waiting.append(None)
        try:
            return message.wait(timeout_s)
        finally:
            self._waiting.pop()

    def look_after(self, work: MessageWork) -> None:
        """Make sure that ``work`` gets done, and its tensors live until then, even if it is dropped."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"phalanx-mail-{self._name}", daemon=True)
            self._thread.start()
        self._left.put(work)

    def close(self) -> None:
        """End the thread; messages that are not done are given up."""
        self._closed = True
        if self._thread is not None:
            self._left.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while not self._closed:
            works = [self._left.get()]
            # Most messages are waited for at once by their own thread; then this one only gets in the way.
            time.sleep(PATIENCE_S)
            with contextlib.suppress(queue.Empty):
                while True:
                    works.append(self._left.get_nowait())
            for work in works:
                while work is not None and not self._closed and not work.is_completed():
                    if self._waiting:
                        time.sleep(PATIENCE_S)  # whoever waits moves all messages; two would contend for the core
                        continue
                    with contextlib.suppress(PhalanxError):
                        work._message.wait(SLICE_S)
