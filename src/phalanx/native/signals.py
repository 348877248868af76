"""Run Python's signal handlers while the core waits, so that Ctrl-C ends a collective."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator, Iterator
from itertools import repeat

from phalanx.native.core import Poll


class SignalPoll:
    """A poll function for the core that runs pending signal handlers and remembers what they raised.

    The core calls ``callback`` from the thread that waits. Python runs handlers on the main thread only; on any other,
    and while a handler runs, it returns 0 at once.
    """

    def __init__(self) -> None:
        self._raised: list[BaseException] = []
        self._main = threading.main_thread().ident
        # An exception must not leave the callback: ctypes drops it. Python may run a handler at a function's first
        # instruction, before any `try`; a generator resumes inside its `try`. Nor may the lookup run Python: it is
        # `next(idle.pop(thread id, repeat(0)))`, of C iterators. The generator puts itself back before it yields.
        idle: dict[int | None, Iterator[int]] = {}
        watch = _watch(idle, self._main, self._raised)
        next(watch)
        watch.send(watch)
        chosen = map(idle.pop, iter(threading.get_ident, None), repeat(repeat(0)))
        self.callback = Poll(map(next, chosen).__next__)

    @property
    def pending(self) -> BaseException | None:
        """Return what a handler raised during the main thread's last wait, which has not been raised yet."""
        return self._raised[0] if self._raised else None

    def raise_pending(self) -> None:
        """Raise, on the main thread, the exception that a handler raised during its last wait, if any."""
        if self._raised and threading.get_ident() == self._main:
            error = self._raised[0]
            self._raised.clear()
            raise error


def _watch(
    idle: dict[int | None, Iterator[int]], main: int | None, raised: list[BaseException]
) -> Generator[int, Iterator[int], None]:
    """Run pending handlers each time it is resumed and yield whether one raised; the first resumption sends itself."""
    stop = 0
    itself = yield stop
    while True:
        # Two `try`s, because a further signal's handler may run, and raise, on the way back to the inner one.
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
