"""The threads on which a worker runs what others ask for.

There are as many as there is to do at the same time: a handler may call another worker, whose handler calls back, so a
fixed number of threads could all wait for each other. A thread that has had nothing to do for ``IDLE_S`` ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from phalanx.errors import PROCESS_LIMIT_HINT
from phalanx.system.threads import start
from phalanx.words import tell

__all__ = ["Handlers"]

IDLE_S = 30.0
# A limit on mistakes, such as a function that calls itself on another worker for ever.
MOST = 1024


class Handlers:
    """The threads of one agent."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = self._threads = 0
        self._running: set[threading.Thread] = set()
        self._closed = False
        self._later: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
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
            if self._idle > 0:
                self._idle -= 1  # taken, though it does not know yet
                starts = False
            else:
                starts = self._threads < MOST
                self._threads += starts
        self._tasks.put((task, arguments))
        if starts:
            try:
                threading.Thread(target=self._work, name="phalanx-rpc-handler", daemon=True).start()
            except RuntimeError as error:
                with self._lock:
                    self._threads -= 1
                    last = not self._threads
                if last:
                    what = f"a worker cannot start a thread for what others ask of it ({error})"
                    tell(f"warning: {what}; {PROCESS_LIMIT_HINT}")
        return True

    def close(self) -> None:
        """Let all threads end; those that are busy do so when they are done, and are not waited for."""
        with self._lock:
            self._closed = True
            self._later.put(None)
            idle = self._idle
            running = list(self._running)
            threads = self._threads  # among them those that have only just been started
        for _ in range(threads):
            self._tasks.put(None)
        if idle == len(running):
            for thread in running:
                if thread is not threading.current_thread():
                    thread.join()
        if self._mover is not threading.current_thread():
            self._mover.join()  # it hands tasks on, and runs none

    def _move(self) -> None:
        while (moved := self._later.get()) is not None:
            self.run(moved[0], *moved[1])
            del moved

    def _work(self) -> None:
        with self._lock:
            self._running.add(threading.current_thread())
        try:
            self._run_tasks()
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())

    def _run_tasks(self) -> None:
        while True:
            try:
                taken = self._tasks.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        self._threads -= 1
                        return
                continue  # a task is on its way to this thread
            if taken is None:
                return
            task, arguments = taken
            try:
                task(*arguments)
            except BaseException as error:  # a thread that ended here would be missing for ever
                tell(f"warning: a task of RPC failed: {error!r}")
            del taken, task, arguments  # else the thread would keep a caller's tensors
            with self._lock:
                if self._threads >= MOST and not self._tasks.empty():
                    continue
                self._idle += 1
