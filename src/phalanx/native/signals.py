"""Letting Python's signal handlers run while the core waits, so that Ctrl-C ends a collective."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from phalanx.native.core import Poll

__all__ = ["SignalPoll"]


class SignalPoll:
    """A poll function for the core that runs pending signal handlers and remembers what they raised.

    Attributes:
        callback: what the core calls, from whichever thread waits. Handlers only ever run on the main thread;
            on any other the callback finds nothing to do.
    """

    def __init__(self) -> None:
        self._raised: list[BaseException] = []
        # A plain function would not do: Python may run a handler at a function's first instruction, before
        # any `try` is entered, and ctypes drops what a callback raises. A generator resumes inside its `try`.
        watch = _watch(self._raised)
        next(watch)
        self.callback = Poll(watch.__next__)

    def raise_pending(self) -> None:
        """Raise what a handler raised during the last wait, if anything."""
        if self._raised:
            raise self._raised.pop()


def _watch(raised: list[BaseException]) -> Iterator[int]:
    stop = 0
    while True:
        try:
            yield stop
            stop = 0
            ctypes.pythonapi.PyErr_CheckSignals()
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
            stop = 1
