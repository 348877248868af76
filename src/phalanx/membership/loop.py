"""One selector loop for whoever serves many connections: the registrar, its ranks, and both stores."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from phalanx.system.threads import start
from phalanx.wire.framing import Malformed
from phalanx.wire.session import Session

__all__ = ["Channel", "Connection", "Loop", "was_silent"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_BLOCK = 1 << 16
# Whoever reads each answer before asking again has never asked for more than this.
_MOST_UNREAD = 1 << 28
# What the kernel says of a connection whose other host acknowledges nothing any more.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Loop:
    """Run tasks, timers and whatever is ready: on a thread of its own, or on the caller's by :meth:`turn`.

    ================  =====================  ==========  =========
    field             writer                 reader      guard
    ================  =====================  ==========  =========
    ``_tasks``        any thread             the loop    ``_lock``
    ``_open``         the loop, a fork       any thread  ``_lock``
    ``_timers``       the loop               the loop
    ``connections``   the loop               the loop
    ================  =====================  ==========  =========

    Attributes:
        selector: the data of a registration is a function to call when its file is ready.
        tend: called before each wait with the time; returns when to call it again.
        connections: those that are open.
        thread: that of :meth:`start`.
    """

    def __init__(self, name: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.tend: Callable[[float], float] = lambda now: now + 3600.0
        self.connections: set[Connection] = set()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self._bell, _READ, self._on_bell)
        self._tasks: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # a signal handler may call while its thread does
        self._open, self._printed = True, False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        _loops.add(self)

    def start(self) -> None:
        """Start the thread."""
        start(self.thread)

    def call(self, task: Callable[[], object]) -> bool:
        """Run a task on the thread soon; return whether it will. Any thread may ask."""
        with self._lock:
            if not self._open:
                return False
            self._tasks.append(task)
            os.eventfd_write(self._bell, 1)
            return True

    def later(self, seconds: float, task: Callable[[], object]) -> None:
        """Run a task on the thread in so many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), task))

    def stop(self) -> None:
        """End the thread after the present task; nothing that is called afterwards is run."""
        with self._lock:
            self._open = False
        if self.thread.ident is None:
            self.close()

    def let_go(self) -> None:
        """Close the parent's files in a forked child, without the selector's own list, which the parent shares."""
        self._lock, self._open = threading.RLock(), False
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.close()

    def turn(self, timeout_s: float = 3600.0) -> None:
        """Wait until something can be done, for a limited time, and do it."""
        now = time.monotonic()
        until = min(self.tend(now), self._timers[0][0] if self._timers else now + timeout_s, now + timeout_s)
        for key, _ in self.selector.select(max(0.0, until - now)):
            if key.fd in self.selector.get_map():  # else one that came before has closed it
                self._do(key.data)
        while self._tasks and self._open:
            self._do(self._tasks.popleft())
        while self._timers and self._timers[0][0] <= time.monotonic() and self._open:
            self._do(heapq.heappop(self._timers)[2])

    def close(self) -> None:
        """Close the loop's own files; its thread does so at its end."""
        _loops.discard(self)
        self.selector.close()
        os.close(self._bell)

    def _run(self) -> None:
        while self._open:
            self.turn()
        self.close()

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _do(self, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception:  # the other connections of this loop go on
            if not self._printed:
                self._printed = True
                with contextlib.suppress(Exception):  # nobody may read what is printed
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


# Those whose files are open. A child that kept their sockets would hide this process's end from the other ranks.
_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def _after_fork() -> None:
    for loop in list(_loops):
        loop.let_go()


os.register_at_fork(after_in_child=_after_fork)


class Connection:
    """A connection on a loop's thread, which alone uses it. Bytes that the network does not take yet stay with it.

    Args:
        loop: whose thread that is.
        sock: the connected socket.

    Attributes:
        hear: called with the bytes that have come; raises Malformed if they are nonsense.
        ended: called when the other side has ended it, or has sent nonsense, with the reason if it was an exception.
    """

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.hear: Callable[[bytes], object] = lambda data: None
        self.ended: Callable[[Exception | None], object] = lambda why: None
        self._loop, self._out = loop, bytearray()
        self._failed: OSError | None = None  # of a send; the kernel says why once, and then it is only the end
        loop.selector.register(sock, _READ, self._ready)
        loop.connections.add(self)

    def take(self, data: bytes | bytearray) -> None:
        """Have bytes heard, and end the connection if they are nonsense."""
        try:
            self.hear(bytes(data))
        except Malformed as error:
            self._end(error)

    def send(self, data: bytes) -> None:
        """Send bytes, now or when the network takes them."""
        if self._out:
            self._out += data
            if len(self._out) > _MOST_UNREAD:
                self._end(None)
        elif self.sock.fileno() >= 0:
            sent = 0
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                pass
            except OSError as error:
                self._failed = self._failed or error
            if sent < len(data):
                self._out += data[sent:]
                self._loop.selector.modify(self.sock, _READ | _WRITE, self._ready)

    def finish(self, timeout_s: float) -> None:
        """Send what waits, for a limited time, and close."""
        if self.sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self.sock.settimeout(timeout_s)
                self.sock.sendall(self._out)
        self.close()

    def close(self) -> None:
        """Close the connection; nothing more is heard."""
        if self.sock.fileno() >= 0:
            self._out.clear()
            self._loop.selector.unregister(self.sock)
            self._loop.connections.discard(self)
            self.sock.close()

    def _end(self, why: Exception | None) -> None:
        if self.sock.fileno() >= 0:
            self.close()
            self.ended(why)

    def _ready(self) -> None:
        if self._out:
            self._push()
        try:
            data = self.sock.recv(_BLOCK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(self._failed or error)
            return
        if data:
            self.take(data)
        else:
            self._end(self._failed)

    def _push(self) -> None:
        try:
            del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            return
        except OSError as error:
            self._failed = self._failed or error
            self._out.clear()
        if not self._out:
            self._loop.selector.modify(self.sock, _READ, self._ready)


class Channel(Connection):
    """A proven connection that carries messages.

    Args:
        loop, sock: see :class:`Connection`.
        session: the digests of the messages.
        take: called with each message.
    """

    def __init__(self, loop: Loop, sock: socket.socket, session: Session, take: Callable[[bytes], object]) -> None:
        super().__init__(loop, sock)
        data = bytearray()

        def hear(more: bytes) -> None:
            data.extend(more)
            for message in session.take_messages(data):
                take(message)

        self._session, self.hear = session, hear

    def say(self, message: bytes) -> None:
        """Send a message, which is in its frame."""
        self.send(self._session.seal(message))


def was_silent(why: Exception | None) -> bool:
    """Return whether a connection has ended because its other host acknowledges nothing."""
    return isinstance(why, OSError) and why.errno in _SILENT
