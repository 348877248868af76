"""The job's store, for threads that may be in the middle of a request when the process ends.

A store of torch's gives the interpreter's lock up while it waits. If the interpreter has ended when a thread wants it
back, Python ends that thread, and with it, because it is inside C++, the process: ``terminate called without an active
exception``. So such requests are waited for before the agent is closed, and before a process ends that has not closed
it; there are none after that.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["EndingStore"]

_WAIT_S = 5.0  # far more than an answer takes; without one the store's host is gone


class EndingStore:
    """The functions of a store, until :meth:`close`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        atexit.register(self.close)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask(getattr(self._store, name), *arguments)

    def close(self) -> None:
        """Refuse requests from now on, and wait for those that are under way."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, _WAIT_S)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self._changed:
            if self._closed:
                raise dist.DistStoreError("this worker has been closed, and asks the job's store no more")
            self._under_way += 1
        try:
            return function(*arguments)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
