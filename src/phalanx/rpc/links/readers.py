"""The threads that read those TCP connections for whose messages no caller waits.

They all sleep in one epoll. A connection is *armed* there for one event only (EPOLLONESHOT), so the kernel wakes one
thread, and while that thread, or a caller that waits for an answer, reads the connection, nobody else is woken for it.
Whoever has read it arms it again; if something has come meanwhile, the kernel sees that at once. So a request runs on
the thread that has read it, without another switch, while the other threads read on. When the last thread that sleeps
takes a request, it starts another one, because a handler may call back, at any depth; a thread that has had nothing to
do for ``IDLE_S`` ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import threading
from functools import partial
from typing import Protocol

from phalanx.rpc.handlers import IDLE_S, Pool
from phalanx.words import tell

__all__ = ["Armed", "Readable", "Readers"]

FEW_THREADS = 2  # that stay when there is nothing to do
MOST_THREADS = 256  # a limit on mistakes, such as calls that go to and fro for ever
_ARMED = select.EPOLLIN | select.EPOLLONESHOT
_DISARMED = select.EPOLLONESHOT
_MODIFY = 3  # EPOLL_CTL_MOD


class _Event(ctypes.Structure):
    """``struct epoll_event``, which is packed on x86-64 only."""

    _pack_ = 1 if platform.machine() == "x86_64" else 8
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


# It keeps the interpreter's lock, which select.epoll.modify() gives away: the thread that has armed a connection again
# goes on before another one can take the next message from it.
_control = ctypes.PyDLL(None).epoll_ctl  # without argtypes, which would double its cost


class Readable(Protocol):
    """A connection, as the threads see it."""

    def fileno(self) -> int:
        """The descriptor of its socket."""

    def ready(self) -> None:
        """Something has come. It is called by one of the threads, with the connection not armed."""


class Armed:
    """A connection in the epoll of :class:`Readers`.

    Both methods fail without an error for a connection that has ended, and is read no more.

    Attributes:
        arm: has a thread woken when something comes, or has come.
        arm_now: has a thread woken at once.
        disarm: has no thread woken, because the caller reads the connection and will arm it again.
    """

    def __init__(self, epoll: int, descriptor: int) -> None:
        self._events = [_Event(events, descriptor) for events in (_ARMED, _ARMED | select.EPOLLOUT, _DISARMED)]
        self.arm, self.arm_now, self.disarm = (
            partial(_control, epoll, _MODIFY, descriptor, ctypes.byref(event)) for event in self._events
        )


class Readers:
    """The threads, which are started with the first connection. Safe to use from several threads.

    Args:
        threads: how many at most.
    """

    def __init__(self, threads: int = MOST_THREADS) -> None:
        self._epoll = select.epoll()
        self._connections: dict[int, Readable] = {}
        self._asleep: set[threading.Thread] = set()
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)  # rings for all threads when they have to end
        self._epoll.register(self._bell, select.EPOLLIN)
        self._pool = Pool("phalanx-rpc-tcp", self._read, threads, FEW_THREADS)

    def add(self, connection: Readable) -> Armed:
        """Read a connection as soon as it has been armed, by what this returns.

        Raises:
            OSError: its socket is closed.
        """
        descriptor = connection.fileno()
        self._connections[descriptor] = connection
        self._epoll.register(descriptor, _DISARMED)
        while len(self._pool) < FEW_THREADS and self._pool.add():
            pass
        return Armed(self._epoll.fileno(), descriptor)

    def remove(self, connection: Readable) -> None:
        """Read a connection no more; before its socket is closed, which makes the descriptor another one's."""
        descriptor = connection.fileno()
        if self._connections.get(descriptor) is connection:
            self._connections.pop(descriptor, None)  # another thread may have done so meanwhile
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def leave(self) -> bool:
        """Have another thread read while the calling one, one of these, does what may take long.

        Returns:
            Whether there is one. Otherwise the calling thread has to come back soon.
        """
        return bool(self._asleep) or self._pool.add()

    def close(self) -> None:
        """End the threads. Those that run a handler end after it, and are waited for a short time only."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._bell, 1)
            self._pool.close()
            self._pool.when_empty(self._close_descriptors)

    def _close_descriptors(self) -> None:
        self._epoll.close()
        os.close(self._bell)

    def _read(self) -> None:
        me = threading.current_thread()
        while not self._closed:
            self._asleep.add(me)
            try:
                events = self._epoll.poll(IDLE_S, 1)
            finally:
                self._asleep.discard(me)
            connection = self._connections.get(events[0][0]) if events else None
            if connection is not None:
                try:
                    connection.ready()
                except Exception as error:  # the other connections go on
                    tell(f"warning: a connection of RPC failed: {error!r}")
            elif not events and self._pool.may_end():
                return
