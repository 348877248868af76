"""Short tensors that are on their way through Gloo, and that nobody waits for.

Gloo ends the waits for a connection when that breaks, but not the wait for a send that it had queued before: in its
``pair.cc``, ``Pair::signalException`` tells the receives, and of the sends only those of buffers that are bound. So a
rank that has all it needs from another one, and waits for its own last send to be gone, would wait for the group's
whole timeout if that one is killed right then, and no other thread could end that wait. A short send is copied instead,
and done for its sender; the copy stays until Gloo has let go of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import torch

from phalanx.system.threads import TimedQueue
from phalanx.transports.hierarchical.lane import Transfer

__all__ = ["GONE", "ShortSends", "copy_of"]

# A thread is woken to let go of so many copies at once, which takes it a few microseconds each.
_BATCH = 32


class _Gone(Transfer):
    """A send that is done as far as its sender is concerned."""

    __slots__ = ()

    def wait(self) -> None:
        pass

    def wait_with(self, others: Sequence[Transfer], meanwhile: Callable[[], None] | None = None) -> None:
        left = [each for each in others if each is not self]
        if left:
            left[0].wait_with(left[1:], meanwhile)
        elif meanwhile is not None:
            meanwhile()


GONE = _Gone()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in memory of their own."""
    copy = torch.empty(tensor.nbytes, dtype=torch.uint8)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), copy.nbytes)
    return copy


class ShortSends:
    """What one engine has sent and not let go of.

    ``_kept`` is added to by every thread that sends; who makes a batch of it takes it whole, under the lock. The
    batches are waited for on the engine's own thread, one after the other, so the last one is done when all are. That
    thread alone writes ``_done``, and who flushes only looks whether it has changed.

    Args:
        begin_apart: has something done on a thread that may wait for ever; what it returns is put into the queue.
    """

    def __init__(self, begin_apart: Callable[[Callable[[], Any]], TimedQueue[Any]]) -> None:
        self._begin_apart = begin_apart
        self._lock = threading.Lock()
        self._kept: list[Callable[[], None]] = []
        self._last: TimedQueue[Any] | None = None
        self._done = 0

    def keep(self, sends: Sequence[Callable[[], None]]) -> None:
        """Keep sends until they are done.

        Args:
            sends: each keeps its memory, and returns, or raises a RuntimeError, when Gloo does not need it any more.
        """
        with self._lock:
            self._kept += sends
            if len(self._kept) >= _BATCH:
                self._let_go()

    def flush(self, patience_s: float) -> None:
        """Wait until all that was sent is on the wire, or cannot be sent any more.

        Args:
            patience_s: how long to wait for the next of them to be done.
        """
        with self._lock:
            if self._kept:
                self._let_go()
            last = self._last
        while last is not None:
            done = self._done
            with contextlib.suppress(Empty):
                last.get(patience_s)
                return
            if self._done == done:
                return

    def _let_go(self) -> None:
        batch = self._kept.copy()

        def wait_for_all() -> None:
            for wait in batch:
                with contextlib.suppress(RuntimeError):  # the connection is broken, of which the group learns otherwise
                    wait()
                self._done += 1

        with contextlib.suppress(RuntimeError):  # no thread can be started: they are kept for longer
            self._last = self._begin_apart(wait_for_all)
            self._kept.clear()
