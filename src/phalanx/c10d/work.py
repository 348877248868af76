"""torch's ``Work``: the handles of what is done, and of queued operations; ``messages.py`` has those of messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.c10d.progress import Operation, Progress
from phalanx.c10d.torch_versions import uncompiled
from phalanx.errors import CollectiveTimeout

__all__ = ["DoneWork", "Handle", "PhalanxWork", "seconds_of", "still_under_way"]


@uncompiled
class Handle(dist.Work):
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


@uncompiled
class DoneWork(Handle):
    """The handle of what was done when it was called, as most small sends are."""

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
class PhalanxWork(Handle):
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
        operation, limit_s = self.operation, seconds_of(timeout)
        if not operation.done:
            if limit_s is None:
                self._progress.help(operation)
            if not operation.wait_done(limit_s):
                raise still_under_way("operation", limit_s or 0.0)
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
        return self.operation.future()


def seconds_of(timeout: timedelta | None) -> float | None:
    """The limit of a wait in torch's words: zero and None mean that there is none."""
    seconds = timeout.total_seconds() if timeout is not None else 0.0
    return seconds if seconds > 0 else None


def still_under_way(what: str, limit_s: float) -> CollectiveTimeout:
    """The error of a wait that was over before the operation."""
    return CollectiveTimeout(
        f"the {what} is still under way after {limit_s:.3f} s; it goes on, and can be waited for again",
        elapsed_s=limit_s,
    )
