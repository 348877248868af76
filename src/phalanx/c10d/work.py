"""torch's ``Work`` over an :class:`Operation`: the handle that an asynchronous operation returns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.c10d import typed_future
from phalanx.c10d.operation import Operation
from phalanx.c10d.progress import Progress
from phalanx.c10d.uncompiled import uncompiled
from phalanx.errors import CollectiveTimeout

__all__ = ["PhalanxWork"]


@uncompiled
class PhalanxWork(dist.Work):
    """The handle of one asynchronous operation, as torch documents it for CPU backends.

    Attributes:
        told: whether a :meth:`wait` has raised the operation's error. Each thread that waits only ever sets it, before
            its own wait raises.
    """

    def __init__(self, progress: Progress, operation: Operation) -> None:
        super().__init__()
        self.told = False
        self._progress = progress
        self._operation = operation

    @property
    def operation(self) -> Operation:
        """The operation that this is the handle of."""
        return self._operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has run; True.

        Args:
            timeout: how long to wait; zero or None means the group's own timeout.

        Raises:
            CollectiveTimeout: the operation is still under way after ``timeout``. It goes on; wait again.
            PhalanxError: the operation failed; this is its error.
        """
        operation = self._operation
        limited = timeout is not None and timeout.total_seconds() > 0
        if not operation.done:
            if not limited:
                self._progress.help(operation)
            seconds = timeout.total_seconds() if limited and timeout is not None else None
            if not operation.wait_done(seconds):
                raise CollectiveTimeout(
                    f"the operation is still under way after {seconds:.3f} s; it goes on, and can be waited for again",
                    elapsed_s=seconds or 0.0,
                )
        if operation.waited is not None:
            operation.waited()
        if operation.error is not None:
            self.told = True
            raise operation.error
        return True

    def is_completed(self) -> bool:
        return self._operation.done

    def is_success(self) -> bool:
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._operation.result

    def get_future(self) -> torch.futures.Future[Any]:
        if not self._operation.done:
            self._progress.hurry()
        future = self._operation.future()
        return typed_future.typed(future, self._operation.result) if typed_future.wanted else future
