"""Threads, and waits with a limit that is right if the process is stopped meanwhile, or about to end."""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from phalanx.errors import PROCESS_LIMIT_HINT, BackendError

T = TypeVar("T")

# -- starting ------------------------------------------------------------------------------------------


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        BackendError: the system gives this process no more threads.
        RuntimeError: the interpreter ends, when Python 3.12 and later start none.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # a signal handler has raised it, or the interpreter ends
            raise
        raise BackendError(f"the system gives this process no more threads ({error}): {PROCESS_LIMIT_HINT}") from error


def renew_engine() -> None:
    """Have torch make its autograd engine anew, if this process is a fork that has not used the engine yet.

    Whoever asks for it first in a fork destroys it and makes another, without a lock. If the first operations of two
    threads coincide, the process dies by SIGSEGV. So this has to be called before another thread computes.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        # Of all that asks for the engine, this does nothing else.
        torch.autograd.Variable._execution_engine.is_checkpoint_valid()


# -- a clock that stands still while the process does --------------------------------------------------

SLICE_S = 1.0  # a thread that waits reads the clock at least as often
_LONGEST_S = 2 * SLICE_S  # of a longer gap between two readings no more than this counts


class AwakeClock:
    """Seconds since it was made in which the process ran. Any thread may read it.

    A whole job may be stopped for longer than any timeout (SIGSTOP, docker pause, a batch system's suspend). The core's
    waits count alike (``native/csrc/system/futex.h``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Return the time; read it every ``SLICE_S`` while somebody waits by it."""
        with self._lock:
            real = time.monotonic()
            self._now += min(real - self._read_at, _LONGEST_S)
            self._read_at = real
            return self._now


def wait_awake(wait: Callable[[float], bool], timeout_s: float | None, clock: AwakeClock | None = None) -> bool:
    """Wait in slices until ``wait``, which is called with the seconds it may take, returns True; False at the timeout.

    Time in which the process was stopped does not count; a timeout of None means without limit.
    """
    clock = clock or AwakeClock()
    end = math.inf if timeout_s is None else clock.now() + timeout_s
    while not wait(max(0.0, min(SLICE_S, end - clock.now()))):
        if clock.now() >= end:
            return False
    return True


# -- what may never return, such as asking a host that may be gone -------------------------------------

_STEP_S = 0.1  # of a wait; more than that does not count of a time in which the process was stopped


def within(timeout_s: float, task: Callable[[], T]) -> T:
    """Return or raise what ``task`` does, on a thread of its own, which is left alone if it takes too long.

    Raises:
        TimeoutError: it has not returned in time.
        RuntimeError: no thread can be started.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(task())
        except BaseException as error:
            errors.append(error)
        done.set()

    start(threading.Thread(target=run, name="phalanx-bounded", daemon=True))
    left_s = timeout_s
    while left_s > 0 and not done.wait(min(left_s, _STEP_S)):
        left_s -= _STEP_S
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"not done within {timeout_s:g} s")
    return outcome[0]


# -- a queue -------------------------------------------------------------------------------------------


class TimedQueue(Generic[T]):
    """First in, first out, without a limit; ``get`` ends when its time is over, and a signal handler may use it.

    Up to Python 3.12 ``SimpleQueue.get(timeout=...)`` may block for ever, if the thread was off the processor for
    longer than the timeout. ``queue.Queue`` has a lock that a signal handler finds taken by its own thread.

    Whoever waits acquires ``_gate``, whoever has added an item releases it: while there is an item, the gate is free,
    or a thread has acquired it and is on its way to the item. That thread frees it again if it leaves items behind.
    """

    __slots__ = ("_gate", "_items")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._gate = threading.Lock()

    def put(self, item: T) -> None:
        """Add ``item``; a thread that waits gets it. Never blocks."""
        self._items.append(item)
        self._open()

    def get(self, timeout_s: float | None = None) -> T:
        """Take the oldest item, and wait for one if there is none, at most so long; None means without a limit.

        Raises:
            queue.Empty: there was none in that time.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                if not self._gate.acquire(timeout=-1.0 if until is None else max(0.0, until - time.monotonic())):
                    raise queue.Empty from None
            else:
                if self._items:
                    self._open()
                return item

    def qsize(self) -> int:
        """Count how many items wait to be taken."""
        return len(self._items)

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is free, and whoever acquires it finds this item too
            self._gate.release()
