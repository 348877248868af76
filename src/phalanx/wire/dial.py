"""The calling side: connect, prove the key, and read the listener's verdict. It blocks, up to a limit."""

from __future__ import annotations

import socket
import time

from phalanx.wire.key import Key
from phalanx.wire.proof import GREETING, GREETING_BYTES, NoProof, Response
from phalanx.wire.sockets import KeepAlive, connect

__all__ = ["dial"]


def dial(
    where: tuple[str, int],
    key: Key,
    role: str,
    claim: bytes,
    *,
    patience_s: float,
    keep_alive: KeepAlive,
    source: str = "",
) -> tuple[socket.socket, bytes]:
    """Connect to a :class:`phalanx.wire.door.Door`: the proven connection, and the verdict.

    Args:
        where: the address and the port.
        key: the job's key.
        role: what should listen there.
        claim: what this process says of itself.
        patience_s: how long connecting may take, and the handshake again, in seconds.
        keep_alive: when the listener counts as lost afterwards.
        source: the address to connect from; any of this host's by default.

    Raises:
        OSError: nothing listens there, or the connection was closed. TimeoutError: what listens there says nothing.
        NoProof: what listens there is not Phalanx.
        WrongKey: it is, and proves another key.
    """
    sock = connect(where, patience_s, keep_alive, source)
    try:
        until = time.monotonic() + patience_s
        greeting = b""
        while len(greeting) < GREETING_BYTES:
            greeting += _receive(sock, GREETING_BYTES - len(greeting), until)
            # Something else may have said less than a whole greeting, and wait for an answer.
            if not greeting.startswith(GREETING[: len(greeting)]):
                raise NoProof
        response = Response(key, role, greeting, claim)
        sock.sendall(response.message)
        answer = b""
        while missing := response.missing(answer):
            answer += _receive(sock, missing, until)
        return sock, response.check(answer)
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket, most: int, until: float) -> bytes:
    sock.settimeout(max(0.001, until - time.monotonic()))
    data = sock.recv(most)
    if not data:
        raise ConnectionResetError("the connection was closed")
    return data
