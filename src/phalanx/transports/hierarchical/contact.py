"""A connection to a process of another host that carries no tensors: signs of life, and the reason of a break.

Both sides have proven the job's key (``wire/proof.py``). Each sends a byte of value 0 every half second, from the core,
so also while its interpreter is held (``native/csrc/system/beat.c``). Between these bytes stand messages: a byte of
value 1, the length, JSON, and the session's digest. A message is written at once or not at all, so no byte
gets into it.

What follows from the bytes, and from what the kernel knows of them (``wire/sockets.py``), is a :class:`Sign`.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import threading
from typing import Any

from phalanx.native.core import library
from phalanx.system.foreign_values import read_json
from phalanx.wire.framing import PREFIX_BYTES, Malformed, end_of_frame, frame
from phalanx.wire.session import TAG_BYTES, Session
from phalanx.wire.sockets import Acknowledged

__all__ = ["SILENT_S", "STILL_S", "Contact", "Sign"]

# The kernel repeats a byte four times in that time, so a cable that is out for a second is not taken for a cut.
SILENT_S = 3.0
# Six heartbeats; a process gets a core sooner on any machine that is usable.
STILL_S = 3.25
_PROMPT_S = 1.0  # how soon a host that is there acknowledges
_LONGEST = 1 << 16
_BEAT, _MESSAGE = b"\0", b"\1"


class Sign(enum.Enum):
    """What is known of a process."""

    HERE = "here"
    SILENT = "silent"  # its host acknowledges nothing
    STILL = "still"  # its host does, and the process sends no heartbeat: it is stopped
    GONE = "gone"  # it has ended, and has not said that it leaves
    LEFT = "left"  # it has said so


class Contact:
    """One such connection. ``send`` may be called from any thread, everything else from one thread.

    Args:
        sock: the connection, whose handshake is done; closed by :meth:`close`.
        session: the digests of its messages.
        peer: the id of the other process.
        rest: bytes that came with the handshake.
        now: the time, on a clock that stands still while this process does.

    Attributes:
        ended: the connection has ended. That may be the network's doing, so it says nothing of the process.
        sign: what is known of the process while the connection stands.
        signed_at: since when.
    """

    def __init__(self, sock: socket.socket, session: Session, peer: str, rest: bytes | bytearray, now: float) -> None:
        self.sock, self.peer = sock, peer
        self.ended = False
        self.sign = Sign.HERE
        self.signed_at = now
        self._session = session
        self._incoming = bytearray(rest)
        self._heard_at = now
        self._lock = threading.Lock()  # held for sending, and for closing
        sock.setblocking(False)
        self._acknowledged = Acknowledged(sock)
        self._beats = not library().phx_beat(sock.fileno())

    def read(self, now: float) -> list[dict[str, Any]]:
        """What has come; notices the end of the connection."""
        try:
            while data := self.sock.recv(_LONGEST):
                self._heard_at = now
                self._incoming += data
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        try:
            return self._messages()
        except (Malformed, ValueError):
            self.ended = True
            return []

    def look(self, now: float) -> None:
        """Find out what can be known of the process now; ``sign`` says it."""
        if self.sign is Sign.LEFT:
            return
        silent_s = self._acknowledged.silent_s()
        if silent_s >= SILENT_S:
            self._set(Sign.SILENT, now)
        elif now - self._heard_at < STILL_S:
            self._set(Sign.HERE, now)
        elif silent_s < _PROMPT_S:  # else it may become silent
            self._set(Sign.STILL, now)

    def leaves(self, now: float) -> None:
        """The process has said that it leaves."""
        self._set(Sign.LEFT, now)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, if the connection takes it: to a process that has taken nothing for long, it does not."""
        with self._lock, contextlib.suppress(OSError):
            if self.sock.fileno() < 0:
                return
            data = _MESSAGE + self._session.seal(frame(json.dumps(message).encode(), longest=_LONGEST))
            try:
                if self.sock.send(data) < len(data):
                    self.sock.shutdown(socket.SHUT_RDWR)  # no later byte could be understood
            except BlockingIOError:
                self._session.sent -= 1  # the next message is the first that the other side gets after the last one

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._beats:
                library().phx_beat_end(self.sock.fileno())
                self._beats = False
            self.sock.close()

    def _set(self, sign: Sign, now: float) -> None:
        if self.sign not in (sign, Sign.LEFT):
            self.sign, self.signed_at = sign, now

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        data = self._incoming
        while True:
            del data[: len(data) - len(data.lstrip(_BEAT))]
            if not data:
                return found
            if not data.startswith(_MESSAGE):
                raise Malformed("neither a heartbeat nor a message")
            end = end_of_frame(data, 1, longest=_LONGEST)
            if end is None or len(data) < end + TAG_BYTES:
                return found
            del data[0]
            self._session.check(data, end - 1)
            message = read_json(data[PREFIX_BYTES : end - 1])
            del data[: end - 1 + TAG_BYTES]
            if not isinstance(message, dict):
                raise Malformed("not a message")
            found.append(message)
