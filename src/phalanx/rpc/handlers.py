"""Threads of a worker: those of one kind as a pool, and those on which it runs what others ask for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.system.threads import start
from phalanx.words import tell

__all__ = ["IDLE_S", "Handlers", "Pool"]

IDLE_S = 30.0  # after which a thread ends that has nothing to do
JOIN_S = 2.0
# A limit on mistakes, such as a function that calls itself on another worker for ever.
MOST = 1024

_Task = tuple[Callable[..., None], tuple[Any, ...]]


class Pool:
    """Threads that do the same. Safe to use from several threads.

    Args:
        name: of each thread.
        run: what a thread does until it ends.
        most: how many there are at most.
        few: how many stay when there is nothing to do.
    """

    def __init__(self, name: str, run: Callable[[], None], most: int, few: int = 0) -> None:
        self._name, self._run, self._most, self._few = name, run, most, few
        self._lock = threading.Lock()  # guards the rest
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._at_end: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._threads)

    def fill(self) -> None:
        """Start the few that stay.

        Raises:
            BackendError: the system gives this process not one thread.
        """
        try:
            while len(self) < min(self._few, self._most) and self._add(must=not len(self)):
                pass
        except BaseException:
            self.close()
            raise

    def add(self) -> bool:
        """Start one more thread. Whether there is one more; if the system refuses the first, the user is told."""
        return self._add(must=False)

    def _add(self, *, must: bool) -> bool:
        with self._lock:
            if self._closed or len(self._threads) >= self._most:
                return False
            thread = threading.Thread(target=self._main, args=(self._run,), name=self._name, daemon=True)
            self._threads.add(thread)
        try:
            start(thread)
        except RuntimeError as error:
            with self._lock:
                self._threads.discard(thread)
            if must:
                raise
            if not self._threads:
                tell(f"warning: a worker cannot start a thread ({self._name}): {error}")
            return False
        return True

    def may_end(self) -> bool:
        """Return whether the calling thread, which has been idle for long, may end."""
        with self._lock:
            if len(self._threads) <= self._few:
                return False
            self._threads.discard(threading.current_thread())
            return True

    def close(self, join_s: float = JOIN_S) -> None:
        """Start no more, and wait for those that there are; those that run a handler end after it."""
        with self._lock:
            self._closed = True
            self._run = _nothing  # which refers to the owner of this pool
            threads = self._threads - {threading.current_thread()}
        until = time.monotonic() + join_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def when_empty(self, task: Callable[[], None]) -> None:
        """Call ``task`` when the last thread has ended, after :meth:`close`."""
        with self._lock:
            self._at_end = task
        self._leave()

    def _main(self, run: Callable[[], None]) -> None:
        try:
            run()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._threads.discard(threading.current_thread())
            task = None
            if self._closed and not self._threads:
                task, self._at_end = self._at_end, None
        if task is not None:
            task()


def _nothing() -> None:
    pass


class Handlers:
    """The threads on which one worker runs what others ask for.

    There are as many as there is to do at the same time: a handler may call another worker, whose handler calls back,
    so a fixed number of threads could all wait for each other.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next two
        self._spare = 0  # threads that have nothing to do, less the tasks that no thread has taken
        self._closed = False
        self._pool = Pool("phalanx-rpc-handler", self._work, MOST)
        self._later: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._mover = threading.Thread(target=self._move, name="phalanx-rpc-finalizers", daemon=True)
        start(self._mover)

    def run_later(self, task: Callable[..., None], *arguments: Any) -> None:
        """:meth:`run` from a finalizer: it takes no lock, because the thread that runs the finalizer may hold it."""
        self._later.put((task, arguments))

    def run(self, task: Callable[..., None], *arguments: Any) -> bool:
        """Run ``task(*arguments)`` on a thread soon. Whether it will; it will not after :meth:`close`."""
        with self._lock:
            if self._closed:
                return False
            self._spare -= 1
            starts = self._spare < 0
        self._tasks.put((task, arguments))
        if starts and self._pool.add():
            self._change_spare(1)
        return True

    def close(self) -> None:
        """Let all threads end; those that are busy do so when they are done, and are not waited for."""
        with self._lock:
            self._closed = True
            self._later.put(None)
            are_idle = self._spare == len(self._pool)
        for _ in range(len(self._pool)):
            self._tasks.put(None)
        self._pool.close(JOIN_S if are_idle else 0.0)
        if self._mover is not threading.current_thread():
            self._mover.join()  # it hands tasks on, and runs none

    def _change_spare(self, by: int) -> None:
        with self._lock:
            self._spare += by

    def _move(self) -> None:
        while (moved := self._later.get()) is not None:
            self.run(moved[0], *moved[1])
            del moved

    def _work(self) -> None:
        while True:
            try:
                taken = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._spare > 0:  # else a task is on its way to this thread
                        self._spare -= 1
                        return
                continue
            if taken is None:
                return
            task, arguments = taken
            try:
                task(*arguments)
            except BaseException as error:  # a thread that ended here would be missing for ever
                tell(f"warning: a task of RPC failed: {error!r}")
            del taken, task, arguments  # else the thread would keep a caller's tensors
            self._change_spare(1)
