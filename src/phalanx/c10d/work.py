"""torch's ``Work``: the handles of operations that are done, of queued operations, and of messages."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.c10d import ddp
from phalanx.c10d.progress import Operation, Progress
from phalanx.c10d.torch_versions import uncompiled
from phalanx.diagnosis import call_site
from phalanx.errors import CollectiveTimeout, PhalanxError
from phalanx.transports.contract import Message

__all__ = ["DoneWork", "MessageWork", "PhalanxWork"]


@uncompiled
class _Handle(dist.Work):
    """The handle of an operation or a message on ``tensors``; a subclass waits for it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors


def _under_way(what: str, seconds: float) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"the {what} is still under way after {seconds:.3f} s; it goes on, and can be waited for again",
        elapsed_s=seconds,
    )


@uncompiled
class DoneWork(_Handle):
    """The handle of a send that was done when it was called, as most small ones are."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


@uncompiled
class PhalanxWork(_Handle):
    """The handle of one asynchronous operation, as torch documents it for CPU backends."""

    def __init__(self, progress: Progress, operation: Operation) -> None:
        super().__init__(operation.result)
        self._progress = progress
        self.operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has run; True.

        Args:
            timeout: how long to wait; zero or None means the group's own timeout.

        Raises:
            CollectiveTimeout: the operation is still under way after ``timeout``. It goes on; wait again.
            PhalanxError: the operation failed; this is its error.
        """
        operation = self.operation
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not operation.done:
            if seconds <= 0:
                self._progress.help(operation)
            if not operation.wait_done(seconds if seconds > 0 else None):
                raise _under_way("operation", seconds)
        if operation.waited is not None:
            operation.waited()
        if operation.error is not None:
            operation.told = True
            raise operation.error
        return True

    def is_completed(self) -> bool:
        return self.operation.done

    def exception(self) -> BaseException | None:
        return self.operation.error

    def get_future(self) -> torch.futures.Future[Any]:
        if not self.operation.done:
            self._progress.hurry()
        future = self.operation.future()
        return ddp.typed(future, self._tensors) if ddp.wants_typed_futures else future


@uncompiled
class MessageWork(_Handle):
    """The handle of one send or receive, for the script's threads and the thread of :class:`Messages`.

    ``_base``, ``_completed`` and ``_write_back`` are written under ``_lock``, and also read without it: each changes at
    most once, ``_write_back`` only when the tensor has its data.
    """

    def __init__(self, message: Message, tensors: list[torch.Tensor], write_back: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._message = message
        self._write_back = write_back
        self._lock = threading.Lock()
        self._base: torch.futures.Future[Any] | None = None
        self._completed = False
        # The thread of Messages may be the first to find that the message failed, and its own stack does not show the
        # call. This costs half a microsecond, while the message is under way.
        self._site = call_site.capture(2)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is done; True.

        Raises:
            CollectiveTimeout: it is still under way after ``timeout``. It goes on; wait again.
            PhalanxError: the message failed; this is its error.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        try:
            done = self._message.wait(seconds if seconds > 0 else None)
        except PhalanxError:
            self._settle(False)
            raise
        if not done:
            raise _under_way("message", seconds)
        self._settle(True)
        return True

    def is_completed(self) -> bool:
        return self._ask()[0]

    def exception(self) -> BaseException | None:
        return self._ask()[1]

    def source_rank(self) -> int:
        return self._message.source

    def _source_rank(self) -> int:
        return self._message.source

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors, or of the error, which is raised in a callback: see ``Operation.future`` for why.

        A caller that has a future waits, so the group's timeout counts from here.
        """
        with self._lock:
            if self._base is None:
                self._base = torch.futures.Future()
            base = self._base
        outcome = base.then(self._outcome)
        if not self.is_completed():
            self._message.expect()
        return outcome

    def attend(self) -> bool:
        """Do what can be done now; whether nothing is left to do. Called by the thread of :class:`Messages`."""
        call_site.running.site = self._site
        try:
            return self._ask(watch=self._base is not None)[0]
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
        if not self._write_back and (self._base is None or self._completed):
            return
        with self._lock:
            if self._write_back:
                if success:
                    tensor, stand_in = self._write_back
                    tensor.detach().copy_(stand_in)
                self._write_back = []
            base = None if self._completed else self._base
            self._completed = self._base is not None
        if base is not None:
            base.set_result(None)

    def _outcome(self, _: object) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors
