"""The sending half of a TCP link (``receiving.py`` has the other one, and ``socket.py`` the order of locks).

The sender itself writes to the socket, holding ``_writing`` for one frame. The kernel is given little at a time
(TCP_NOTSENT_LOWAT), so that a small message never waits behind more than that, and a piece, of a large one. What does
not fit in the sender's time is written by the next sender, or by a thread that the epoll wakes when there is room.

Every frame is kept before it is written, if the link can be mended, until the other side has said that it came. A large
message waits when much is kept; so do small ones, later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from phalanx.rpc.links import wire_format
from phalanx.rpc.links.assembling import Assembler
from phalanx.rpc.links.contract import Link, LinkEnded
from phalanx.rpc.links.endpoint import Endpoint
from phalanx.rpc.links.readers import Armed
from phalanx.rpc.links.unacknowledged import Unacknowledged
from phalanx.rpc.links.wire_format import layout_of, pieces_of
from phalanx.rpc.message import Message
from phalanx.wire.session import TAG_BYTES, Session, sha_is_quicker

__all__ = ["SendingLink"]

_UNSENT_BYTES = 1 << 17
_DROP_S = 0.05
# How much may be kept until the other side has said that it came: of large messages, and with small ones.
_WINDOW_BYTES = (4 << 20, 8 << 20)
# From how many bytes on HMAC-SHA-256 may be the quicker digest: it costs more to begin with.
_HASHED_BYTES = 1 << 13
_KIND_AT = wire_format.LENGTH_BYTES
_TCP_NOTSENT_LOWAT = 25
_TAKES_NOTHING = "the other process takes nothing"


class SendingLink(Link):
    """A TCP link that does not receive yet.

    Args:
        sock: the connection.
        session: the digests of its frames.
        assembler: what receives, and knows how much has come.
        endpoint: what sends small frames.
        mends: whether another connection may take the place of this one.

    Attributes:
        sock: the connection.
        down: the connection has broken, and no other one has taken its place yet.
        over: why the link has ended; empty before.
    """

    LONGEST_HEAD = wire_format.LONGEST_FRAME // 2
    MOST_BUFFERS = wire_format.MOST_BUFFERS

    def __init__(
        self, sock: socket.socket, session: Session, assembler: Assembler, endpoint: Endpoint, *, mends: bool
    ) -> None:
        self.down = False
        self.over = ""
        self._mends = mends
        self._assembler = assembler
        self._endpoint = endpoint
        self._armed: Armed | None = None
        self._reader = 0  # which thread reads
        self._kept = Unacknowledged()
        self._acknowledged = (0, 0)  # the frames and bytes of which the other side knows that they have come
        self._acknowledges = False  # it is to be told of more
        self._writing = threading.Lock()  # held for one frame
        self._large = threading.Lock()  # held for one large message
        self._unsent = b""  # the rest of a frame whose sender's time was over
        self._known = True  # how much of the last frame was sent
        self._use(sock, session)

    def _use(self, sock: socket.socket, session: Session) -> None:
        """Go by this connection from now on."""
        self.sock = sock
        self._session = session
        self._quick_bytes = 0 if session.encrypts else _HASHED_BYTES  # of small frames, which the core sends
        self._endpoint.use(sock.fileno(), session)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def send(self, message: Message, timeout_s: float) -> None:
        """See :class:`Link`."""
        until = time.monotonic() + timeout_s
        few = not message.buffers
        if (len(message.head) if few else message.nbytes) <= self.SMALL_BYTES:
            if not few:
                self.check(message)
            self._write_small(wire_format.small_frame(message), until)
            return
        self.check(message)
        with self._lent():
            self._send_large(message, until, timeout_s)

    @abstractmethod
    def _lent(self) -> AbstractContextManager[None]:
        """Have others read while this thread waits, if it is the one that reads: it may wait for what they receive."""

    @abstractmethod
    def _close_socket(self) -> None:
        """Close the socket after the end, unless another thread reads or writes; that one does it then."""

    def _send_large(self, message: Message, until: float, timeout_s: float) -> None:
        if not self._large.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
            raise TimeoutError(f"another large message has been on its way for {timeout_s:g} s")
        try:
            self._write([layout_of(message).encode() + message.head], until, wire_format.LARGE)
            try:
                for piece in pieces_of(message.buffers):
                    hashed = len(piece) >= _HASHED_BYTES and not self._session.encrypts and sha_is_quicker()
                    self._write([piece], until, wire_format.HASHED if hashed else wire_format.PIECE)
            except (TimeoutError, KeyboardInterrupt):
                self._write([], time.monotonic() + _DROP_S, wire_format.DROP)
                raise
        finally:
            self._kept.own()  # the caller may change it now
            self._large.release()

    def _write_small(self, frame: bytes, until: float) -> None:
        """:meth:`_write` for a small message; in one step if nothing is in its way."""
        if self._kept.nbytes > _WINDOW_BYTES[0] or not self._writing.acquire(False):
            self._write([frame], until)
            return
        try:
            if self._unsent or self.down or self.over or len(frame) >= self._quick_bytes:
                self._write_held([frame], until, wire_format.SMALL)
                return
            self._known = False
            if self._mends:
                self._kept.add((frame,), len(frame))
            sent = self._send_small(frame)
            if sent < len(frame) + TAG_BYTES:
                self._finish(_behind(sent, [frame, self._session.digest(frame)]), until)
            self._known = True
        except (LinkEnded, TimeoutError):
            self._known = True
            raise
        finally:
            self._end_frame()

    def _write(self, parts: list[bytes | memoryview], until: float, kind: int = wire_format.SMALL) -> None:
        """Send one frame: all of it, or if its time is over, its rest before the next frame. TimeoutError: nothing.

        Args:
            parts: what it has behind its prefix; a small message has its prefix already.
            until: when its time is over.
            kind: what frame it is.
        """
        if kind != wire_format.SMALL:
            parts.insert(0, wire_format.PREFIX.pack(1 + sum(map(len, parts)), kind))
        if self._kept.nbytes > _WINDOW_BYTES[0]:
            self._wait_for_room(_WINDOW_BYTES[kind not in (wire_format.PIECE, wire_format.HASHED)], until)
        if not self._writing.acquire(False) and not self._writing.acquire(
            timeout=max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        ):
            raise TimeoutError(_TAKES_NOTHING)
        try:
            self._write_held(parts, until, kind)
        except (LinkEnded, TimeoutError):
            self._known = True
            raise
        finally:
            self._end_frame()

    def _write_held(self, parts: list[bytes | memoryview], until: float, kind: int) -> None:
        """:meth:`_write`, holding ``_writing``."""
        if self.over:
            raise LinkEnded(self.over)
        if self._unsent and not self._finish([memoryview(self._unsent)], until):
            if kind != wire_format.DROP:
                raise TimeoutError(_TAKES_NOTHING)
            self._keep(parts)
            self._unsent += b"".join(self._session.sealed(parts, wire_format.PREFIX.size))
            return
        self._known = False
        self._keep(parts)
        if not self.down:
            self._send_frame(parts, until)
        self._known = True

    def _end_frame(self) -> None:
        if not self._known:  # a signal has come between two steps: nobody knows how much of a frame was sent
            self._known = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self._stop_writing()

    def _keep(self, parts: list[bytes | memoryview]) -> None:
        """Keep a frame until the other side has it, if the link can be mended."""
        if self._mends:
            self._kept.add(tuple(parts), sum(map(len, parts)))

    def _send_frame(self, parts: Sequence[bytes | memoryview], until: float) -> None:
        """Write a frame with its digest; the rest is kept in ``_unsent`` if the time is over."""
        sha, few = parts[0][_KIND_AT] == wire_format.HASHED, len(parts) < 2
        parts = self._session.sealed(parts, wire_format.PREFIX.size, sha=sha)
        if few:
            parts = [b"".join(parts)]
        sent, nbytes = self._try_to_send(parts), sum(map(len, parts))
        if sent < nbytes:
            self._finish(_behind(sent, parts), until)

    def _send_small(self, frame: bytes) -> int:
        """How many bytes of a frame and its digest the kernel takes; if it takes all, the frame is counted."""
        if self.over:
            raise LinkEnded(self.over)
        nbytes = len(frame) + TAG_BYTES
        sent = self._endpoint.send(self._session.sent, frame, nbytes - TAG_BYTES)
        if sent < 0:
            sent = 0 if sent == -errno.EAGAIN else self._broken(os.strerror(-sent), nbytes)
        if sent == nbytes:
            self._session.sent += 1
        return sent

    def _wait_for_room(self, most_bytes: int, until: float) -> None:
        kept = self._kept
        if threading.get_ident() == self._reader:
            return  # nobody else would receive what it waits for
        with kept.changed:
            left = max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
            if not kept.changed.wait_for(lambda: kept.nbytes <= most_bytes or self.over, left):
                raise TimeoutError(_TAKES_NOTHING)

    def _stop_writing(self) -> None:
        while True:
            if self._acknowledges and not self._unsent and not self.down and not self.over:
                self._send_acknowledgement()
            self._writing.release()
            if self.over:
                self._close_socket()
            # Another thread may have come with something to acknowledge, and gone because this one had the lock.
            if not self._acknowledges or self._unsent or self.down or not self._writing.acquire(False):
                break
        if self._unsent and self._armed is not None:
            self._armed.arm_both()

    def _send_acknowledgement(self) -> None:
        self._acknowledges = False
        received, nbytes = self._assembler.received, self._assembler.received_bytes
        self._acknowledged = received, nbytes
        body = wire_format.COUNT.pack(received)
        prefix = wire_format.PREFIX.pack(1 + len(body), wire_format.ACK)
        with contextlib.suppress(LinkEnded):
            self._send_frame([prefix + body], 0.0)

    def _try_to_send(self, parts: Sequence[bytes | memoryview]) -> int:
        """How many bytes of these the kernel takes; all of them if the connection has broken and will be mended."""
        if self.over:
            raise LinkEnded(self.over)
        try:
            return self.sock.sendmsg(parts) if len(parts) > 1 else self.sock.send(parts[0])
        except BlockingIOError:
            return 0
        except OSError as error:
            return self._broken(str(error.strerror), sum(map(len, parts)))

    def _broken(self, why: str, nbytes: int) -> int:
        """The connection has broken: ``nbytes``, as if they were sent, if it will be mended."""
        # The thread that reads learns of it as well, after it has read what had come before.
        if not self._mends:
            raise LinkEnded(self.over or f"the connection has ended: {why}")
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        return nbytes

    def _finish(self, rest: list[memoryview], until: float) -> bool:
        """Write the rest of a frame as far as the time allows; what is left is kept. Whether all was written."""
        self._known, self._unsent = False, b""
        while rest := _behind(self._try_to_send(rest), rest):
            left = until - time.monotonic()
            try:
                writable = left > 0 and self._writable.poll(min(left, 3600) * 1000)
            except BaseException:  # a signal has come while it waited: what is unsent is known
                self._unsent, self._known = b"".join(rest), True
                raise
            if not writable:
                self._unsent, self._known = b"".join(rest), True
                return False
        self._known = True
        return True


def _behind(nbytes: int, parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """What is behind the first ``nbytes`` of these."""
    rest = []
    for part in parts:
        if nbytes >= len(part):
            nbytes -= len(part)
        else:
            rest.append(memoryview(part)[nbytes:])
            nbytes = 0
    return rest
