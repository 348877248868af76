"""Processes between a caller and a listener, which pass bytes on."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from typing import Any

__all__ = ["Faked", "Proxy"]


class Faked(socket.socket):
    """A connection through a proxy that looks as if it were none, because the proof covers the address."""

    real: tuple[str, int]

    def getpeername(self) -> Any:
        return self.real


class Proxy:
    """Passes connections on, as somebody on the way could, and resets each after a random number of bytes.

    To use it, put :meth:`connect` in the place of ``phalanx.wire.dial.connect``.

    Args:
        numbers: decide when.
        longest: after how many bytes at most; 0 for never.
    """

    def __init__(self, numbers: random.Random, longest: int) -> None:
        self.resets = 0
        self.longest = longest
        self._numbers = numbers
        self._sockets: set[socket.socket] = set()

    def connect(self, where: tuple[str, int], timeout_s: float, keep_alive: Any, source: str = "") -> socket.socket:
        far = socket.create_connection(where, timeout_s)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = Faked()
            near.settimeout(timeout_s)
            near.connect(listener.getsockname())
            inner, _ = listener.accept()
        near.real = where
        keep_alive.apply(near)
        far.settimeout(None)
        ends = (inner, far)
        for here, there in (ends, ends[::-1]):
            threading.Thread(target=self._pass, args=(here, there, ends), daemon=True).start()
        return near

    def seen(self, data: bytes, *, from_caller: bool) -> bytes:
        """What is passed on of what has come; all of it, here."""
        return data

    def _pass(self, here: socket.socket, there: socket.socket, ends: tuple[socket.socket, socket.socket]) -> None:
        left = self._numbers.randrange(1, self.longest) if self.longest else 1 << 62
        try:
            while data := here.recv(min(left, 1 << 16)):
                there.sendall(self.seen(data, from_caller=here is ends[0]))
                left -= len(data)
                if left <= 0:
                    self.resets += 1
                    for sock in ends:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
        except OSError:
            pass
        for sock in ends:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD if left <= 0 else socket.SHUT_RDWR)  # it wakes the other thread
            sock.close()
