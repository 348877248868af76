"""What the launcher and the ranks' keepers say to each other over TCP, and how each proves who it is.

Both hold the job's key, which travels in the environment that the MPI launcher hands to its processes. Before
anything is read as a message, each side answers the other's random challenge with a keyed digest (HMAC-SHA-256), so
neither a stranger on the network nor a port that somebody else has taken over gets further than 64 bytes of noise.
What follows is not encrypted, like the traffic of MPI itself.

Then come frames: a length, a kind, and the bytes. Two kinds carry what a rank prints and one what it reads, the last
carries JSON.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["ERR", "IN", "MESSAGE", "OUT", "Channel", "Door", "Lost", "join", "new_key"]

OUT, ERR, IN, MESSAGE = b"o", b"e", b"i", b"m"
_HEAD = struct.Struct("!Ic")
_LARGEST_FRAME = 1 << 26
_BLOCK = 1 << 17
_CHALLENGE = 32
JOIN_S = 20.0
# A link that is cut is noticed within 4 s: after one of silence, three probes. The kernel answers them, so a host that
# is merely busy does not count as lost.
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}


class Lost(Exception):
    """The other side has gone, or the way to it."""


def new_key() -> str:
    """A key that no other job has, in letters and digits."""
    return secrets.token_hex(32)


def _digest(key: str, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key.encode(), who + first + second, "sha256")


class Channel:
    """One proven connection: frames out, frames in, nothing that waits.

    Args:
        sock: the connected socket, non-blocking from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._socket = sock
        self._in = bytearray()
        self._out = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def waiting(self) -> int:
        """Bytes that the network has not taken yet; call :meth:`flush` when it can be written to."""
        return len(self._out)

    def send(self, kind: bytes, data: bytes) -> None:
        """Send one frame, at once as far as the network takes it."""
        self._out += _HEAD.pack(len(data), kind) + data
        self.flush()

    def say(self, **message: Any) -> None:
        """Send one message."""
        self.send(MESSAGE, json.dumps(message).encode())

    def flush(self) -> None:
        """Send what waits. A gone receiver is noticed when receiving, not here."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Take what has come: whole frames, in order.

        Raises:
            Lost: nothing more will come, and everything that came has been returned.
        """
        if self._ended:
            raise Lost
        try:
            data = self._socket.recv(_BLOCK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self._in += data
        frames = []
        while len(self._in) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._in)
            if length > _LARGEST_FRAME:
                data = b""
                break
            end = _HEAD.size + length
            if len(self._in) < end:
                break
            frames.append((kind, bytes(self._in[_HEAD.size : end])))
            del self._in[:end]
        if not data:
            self._ended = True
            if not frames:
                raise Lost
        return frames

    def finish(self, timeout_s: float) -> None:
        """Send what waits, for at most that long, and close."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(timeout_s)
            self._socket.sendall(self._out)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@dataclass
class _Stranger:
    sock: socket.socket
    challenge: bytes
    until: float
    said: bytes = b""


class Door:
    """Where keepers come in: a listening socket, and those who have not proven yet who they are.

    Args:
        address: the interface to listen on.
        key: the job's key.
    """

    PATIENCE_S = 10.0
    MOST_STRANGERS = 1024

    def __init__(self, address: str, key: str) -> None:
        self._key = key
        self._listener = socket.socket()
        self._listener.bind((address, 0))
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self._strangers: dict[int, _Stranger] = {}

    def fileno(self) -> int:
        """The listening descriptor."""
        return self._listener.fileno()

    @property
    def invitation(self) -> str:
        """What :func:`join` needs, as one word."""
        address, port = self._listener.getsockname()
        return f"{address}:{port}:{self._key}"

    def knock(self) -> socket.socket | None:
        """Accept one connection and challenge it; returns what to wait for, None if it has gone already."""
        self._turn_away()
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return None
        challenge = os.urandom(_CHALLENGE)
        sock.setblocking(False)
        try:
            if len(self._strangers) >= self.MOST_STRANGERS:
                raise ConnectionRefusedError
            sock.send(challenge)
        except OSError:
            sock.close()
            return None
        self._strangers[sock.fileno()] = _Stranger(sock, challenge, time.monotonic() + self.PATIENCE_S)
        return sock

    def answer(self, sock: socket.socket) -> Channel | bool:
        """Read what a stranger answers: a channel once it has proven itself, else whether to wait for more."""
        stranger = self._strangers.get(sock.fileno())
        if stranger is None:
            return False
        try:
            data = sock.recv(2 * _CHALLENGE - len(stranger.said))
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        stranger.said += data
        if data and len(stranger.said) < 2 * _CHALLENGE:
            return True
        del self._strangers[sock.fileno()]
        theirs, proof = stranger.said[:_CHALLENGE], stranger.said[_CHALLENGE:]
        if not data or not hmac.compare_digest(proof, _digest(self._key, b"rank", stranger.challenge, theirs)):
            return False
        try:
            sock.send(_digest(self._key, b"launcher", theirs, stranger.challenge))
        except OSError:
            return False
        return Channel(sock)

    def _turn_away(self) -> None:
        now = time.monotonic()
        for number in [number for number, stranger in self._strangers.items() if stranger.until < now]:
            # Shut down, not closed: whoever waits for it notices, and closes it.
            with contextlib.suppress(OSError):
                self._strangers[number].sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()
        for stranger in self._strangers.values():
            stranger.sock.close()
        self._strangers.clear()


def join(invitation: str) -> Channel:
    """Connect to the launcher's door and prove that this process belongs to the job.

    Raises:
        OSError: nobody answers there, or somebody who does not know the key.
    """
    address, port, key = invitation.rsplit(":", 2)
    sock = socket.create_connection((address, int(port)), timeout=JOIN_S)
    try:
        challenge, own = _exactly(sock, _CHALLENGE), os.urandom(_CHALLENGE)
        sock.sendall(own + _digest(key, b"rank", challenge, own))
        if not hmac.compare_digest(_exactly(sock, _CHALLENGE), _digest(key, b"launcher", own, challenge)):
            raise ConnectionRefusedError("what answers there does not know the job's key")
    except BaseException:
        sock.close()
        raise
    return Channel(sock)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionRefusedError("the connection was refused: the launcher has ended, or the key is another's")
        data += part
    return data
