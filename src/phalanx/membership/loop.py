"""One thread with a selector, and connections that carry messages on it."""

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
from collections import deque
from collections.abc import Callable

from phalanx.membership.protocol import Message, decode, encode
from phalanx.system.threads import start
from phalanx.wire.framing import Malformed, frame
from phalanx.wire.session import Session

__all__ = ["Channel", "Loop"]

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# What the kernel says of a connection whose other host acknowledges nothing any more.
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Loop:
    """Run tasks, timers and whatever is ready on one thread.

    ============  =====================  =========  =============
    field         writer                 reader     guard
    ============  =====================  =========  =============
    ``_tasks``    any thread             the loop   ``_lock``
    ``_open``     the loop, a fork       any thread ``_lock``
    ``_timers``   the loop               the loop
    ============  =====================  =========  =============

    Attributes:
        selector: the data of a registration is a function to call when its file is ready.
        tend: called before each wait with the time; returns when to call it again.
    """

    def __init__(self, name: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.tend: Callable[[float], float] = lambda now: now + 3600.0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self._bell, _READ, self._on_bell)
        self._tasks: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # a signal handler may call while its thread does
        self._open, self._printed = True, False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

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
            self._close()

    def let_go(self) -> None:
        """In a forked child: close what belongs to the parent."""
        self._lock, self._open = threading.RLock(), False
        self._close()

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _run(self) -> None:
        while self._open:
            now = time.monotonic()
            until = min(self.tend(now), self._timers[0][0] if self._timers else now + 3600.0)
            for key, _ in self.selector.select(max(0.0, until - now)):
                if key.fd in self.selector.get_map():  # else one that came before has closed it
                    self._do(key.data)
            while self._tasks and self._open:
                self._do(self._tasks.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic() and self._open:
                self._do(heapq.heappop(self._timers)[2])
        self._close()

    def _close(self) -> None:
        self.selector.close()
        os.close(self._bell)

    def _do(self, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception:  # the other groups of this process go on
            if not self._printed:
                self._printed = True
                with contextlib.suppress(Exception):  # nobody may read what is printed
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self.thread)))


class Channel:
    """A proven connection on a loop's thread, which alone uses it.

    Args:
        loop: whose thread that is.
        sock: the connected socket.
        session: the digests of the messages.
        rest: bytes that came with the handshake.
        peer: the rank at its other end.
        take: called with that and each message.
        ended: called with that and this, when the other side has ended it, and with whether its host was silent.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        session: Session,
        rest: bytes | bytearray,
        peer: int,
        take: Callable[[int, Message], object],
        ended: Callable[[int, Channel, bool], object],
    ) -> None:
        sock.setblocking(False)
        self._loop, self._sock, self._session = loop, sock, session
        self._peer, self._take, self._ended = peer, take, ended
        self._in, self._out = bytearray(rest), bytearray()
        loop.selector.register(sock, _READ, self._ready)
        loop.call(self._ready)  # for the rest

    def send(self, message: Message) -> None:
        """Send a message, now or when the network takes it."""
        self._out += self._session.seal(frame(encode(message)))
        self._flush()

    def finish(self, timeout_s: float) -> None:
        """Send what waits, for a limited time, and close."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                self._sock.settimeout(timeout_s)
                self._sock.sendall(self._out)
        self.close()

    def close(self) -> None:
        """Close the connection; nothing more is taken."""
        if self._sock.fileno() >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._loop.selector.unregister(self._sock)
            self._sock.close()

    def let_go(self) -> None:
        """In a forked child: close the parent's connection, whose end must show when the parent ends."""
        self._sock.close()

    def _ready(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._flush()
        over, is_silent = False, False
        try:
            while data := self._sock.recv(1 << 16):
                self._in += data
            over = True
        except BlockingIOError:
            pass
        except OSError as error:
            over, is_silent = True, error.errno in _SILENT
        try:
            messages = self._messages()
        except Malformed:
            over, messages = True, []
        if over:
            self.close()
        for message in messages:
            self._take(self._peer, message)
        if over:
            self._ended(self._peer, self, is_silent)

    def _messages(self) -> list[Message]:
        return [decode(message) for message in self._session.take_messages(self._in)]

    def _flush(self) -> None:
        if self._sock.fileno() < 0:
            return
        waited = bool(self._loop.selector.get_key(self._sock).events & _WRITE)
        with contextlib.suppress(OSError):  # an end is noticed when receiving
            while self._out:
                del self._out[: self._sock.send(self._out)]
        if bool(self._out) != waited:
            self._loop.selector.modify(self._sock, _READ | (_WRITE if self._out else 0), self._ready)
