"""Letting Python's signal handlers run while the core waits, so that Ctrl-C ends a collective."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator, Iterator
from itertools import repeat

from phalanx.native.core import Poll

__all__ = ["SignalPoll"]


class SignalPoll:
    """A poll function for the core that runs pending signal handlers and remembers what they raised.

    Attributes:
        callback: what the core calls, from whichever thread waits. Python runs handlers on the main thread only;
            on any other the callback returns 0 at once, also while a handler runs.
    """

    def __init__(self) -> None:
        self._raised: list[BaseException] = []
        self._main = threading.main_thread().ident
        # ctypes drops what a callback raises, and what the core then gets is undefined. A plain function would not
        # do: Python may run a handler at a function's first instruction, before any `try` is entered. A generator
        # resumes inside its `try`. Choosing it takes no Python function either: it is taken out of `idle` by the main
        # thread and puts itself back; others, and a handler that waits itself, find nothing there and get 0.
        idle: dict[int | None, Iterator[int]] = {}
        watch = _watch(idle, self._main, self._raised)
        next(watch)
        watch.send(watch)
        chosen = map(idle.pop, iter(threading.get_ident, None), repeat(repeat(0)))
        self.callback = Poll(map(next, chosen).__next__)

    def raise_pending(self) -> None:
        """Raise, on the main thread, what a handler raised during its last wait, if anything."""
        if self._raised and threading.get_ident() == self._main:
            error = self._raised[0]
            self._raised.clear()
            raise error


def _watch(
    idle: dict[int | None, Iterator[int]], main: int | None, raised: list[BaseException]
) -> Generator[int, Iterator[int] | None, None]:
    stop = 0
    itself = yield stop
    assert itself is not None
    while True:
        # Twice, since the way back to the inner `try` may run the handler of a further signal, which may raise too.
        try:
            while True:
                try:
                    while True:
                        idle[main] = itself
                        yield stop
                        stop = 0
                        ctypes.pythonapi.PyErr_CheckSignals()
                except GeneratorExit:
                    return
                except BaseException as error:
                    stop = 1
                    raised.append(error)
        except BaseException as error:
            stop = 1
            raised.append(error)
